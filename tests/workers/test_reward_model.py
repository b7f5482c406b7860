"""Reward models: the score itself, the actor that collects requests, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import ray
from training import plain_score, save_model, save_reward_model, tiny_config, tiny_llama
from transcripts import said
from transformers import AutoTokenizer, MistralConfig, MistralForSequenceClassification

from rlflow.batching.pack import Conversation, pack_conversations, row_tokens
from rlflow.cluster.devices import Devices
from rlflow.cluster.rewards import RayReward, scorer_of, start_rewards
from rlflow.cluster.start import ray_cluster
from rlflow.config import RewardConfig
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_reward_model
from rlflow.rewards.client import RewardClient
from rlflow.rewards.scaled import scaling_of
from rlflow.types import EpisodeEnd, Message, Task, Transcript, Verdict
from rlflow.workers.reward_model import RewardModelWorker
from rlflow.workers.trainer.reward_model import RewardModel, load_reward_model


def task(*texts: str) -> Task:
    roles = ("user", "assistant") * len(texts)
    prompt = tuple(Message(role=role, content=text) for role, text in zip(roles, texts, strict=False))
    return Task(id=texts[0], prompt=prompt)


def replied(task: Task, *replies: str) -> Transcript:
    return said(*replies, task=task)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


SUM, LONG = task("2 + 3 ="), task("Say it again. " * 10, "It.", "And again?")
ASKED = [
    (SUM, "5"),
    (SUM, "5, I think"),
    (LONG, "no"),
    (SUM, "5"),
    (SUM, ""),
    (LONG, "n"),
    (SUM, "\u00e9t\u00e9 " * 40),
]
ENDS_WITH_PADDING = "{% for message in messages %}{{ message['content'] + '<|endoftext|>' }}{% endfor %}"


def read(model: RewardModel, asked: Sequence[tuple[Task, str]]) -> list[Conversation]:
    found = [model.encode(replied(one, reply)) for one, reply in asked]
    assert not any(isinstance(each, Verdict) for each in found)
    return [each for each in found if isinstance(each, Conversation)]


@pytest.mark.parametrize("template", [None, ENDS_WITH_PADDING], ids=["chatml", "ends with padding"])
def test_scores_of_a_packed_row_are_those_of_transformers_one_by_one(tmp_path: Path, template: str | None) -> None:
    folder = save_reward_model(tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    model = load_reward_model(tiny_config(), folder)
    conversations = read(model, ASKED)
    expected = [plain_score(folder, [*one.prompt, assistant(reply)]) for one, reply in ASKED]
    assert max(expected) - min(expected) > 0.1
    np.testing.assert_allclose(model.scores(conversations), expected, atol=1e-5)
    np.testing.assert_allclose(model.scores(conversations[2:3]), expected[2:3], atol=1e-5)
    assert row_tokens(conversations) < sum(len(one.prompt_ids) + len(one.reply_ids) for one in conversations)
    assert len(pack_conversations(conversations).input_ids) <= row_tokens(conversations)


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({}, 7.0),
        ({"mean": 1.0}, 6.0),
        ({"mean": 1, "deviation": 2.0}, 3.0),
        ({"clip": 2.5}, 2.5),
        ({"mean": 17.0, "clip": 2.5}, -2.5),
    ],
)
def test_a_score_is_scaled_and_clipped(options: dict[str, float], reward: float) -> None:
    assert scaling_of(options)(7.0) == reward


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"means": 1.0}, "reward.args.means is not an argument of reward.model, which takes mean, deviation, clip"),
        ({"mean": float("nan")}, "reward.args.mean must be a finite number; got nan"),
        ({"deviation": 0.0}, "reward.args.deviation must be positive and finite; got 0.0"),
        ({"deviation": float("inf")}, "reward.args.deviation must be positive and finite; got inf"),
        ({"clip": -1.0}, "reward.args.clip must be positive, or null for no clip; got -1.0"),
        ({"clip": "yes"}, "reward.args.clip must be "),
    ],
)
def test_wrong_options_of_a_score_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        scaling_of(options)


async def test_the_reward_is_the_scaled_score_which_is_kept_as_a_metric(tmp_path: Path) -> None:
    config = tiny_config()
    config.reward.args = {"mean": 10.0, "deviation": 2.0, "clip": 4.5}
    worker = RewardModelWorker(config, save_reward_model(tmp_path), 1, config.reward.args)
    verdict = await worker.score(replied(SUM, "5"))
    expected = plain_score(str(tmp_path), [*SUM.prompt, assistant("5")])
    assert verdict.metrics["score"] == pytest.approx(expected, abs=1e-5)
    assert verdict.reward == pytest.approx(max((expected - 10) / 2, -4.5), abs=1e-5)
    await worker.close()


def test_a_conversation_is_cut_where_replies_to_one_task_begin(tmp_path: Path) -> None:
    model = RewardModel(tiny_config(), save_reward_model(tmp_path))
    one, other = read(model, [(SUM, "5"), (SUM, "6")])
    assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
    # The prompt ends with "assistant" and a line break; "5", the end of the turn and a line break follow.
    assert len(one.reply_ids) == 3


def test_all_turns_are_read(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path)
    model = load_reward_model(tiny_config(), folder)
    found = model.encode(replied(SUM, "5?", "5!"))
    assert isinstance(found, Conversation)
    conversation = [*SUM.prompt, assistant("5?"), Message(role="user", content="go on"), assistant("5!")]
    assert model.scores([found]) == pytest.approx([plain_score(folder, conversation)], abs=1e-5)


def conversation(prompt: int, length: int, reply: int) -> Conversation:
    return Conversation(prompt_ids=np.full(length, prompt, np.int32), reply_ids=np.arange(reply, dtype=np.int32))


def test_equal_prompts_count_once() -> None:
    assert row_tokens([conversation(1, 10, 3), conversation(1, 10, 4), conversation(2, 10, 0)]) == 27


def test_too_long_a_conversation_gets_no_verdict_and_is_never_cut(tmp_path: Path) -> None:
    model = RewardModel(tiny_config(), save_reward_model(tmp_path))
    (whole,) = read(model, [(SUM, "")])
    room = 512 - len(whole.prompt_ids) - len(whole.reply_ids)
    assert isinstance(model.encode(replied(SUM, "x" * room)), Conversation)
    detail = "the conversation has 513 tokens, and the reward model takes 512"
    found = model.encode(replied(SUM, "x" * (room + 1)))
    assert found == Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail=detail)


def test_a_conversation_may_be_longer_than_the_model_looks_back(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=259, sliding_window=40, num_labels=1)  # pyright: ignore[reportCallIssue]
    MistralForSequenceClassification(config).save_pretrained(folder)
    model = RewardModel(tiny_config(), folder)
    found = model.encode(replied(SUM, "x" * 40))
    assert isinstance(found, Conversation)
    expected = plain_score(folder, [*SUM.prompt, assistant("x" * 40)])
    assert model.scores([found]) == pytest.approx([expected], abs=1e-5)


def test_a_conversation_that_the_template_refuses_is_a_reward_error(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path)
    template = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}x"
    (tmp_path / "chat_template.jinja").write_text(template)
    found = RewardModel(tiny_config(), folder).encode(replied(SUM, "5"))
    detail = "the reward model's chat template refused the conversation: no system message"
    assert found == Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)


# -- what is refused before anything starts


def test_a_good_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_reward_model(save_reward_model(tmp_path)) == str(tmp_path)


def test_two_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward.model: .* is a classifier with 2 labels, and a reward is one number"):
        resolve_reward_model(save_reward_model(tmp_path, num_labels=2))


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    folder = save_model(tiny_llama(), tmp_path)
    AutoTokenizer.from_pretrained(save_reward_model(tmp_path / "other")).save_pretrained(folder)
    with pytest.raises(
        ConfigError, match="holds LlamaForCausalLM, which gives no score; take a model that was trained"
    ):
        resolve_reward_model(folder)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has no score.weight, so that its scores would be random"):
        resolve_reward_model(folder)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="^reward.model: .* has no chat template"):
        resolve_reward_model(folder)
    with pytest.raises(ConfigError, match="^reward.model: the tokenizer in .* has no chat template"):
        RewardModel(tiny_config(), folder)


@pytest.mark.parametrize("path", ["tiny", "./nowhere"])
def test_a_model_that_is_nowhere_is_named_by_its_setting(path: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^reward.model={path} is (no folder here, and the hub|not a folder; give a)"
    ):
        resolve_reward_model(path)


# -- the actor


@dataclass
class ScriptedModel:
    """Scores a conversation by its number of tokens; does not answer before it may."""

    rows: list[int] = field(default_factory=list)
    """Conversations of each row so far."""
    may_answer: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def encode(self, transcript: Transcript) -> Conversation | Verdict:
        size = len(transcript.task.id)
        return conversation(size, size, len(transcript.text))

    def num_tokens(self, conversations: Sequence[Conversation]) -> int:
        return row_tokens(conversations)

    def scores(self, conversations: Sequence[Conversation]) -> list[float]:
        self.rows.append(len(conversations))
        assert self.may_answer.wait(30)
        if self.fails:
            raise RuntimeError("out of memory")
        return [len(one.reply_ids) or float("nan") for one in conversations]


class ScriptedWorker(RewardModelWorker):
    def __init__(self, model: ScriptedModel, timeout_s: float = 30.0, max_tokens: int = 16) -> None:
        config = tiny_config()
        config.reward.timeout_s, config.trainer.micro_batch_tokens = timeout_s, max_tokens
        super().__init__(config, "", 1, {})
        self.scripted = model
        self.ended = asyncio.Event()

    def _load(self) -> RewardModel:
        return self.scripted  # pyright: ignore[reportReturnType]

    def _end(self) -> None:
        self.ended.set()


@asynccontextmanager
async def under_way(worker: ScriptedWorker, *replies: str) -> AsyncIterator[list[asyncio.Task[Verdict]]]:
    """One reply in the model, the others waiting for it."""
    first = asyncio.create_task(worker.score(replied(SUM, replies[0])))
    while not worker.scripted.rows:
        await asyncio.sleep(0)
    rest = [asyncio.create_task(worker.score(replied(SUM, reply))) for reply in replies[1:]]
    while worker._waiting.qsize() < len(rest):
        await asyncio.sleep(0)
    try:
        yield [first, *rest]
    finally:
        worker.scripted.may_answer.set()
        await worker.close()


async def test_what_waits_goes_through_the_model_together_as_far_as_it_fits() -> None:
    worker = ScriptedWorker(ScriptedModel(), max_tokens=16)
    # The prompt has 7 tokens: 7 + 3 + 6 fit, 1 more does not; 7 + 1 + 8 fit; 20 get a row of their own.
    async with under_way(worker, "a", "bbb", "cccccc", "d", "eeeeeeee", "f" * 20) as asked:
        worker.scripted.may_answer.set()
        verdicts = await asyncio.gather(*asked)
    assert [verdict.reward for verdict in verdicts] == [1.0, 3.0, 6.0, 1.0, 8.0, 20.0]
    assert worker.scripted.rows == [1, 2, 2, 1]


async def test_who_was_cancelled_holds_up_nobody() -> None:
    worker = ScriptedWorker(ScriptedModel())
    async with under_way(worker, "a", "bb", "ccc") as asked:
        for each in asked[:2]:
            each.cancel()
        worker.scripted.may_answer.set()
        assert (await asked[2]).reward == 3.0


async def test_a_row_that_overruns_its_time_has_no_verdict_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlflow.workers.reward_model.END_AFTER_S", 0.0)
    worker = ScriptedWorker(ScriptedModel(), timeout_s=0.05)
    async with under_way(worker, "a") as (asked,):
        detail = "the reward model took longer than 0.05 s (reward.timeout_s)"
        assert await asked == Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail=detail)
        await asyncio.wait_for(worker.ended.wait(), 30)


async def test_a_row_that_fails_is_an_error_and_the_next_one_is_scored() -> None:
    worker = ScriptedWorker(ScriptedModel(fails=True))
    async with under_way(worker, "a") as (asked,):
        worker.scripted.may_answer.set()
        found = await asked
        assert found.end is EpisodeEnd.REWARD_ERROR
        assert found.detail == "the reward model failed: RuntimeError: out of memory"
        worker.scripted.fails = False
        assert await worker.score(replied(SUM, "bb")) == Verdict(reward=2.0)
        invalid = await worker.score(replied(SUM, ""))
        assert (invalid.reward, invalid.end) == (None, EpisodeEnd.REWARD_INVALID)


@pytest.mark.slow
async def test_two_models_and_a_function_are_weighed_and_added(tmp_path: Path) -> None:
    config = tiny_config()
    config.run.dir = str(tmp_path)
    folders = {"helpful": save_reward_model(tmp_path / "a"), "brief": save_reward_model(tmp_path / "b", hidden_size=48)}
    config.reward = RewardConfig(
        function="exact_match", model=folders, weights=[4.0, 1.0, 0.5], args={"brief": {"mean": 2.0}}
    )
    with ray_cluster(config):
        actors = start_rewards(config, None, folders, Devices(config), threads=1, max_calls=64)
        assert list(actors) == ["scorer 0", "reward model helpful 0", "reward model brief 0"]
        await asyncio.gather(*(actor.start.remote() for actor in actors.values()))
        transcript = replied(replace(SUM, answer="5"), "5")
        verdict = await scorer_of(config, list(actors)).score(transcript)
    first, second = (plain_score(each, [*SUM.prompt, assistant("5")]) for each in folders.values())
    assert first != pytest.approx(second, abs=1e-3)
    assert verdict.reward == pytest.approx(4 + first + 0.5 * (second - 2), abs=1e-5)
    assert verdict.metrics["rewards/exact_match"] == 1.0
    assert verdict.metrics["rewards/helpful"] == pytest.approx(first, abs=1e-5)
    assert verdict.metrics["rewards/brief"] == pytest.approx(second - 2, abs=1e-5)
    assert verdict.metrics["rewards/brief/score"] == pytest.approx(second, abs=1e-5)


@pytest.mark.slow
async def test_killed_reward_models_come_back_and_no_reply_is_lost(tmp_path: Path) -> None:
    config = tiny_config()
    config.run.dir = str(tmp_path)
    folder = save_reward_model(tmp_path)
    config.reward.model, config.reward.model_replicas = folder, 2
    with ray_cluster(config):
        actors = start_rewards(config, None, {"model": folder}, Devices(config), threads=1, max_calls=64)
        await asyncio.gather(*(actor.start.remote() for actor in actors.values()))
        client = RewardClient([RayReward(name) for name in actors], patience_s=120.0)
        expected = await client.score(replied(SUM, "5"))
        assert expected.reward == pytest.approx(plain_score(folder, [*SUM.prompt, assistant("5")]), abs=1e-5)
        for actor in actors.values():
            ray.kill(actor, no_restart=False)
        found = [await client.score(replied(SUM, "5")) for _ in range(4)]
    assert found == [expected] * 4
