"""Whole runs that learn from given replies: Ray and FSDP2, no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from children import TIMEOUT_S
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow.models.resolve import resolve_model
from rlflow.telemetry import metrics

pytestmark = pytest.mark.slow

TALKS = [
    ["What is 2 + 3?", "5", "And 4 + 4?", "8"],
    ["What is 1 + 1?", "2"],
    ["Say yes.", "yes"],
    ["Say no, and why.", "no, because you said so"],
]


def write_talks(path: Path, *talks: Sequence[str]) -> str:
    rows = [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]}
        for talk in talks
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


PAIRS = [("What is 2 + 3?", "5", "six"), ("What is 1 + 1?", "2", "no"), ("Say yes.", "yes", "no, because you said so")]


def train(run: Path, data: str, *overrides: str, recipe: str = "sft") -> str:
    command = [sys.executable, "-m", "rlflow", "train", f"recipe={recipe}", f"run.dir={run}", f"env.args.path={data}"]
    command += ["model.path=tiny", "algorithm.groups_per_step=4", "trainer.warmup_steps=0", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain_rows(model: Any, tokenizer: Any, talk: Sequence[str]) -> tuple[Tensor, list[int]]:
    """log softmax [N, V] in the place of each token of the replies, by transformers for this talk alone; the tokens."""
    ids: list[int] = []
    learned: list[bool] = []
    for question, reply in zip(talk[::2], talk[1::2], strict=True):
        start = "\n" if ids else ""
        context = f"{start}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for text, is_reply in ((context, False), (f"{reply}<|im_end|>", True)):
            added = tokenizer.encode(text, add_special_tokens=False)
            ids, learned = ids + added, learned + [is_reply] * len(added)
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1)[torch.tensor(learned[1:])], [
        id_ for id_, is_reply in zip(ids, learned, strict=True) if is_reply
    ]


def plain_logprobs(model: Any, tokenizer: Any, talk: Sequence[str]) -> Tensor:
    """log p of each token of the replies."""
    rows, ids = plain_rows(model, tokenizer, talk)
    return rows[range(len(ids)), ids]


def plain_model() -> tuple[Any, Any]:
    folder = resolve_model("tiny")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def plain_loss(*talks: Sequence[str]) -> float:
    """The mean over the replies' tokens of -log p."""
    with torch.no_grad():
        found = torch.cat([plain_logprobs(*plain_model(), talk) for talk in talks])
    return -float(found.mean())


def norm_of_first_dpo_gradient(beta: float) -> float:
    """Where the policy is its reference: of the mean over pairs of -log sigmoid(beta * margin)."""
    model, tokenizer = plain_model()
    loss = torch.zeros((), dtype=torch.float64)
    for question, *replies in PAIRS:
        chosen, rejected = (plain_logprobs(model, tokenizer, [question, reply]).sum() for reply in replies)
        margin = (chosen - chosen.detach()) - (rejected - rejected.detach())
        loss = loss - torch.nn.functional.logsigmoid(beta * margin) / len(PAIRS)
    loss.backward()
    return float(torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm())


HINT = " Be brief."


def plain_divergence(top_k: int) -> float:
    """The mean over the replies' tokens of KL(teacher || policy), over the teacher's likeliest tokens and a bucket.

    Both are the start, and the teacher has read the hint.
    """
    model, tokenizer = plain_model()
    found: list[Tensor] = []
    for talk in TALKS:
        own = plain_rows(model, tokenizer, talk)[0]
        its = plain_rows(model, tokenizer, [talk[0] + HINT, *talk[1:]])[0]
        ids = its.topk(top_k, dim=-1).indices
        p, q = (
            torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1)
            for each in (its.exp().gather(-1, ids), own.exp().gather(-1, ids))
        )
        found.append((p * (p / q).log()).sum(-1))
    return torch.cat(found).mean().item()


def test_a_teacher_that_was_told_more_is_learnt_from(tmp_path: Path) -> None:
    """The policy's own start, with a hint. Without one the first divergence would be 0."""
    data = write_talks(tmp_path / "talks.jsonl", *TALKS)
    words = ["+teacher.models.default=tiny", "+teacher.args.kl=forward", "+teacher.args.top_k=16", "run.steps=2"]
    words += [f"+teacher.args.prompt='{{prompt}}{HINT}'", "trainer.learning_rate=1e-2"]
    train(tmp_path / "run", data, *words, "staleness.max_versions=0")
    first, second = metrics.read(tmp_path / "run" / "metrics.jsonl")
    expected = plain_divergence(16)
    assert expected > 4e-5  # which is far above the rounding of float32, about 1e-6
    assert first["distil/kl"] == pytest.approx(expected, abs=5e-6) and second["distil/kl"] != first["distil/kl"]
    assert "distil/clamped" not in first


def test_the_loss_is_that_of_transformers_and_falls(tmp_path: Path) -> None:
    data = write_talks(tmp_path / "talks.jsonl", *TALKS)
    # In turns, so that the first step has all four: of two passes at once another conversation may be ready first.
    out = train(tmp_path / "run", data, "run.steps=12", "trainer.learning_rate=3e-3", "staleness.max_versions=0")
    records = metrics.read(tmp_path / "run" / "metrics.jsonl")
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(plain_loss(*TALKS), abs=1e-5)
    assert losses[-1] is not None and losses[0] is not None and losses[-1] < losses[0] - 1
    assert [record["sampling/logp_difference_mean"] for record in records] == [None] * 12
    assert [record["frac_reward_zero_std"] for record in records] == [0.0] * 12
    assert "alarms: none" in out and "no step of this run carried a signal" not in out


def test_what_was_learned_from_demonstrations_is_evaluated(tmp_path: Path) -> None:
    data = write_talks(tmp_path / "talks.jsonl", *TALKS)
    train(tmp_path / "run", data, "run.steps=1")
    command = [sys.executable, "-m", "rlflow", "eval", str(tmp_path / "run"), "rollout.max_new_tokens=8"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert refused.returncode == 2 and "give a reward.function" in refused.stderr
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def short(completion):\n    return float(len(completion) < 100)\n")
    command.append(f"reward.function={rewards}:short")
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 tasks of demonstrations" in done.stdout + done.stderr


def test_a_talk_that_is_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    data = write_talks(tmp_path / "talks.jsonl", *TALKS, ["Talk.", "and on " * 200])
    train(tmp_path / "run", data, "run.steps=2", "model.max_length=256")
    records = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert sum(record.get("episodes/prompt_too_long") or 0 for record in records) >= 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_are_learned_as_direct_preference_optimisation_says(ranks: int, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "chosen": better, "rejected": worse} for prompt, better, worse in PAIRS]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    several = ["algorithm.groups_per_step=3", "run.steps=4", "trainer.learning_rate=1e-3", f"trainer.ranks={ranks}"]
    several.append("staleness.max_versions=0")  # the first step has all three pairs
    out = train(tmp_path / "run", str(data), *several, recipe="dpo")
    records = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["grad_norm"] == pytest.approx(norm_of_first_dpo_gradient(0.1), rel=1e-4)
    better, worse = ([record[f"preference/{name}_log_ratio"] for record in records] for name in ("better", "worse"))
    assert (better[0], worse[0]) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert records[-1]["preference/accuracy"] == 1.0
    assert better[-1] is not None and worse[-1] is not None and better[-1] - worse[-1] > 0.5
    assert "alarms: none" in out
