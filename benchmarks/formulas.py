"""Every formula that rlflow shares with verl or TRL, beside their own code: the largest relative differences.

    .venv/bin/python benchmarks/formulas.py

All three get the same random tokens in float64, and each side runs in a virtual environment of its own, made on first
use. A difference is the largest absolute one, divided by the largest absolute number of the other side. The last line
printed is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from other_systems import figures_of, other_python, worker_script
from torch import Tensor

from rlflow.algorithms.advantage.base import Scored
from rlflow.algorithms.aggregation import Denominator, denominator, token_weights
from rlflow.algorithms.registry import Kind, resolve
from rlflow.algorithms.token_advantage.gae import Moments, gae, whiten
from rlflow.algorithms.tokens import Tokens
from rlflow.algorithms.value_loss import value_loss
from rlflow.config import Aggregation

GROUPS, GROUP_SIZE, LENGTH = 6, 4, 24
TIMEOUT_S = 600.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Formula:
    """One formula, and what the others call it; None where they do not have it."""

    kind: str
    """`loss`, `kl`, `correction`, `advantage` or `value`."""
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Aggregation = Aggregation.token_mean
    verl: Mapping[str, Any] | None = None
    trl: Mapping[str, Any] | None = None
    why: str = ""
    """Why it differs by more than rounding."""

    @property
    def key(self) -> str:
        detail = self.aggregation if self.kind == "loss" else self.options.get("of", "")
        return f"{self.kind} {self.name} {detail}".rstrip()


CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
VERL_CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
TRL_CLIPS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
AGGREGATIONS = {
    Aggregation.token_mean: ("token-mean", "dapo"),
    Aggregation.seq_mean_token_mean: ("seq-mean-token-mean", "grpo"),
    Aggregation.seq_mean_token_sum: ("seq-mean-token-sum", "luspo"),
    Aggregation.seq_mean_token_sum_norm: ("seq-mean-token-sum-norm", "dr_grpo"),
}
"""What verl calls them, and the clipped loss of TRL that has them."""
DIVISOR = "verl whitens with the divisor n - 1, OpenRLHF and rlflow with n"
EQUAL = "verl whitens a group of equal rewards too, rlflow leaves it at 0"


def formulas() -> list[Formula]:
    """All of them, with options at which clips, caps and bounds act on some tokens and not on others."""
    estimates = [
        Formula(kind="kl", name="k1", verl={"name": "k1"}),
        Formula(kind="kl", name="k2", verl={"name": "k2"}),
        Formula(kind="kl", name="k3", verl={"name": "k3"}, trl={"loss_type": "dapo", "kl": True}),
        Formula(kind="kl", name="k3_straight_through", verl={"name": "k3+"}),
    ]
    critic = Formula(kind="value", name="value_loss", options={"clip": 0.2}, verl={"clip": 0.2})
    return [*_losses(), *estimates, *_corrections(), *_advantages(), critic]


def _losses() -> list[Formula]:
    by_token, by_sequence = Aggregation.token_mean, Aggregation.seq_mean_token_mean
    wide, their_wide = {"clip_low": 0.4, "clip_high": 0.4}, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    close = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}
    whole = {**TRL_CLIPS, "loss_type": "grpo", "importance_sampling_level": "sequence"}

    def loss(
        name: str,
        aggregation: Aggregation,
        options: Mapping[str, Any],
        mode: str,
        clips: Mapping[str, float],
        trl: Mapping[str, Any] | None = None,
    ) -> Formula:
        verl = {"mode": mode, "aggregation": AGGREGATIONS[aggregation][0], **clips}
        return Formula(kind="loss", name=name, aggregation=aggregation, options=options, verl=verl, trl=trl)

    clipped = [
        loss("ppo_clip", aggregation, {**CLIPS, "dual_clip": 3.0}, "vanilla", VERL_CLIPS, trl)
        for aggregation, (_, loss_type) in AGGREGATIONS.items()
        for trl in [{**TRL_CLIPS, "loss_type": loss_type, "delta": 3.0}]
    ]
    cispo_clips = {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}
    return [
        *clipped,
        loss("gspo", by_sequence, CLIPS, "gspo", VERL_CLIPS, whole),
        loss("cispo", by_token, {"clip_high": 0.5}, "cispo", cispo_clips, {"loss_type": "cispo", "epsilon_high": 1.5}),
        loss("sapo", by_sequence, {}, "sapo", {}, {"loss_type": "sapo"}),
        loss("gmpo", by_sequence, wide, "geo_mean", their_wide),
        loss("dppo_tv", by_token, {"clip_low": 0.05, "clip_high": 0.05}, "dppo_tv", close),
        loss("dppo_kl", by_token, {"threshold": 0.05}, "dppo_kl", close),
        loss("reinforce", by_token, {}, "gpg", {}),
        Formula(kind="loss", name="vespo", trl={"loss_type": "vespo"}),
    ]


def _corrections() -> list[Formula]:
    near, far = {"low": 0.8, "high": 1.2}, {"low": 0.5, "high": 2.0}
    weights = [
        ("tis", {"cap": 1.2}, "token", 1.2),
        ("tis_sequence", {"cap": 1.5}, "sequence", 1.5),
        ("mis", near, "token", "0.8_1.2"),
        ("icepop", near, "token", "0.8_1.2"),
        ("mis_sequence", far, "sequence", "0.5_2.0"),
    ]
    rejections = [
        ("token", "k2", 0.05, "token_k2"),
        ("sum", "k3", 0.9, "seq_sum_k3"),
        ("mean", "k3", 0.04, "seq_mean_k3"),
        ("max", "k2", 0.2, "seq_max_k2"),
    ]
    return [
        *(
            Formula(kind="correction", name=name, options=options, verl={"level": level, "threshold": threshold})
            for name, options, level, threshold in weights
        ),
        *(
            Formula(
                kind="correction",
                name="divergence",
                options={"of": of, "estimate": estimate, "threshold": threshold},
                verl={"rejection": rejection, "threshold": threshold},
            )
            for of, estimate, threshold, rejection in rejections
        ),
        Formula(kind="correction", name="opsm", options={"delta": 0.02}, trl={"off_policy_mask_threshold": 0.02}),
    ]


def _advantages() -> list[Formula]:
    return [
        Formula(kind="advantage", name=ours, options=options, verl={"name": theirs, "options": their_options}, why=why)
        for ours, options, theirs, their_options, why in (
            ("grpo", {}, "grpo", {}, ""),
            ("dr_grpo", {}, "grpo", {"norm_adv_by_std_in_grpo": False}, ""),
            ("passk", {"normalise": True}, "grpo_passk", {}, ""),
            ("rloo", {}, "rloo", {}, ""),
            ("opo", {}, "opo", {}, ""),
            ("reinforce_pp", {}, "reinforce_plus_plus", {}, DIVISOR),
            ("reinforce_pp_baseline", {}, "reinforce_plus_plus_baseline", {}, EQUAL),
            ("remax", {}, "remax", {}, ""),
            ("gae", {"discount": 0.99, "trace": 0.95}, "gae", {"gamma": 0.99, "lam": 0.95}, DIVISOR),
        )
    ]


def random_batch(seed: int) -> dict[str, np.ndarray]:
    """Tokens [B, T] of B episodes in groups; a mask with observations inside, and one group of equal rewards."""
    random = np.random.default_rng(seed)
    rows = GROUPS * GROUP_SIZE
    lengths = random.integers(6, LENGTH + 1, rows)
    lengths[0] = LENGTH
    mask = np.arange(LENGTH) < lengths[:, None]
    mask[1::3, 2:4] = False  # observations
    rewards = random.integers(0, 5, rows) / 4.0
    rewards[:GROUP_SIZE] = 0.75
    behaviour = -random.exponential(1.0, (rows, LENGTH)) - 1e-3
    return {
        "mask": mask,
        "groups": np.repeat(np.arange(GROUPS), GROUP_SIZE),
        "rewards": rewards,
        "baselines": random.integers(0, 5, GROUPS).repeat(GROUP_SIZE) / 4.0,
        "advantages": np.repeat(random.normal(0, 1, rows)[:, None], LENGTH, axis=1),
        "behaviour": behaviour,
        "logprobs": np.minimum(behaviour + random.normal(0, 0.3, behaviour.shape), -1e-4),
        "reference": np.minimum(behaviour + random.normal(0, 0.5, behaviour.shape), -1e-4),
        "values": random.normal(0.5, 0.4, behaviour.shape),
        "old_values": random.normal(0.5, 0.4, behaviour.shape),
        "returns": random.normal(0.5, 0.4, behaviour.shape),
    }


class Ours:
    """What rlflow makes of a batch: for each formula its value and, where it has one, its gradient."""

    def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
        self._batch = batch
        self._mask = torch.from_numpy(batch["mask"])

    def __call__(self, formula: Formula) -> dict[str, np.ndarray]:
        compute: Callable[[Formula], dict[str, np.ndarray]] = getattr(self, f"_{formula.kind}")
        return compute(formula)

    def _at_loss(self, name: str) -> Tensor:
        return torch.from_numpy(self._batch[name])[self._mask]

    def _tokens(self, logprobs: Tensor) -> Tokens:
        rows = torch.arange(len(self._mask))[:, None].expand_as(self._mask)
        return Tokens(
            logprobs=logprobs,
            proximal=self._at_loss("behaviour"),
            behaviour=self._at_loss("behaviour"),
            advantages=self._at_loss("advantages"),
            entropies=torch.zeros_like(logprobs),
            sequence_of=rows[self._mask],
            num_sequences=len(self._mask),
        )

    def _in_rows(self, values: Tensor | np.ndarray) -> np.ndarray:
        spread = np.zeros(self._batch["mask"].shape)
        spread[self._batch["mask"]] = np.asarray(values)
        return spread

    def _with_gradient(self, leaf: Tensor, value: Tensor) -> dict[str, np.ndarray]:
        (gradient,) = torch.autograd.grad(value, leaf)
        return {"value": value.detach().numpy(), "gradient": self._in_rows(gradient)}

    def _loss(self, formula: Formula) -> dict[str, np.ndarray]:
        logprobs = self._at_loss("logprobs").requires_grad_()
        tokens = self._tokens(logprobs)
        of_token = resolve(Kind.loss, formula.name).function(tokens, **formula.options).loss
        by_tokens = denominator(formula.aggregation) is Denominator.tokens
        weights = token_weights(formula.aggregation, tokens, LENGTH)
        count = len(logprobs) if by_tokens else tokens.num_sequences
        return self._with_gradient(logprobs, (of_token * weights).sum() / count)

    def _kl(self, formula: Formula) -> dict[str, np.ndarray]:
        logprobs = self._at_loss("logprobs").requires_grad_()
        estimate = resolve(Kind.kl, formula.name).function(logprobs, self._at_loss("reference"))
        return self._with_gradient(logprobs, estimate.mean())

    def _correction(self, formula: Formula) -> dict[str, np.ndarray]:
        logprobs = self._at_loss("logprobs")
        found = resolve(Kind.correction, formula.name).function(self._tokens(logprobs), logprobs, **formula.options)
        return {"value": self._in_rows(found)}

    def _value(self, formula: Formula) -> dict[str, np.ndarray]:
        values = self._at_loss("values").requires_grad_()
        loss = value_loss(values, self._at_loss("old_values"), self._at_loss("returns"), **formula.options).loss
        return self._with_gradient(values, loss.mean())

    def _advantage(self, formula: Formula) -> dict[str, np.ndarray]:
        batch, mask = self._batch, self._batch["mask"]
        if formula.name == "gae":
            return {"value": self._gae(formula.options)}
        episodes = [
            Scored(reward=reward, num_loss_tokens=int(row.sum()), baseline=baseline)
            for reward, row, baseline in zip(batch["rewards"], mask, batch["baselines"], strict=True)
        ]
        groups = [episodes[start : start + GROUP_SIZE] for start in range(0, len(episodes), GROUP_SIZE)]
        found = resolve(Kind.advantage, formula.name).function(groups, **formula.options)
        return {"value": np.array([episode[0] for group in found for episode in group])[:, None] * mask}

    def _gae(self, options: Mapping[str, Any]) -> np.ndarray:
        batch, mask = self._batch, self._batch["mask"]
        rewards = np.zeros(mask.shape)
        rewards[np.arange(len(mask)), last_tokens(mask)] = batch["rewards"]
        found = [gae(*row, **options).advantages for row in zip(rewards, batch["old_values"], mask, strict=True)]
        moments = Moments.of(np.concatenate(found), np.concatenate(mask))
        return np.array([whiten(advantages, row, moments) for advantages, row in zip(found, mask, strict=True)])


def last_tokens(mask: np.ndarray) -> np.ndarray:
    """The place of each row's last loss token, [B]."""
    return mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)


def their_results(name: str, batch: Path, compared: list[Formula]) -> dict[str, np.ndarray]:
    """What the worker of `name` computes for the formulas that it has: "<key>/value" and "<key>/gradient"."""
    asked = {each.key: {"kind": each.kind, **getattr(each, name)} for each in compared if getattr(each, name)}
    found = batch.with_name(f"{name}.npz")
    python, worker = other_python(name, f"{name}.lock"), worker_script(f"formulas_{name}.py")
    figures_of(name, [str(python), str(worker), str(batch), json.dumps(asked), str(found)], TIMEOUT_S)
    with np.load(found, allow_pickle=False) as arrays:
        return dict(arrays)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def main() -> None:
    compared = formulas()
    batch = random_batch(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.npz"
        np.savez(path, allow_pickle=False, **batch, last_tokens=last_tokens(batch["mask"]))
        others = {name: their_results(name, path, compared) for name in ("verl", "trl")}
    ours = Ours(batch)
    print(f"{'formula':<46} {'verl value':>11} {'gradient':>9} {'TRL value':>11} {'gradient':>9}")
    table: dict[str, dict[str, float]] = {}
    for formula in compared:
        found = ours(formula)
        differences = {
            f"{name} {part}": difference(number, others[name][f"{formula.key}/{part}"])
            for name in others
            for part, number in found.items()
            if f"{formula.key}/{part}" in others[name]
        }
        table[formula.key] = differences
        names = ("verl value", "verl gradient", "trl value", "trl gradient")
        cells = [f"{differences[name]:.0e}" if name in differences else "-" for name in names]
        print(f"{formula.key:<46} {cells[0]:>11} {cells[1]:>9} {cells[2]:>11} {cells[3]:>9}  {formula.why}".rstrip())
    print(json.dumps(table))


if __name__ == "__main__":
    main()
