"""A teacher behind a URL: what is read from its answers, what is refused, and vLLM's own server as one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from aiohttp import web
from children import TIMEOUT_S, ended_after, wait_for
from served import served
from training import save_model, tiny_groups, tiny_llama
from transformers import AutoTokenizer
from vllm_server import KEY, vllm_server

from rlflow.algorithms.distillation import TeacherOptions, teacher_options
from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.placement import fit
from rlflow.cluster.slots import SLIVER, Machine
from rlflow.cluster.start import ray_cluster, start_fleet
from rlflow.config import Config, ProcessKind, TeacherConfig
from rlflow.environments.find import load_environment
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_model
from rlflow.runtime.asking import NoAnswer, Refused
from rlflow.runtime.derived import by_device
from rlflow.settings.checks import check
from rlflow.telemetry import metrics
from rlflow.types import GroupOrder
from rlflow.workers.served import ServedModel, likely_in, said_of, texts_of_vocabulary
from rlflow.workers.teachers import check_teachers, with_folders
from rlflow.workers.trainer.frozen import FrozenPolicy

URL = "http://teacher:8000/v1"


def taught(**models: str) -> Config:
    config = Config()
    config.teacher = TeacherConfig(models=models)
    return config


# -- settings and places


@pytest.mark.parametrize(
    ("url", "teacher", "rollout", "message"),
    [
        (URL, {}, {"temperature": 0.5}, "rollout.temperature must be 1 with a teacher behind a URL, which says how li"),
        (
            URL,
            {},
            {"top_k": 8},
            "rollout.top_k must be null with a teacher behind a URL, which says how likely",
        ),
        (URL, {"ranks": 2}, {}, "teacher.ranks=2 has no effect on teachers behind URLs, which no process of the run h"),
        (URL, {"args": {"concurrency": 0}}, {}, "concurrency must be above 0 and finite; got 0"),
        ("a", {"args": {"model": "m"}}, {}, "teacher.args.model has no effect without a URL in teacher.models; leave"),
        ("http://h:1", {}, {}, "teacher.models.default must be a URL up to and including /v1, such as http://host:80"),
        ("http://h:1/v1?k=2", {}, {}, "teacher.models.default must be a URL up to and including /v1, such as http://"),
        ("http://u:p@h:1/v1", {}, {}, "teacher.models.default has a password in its URL, which the run's files would"),
    ],
)
def test_settings_that_do_not_go_with_a_url(
    url: str, teacher: dict[str, Any], rollout: dict[str, Any], message: str
) -> None:
    config = taught(default=url)
    config.teacher = replace(config.teacher, **teacher)
    config.rollout = replace(config.rollout, **rollout)
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert str(refused.value).startswith(message)
    check(taught(default=URL))


def test_a_served_teacher_takes_no_gpu_and_is_kept_off_a_full_machine() -> None:
    config = taught(sums=URL, default="a")
    assert gpu_plan(config).counts[ProcessKind.teacher] == 1
    slots = fit(config, [Machine(name="m", cpus=64, gpus=8)]).slots
    teachers = [(slot.processes, slot.cpus, slot.gpus) for slot in slots if slot.kind is ProcessKind.teacher]
    assert teachers == [(((ProcessKind.teacher, 0),), 1, 1), (((ProcessKind.teacher, 1),), SLIVER, 0)]


# -- what a server says


def test_each_token_has_what_is_said_of_it() -> None:
    said = [None, {"8": {"logprob": -0.5}, "9": {"logprob": -1.5}}, {"7": {"logprob": -2.0}}]
    assert said_of([7, 8, 7], said).tolist() == [0.0, -0.5, -2.0]


def test_the_likeliest_tokens_are_those_that_the_policy_has() -> None:
    """Of the second place the likeliest token is unknown to the policy; that which was sampled is the third."""
    said = [
        {"8": {"logprob": -0.5}, "5": {"logprob": -1.5}},
        {"9": {"logprob": -0.25}, "4": {"logprob": -2.0}, "3": {"logprob": -5.0}},
    ]
    found = likely_in(said, np.array([True, False, True]), k=2, num_ids=9)
    assert found.tokens.ids.tolist() == [8, 5, 4] and found.tokens.counts.tolist() == [2, 0, 1]
    assert found.logprobs.tolist() == [-0.5, -1.5, -2.0]


@pytest.mark.parametrize(
    "said",
    [
        [None],
        [None, {"9": {"logprob": -1.0}}],
        [None, None],
        [None, {"8": {"logprob": 0.5}}],
        [None, {"8": {"logprob": float("nan")}}],
        [None, {"8": -1.0}],
    ],
)
def test_what_is_not_said_is_not_invented(said: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        said_of([7, 8], said)


def test_the_texts_of_a_vocabulary_have_all_its_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    texts = list(texts_of_vocabulary(tokenizer))
    assert len(texts) == 12 and "<|im_start|>" in texts[0]
    read = {token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)}
    assert len(read) > 0.97 * len(tokenizer)


async def ask(answers: list[tuple[int, Any]], options: TeacherOptions | None = None, for_s: float = 5.0) -> Any:
    """The log-probabilities of two tokens, and what the server was asked."""
    asked: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "one"}, {"id": "two"}][: 1 if options is None else 2]})
        asked.append(await request.json())
        status, content = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.json_response(content, status=status)

    async with served(reply) as url, ServedModel(f"{url}/v1", options or TeacherOptions()) as model:
        await model.find_name(for_s)
        return said_of([7, 8], await model.places([7, 8], time.monotonic() + for_s)).tolist(), asked


def says(value: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": value}]}


RIGHT = says([None, {"8": {"logprob": -0.5}}])


async def test_a_server_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.runtime.asking.FIRST_PAUSE_S", 0.01)
    found, asked = await ask([(503, {}), (429, {}), (200, RIGHT)])
    assert found == [0.0, -0.5]
    question = {"model": "one", "prompt": [7, 8], "max_tokens": 1, "prompt_logprobs": 0, "add_special_tokens": False}
    assert asked == [question] * 3


async def test_a_server_of_several_models_is_told_which() -> None:
    _, asked = await ask([(200, RIGHT)], TeacherOptions(model="two"))
    assert asked[0]["model"] == "two"
    with pytest.raises(Refused, match="/v1/models has the models one, two; name one in teacher.args.model"):
        await ask([(200, RIGHT)], TeacherOptions())
    with pytest.raises(Refused, match="has the models one, two; 'three' is not among them in teacher.args.model"):
        await ask([(200, RIGHT)], TeacherOptions(model="three"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"choices": [{"text": "."}]}), "did not say how likely each of 2 tokens is, in prompt_logprobs as vLLM"),
        ((200, says([None])), "did not say how likely each of 2 tokens is"),
        ((200, []), "did not answer with a JSON object: []"),
        ((400, {"error": "too long"}), 'answered HTTP 400: {"error": "too long"}'),
        ((200, says(["x" * (1 << 21)])), "answered with more than 1050624 bytes"),
    ],
)
async def test_other_answers_are_errors_at_once(answer: tuple[int, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        await ask([answer])
    assert message in str(refused.value)


async def test_a_server_that_stays_busy_is_an_error_at_the_deadline() -> None:
    with pytest.raises(NoAnswer, match="no answer from http://.*/v1/completions within 0.* s: HTTP 503"):
        await ask([(503, {})], for_s=0.3)


async def test_requests_at_once_are_bounded() -> None:
    open_now, most = 0, 0

    async def reply(request: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return web.json_response(RIGHT)

    async with served(reply) as url, ServedModel(f"{url}/v1", TeacherOptions(model="m", concurrency=3)) as model:
        await asyncio.gather(*(model.places([7, 8], time.monotonic() + 5) for _ in range(20)))
    assert 2 <= most <= 3


def test_a_dead_server_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.workers.teachers.ANSWER_S", 0.3)
    config = taught(default="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="teacher.models.default=http://127.0.0.1:9/v1 cannot be a teacher: no"):
        check_teachers(config, resolve_model("tiny"))
    config.teacher.args = {"key_variable": "NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match="teacher.args.key_variable=NO_SUCH_KEY is not set in the environment"):
        check_teachers(config, resolve_model("tiny"))


# -- vLLM's server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    place = tmp_path_factory.mktemp("teacher")
    made = save_model(
        tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=3, max_position_embeddings=512, head_dim=32), place
    )
    tokenizer.save_pretrained(place)
    return made


@pytest.fixture(scope="module")
def url(folder: str) -> Iterator[str]:
    with vllm_server(folder, "--max-model-len", "300") as (url, _):
        yield url


def run_settings(config: Config, folder: Path) -> Config:
    """Rows of two kinds, for a run of the tiny model that learns from its teachers alone."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} + {n} =", "kind": "{("a", "b")[n % 2]}"}}\n' for n in range(8)))
    config.run.dir, config.model.path, config.model.max_length = str(folder), "tiny", 128
    config.env.name, config.env.args = "dataset", {"path": str(rows)}
    config.rollout.max_new_tokens, config.rollout.kv_cache_gb = 12, 0.1
    config.teacher.reward_weight, config.teacher.args = 0.0, {"key_variable": "TEACHER_KEY"}
    return config


@pytest.mark.slow
async def test_a_server_says_what_a_teacher_of_the_run_computes(
    url: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    config = run_settings(by_device(taught(a=folder, b=url), on_gpus=False), tmp_path)
    config.trainer.ranks = 0
    check(replace(config, trainer=replace(config.trainer, ranks=1)))
    await asyncio.to_thread(check_teachers, with_folders(config), resolve_model("tiny"))
    spec = load_environment(config.env, config.reward, needs_reward=False)
    task = next(iter(spec.tasks()))
    with ray_cluster(config):
        fleet = await start_fleet(config, resolve_model("tiny"), spec, print, tell=print)
        try:
            order = GroupOrder(group_id=1, task=task, num_episodes=3, seed=7)
            played = await fleet.workers.runners.play(order)
            told = []
            for name in ("teacher a", "teacher b"):
                handles = await fleet.workers.frozen[name].logprobs(played.payloads)
                told.append([row for handle in handles for row in ray.get(handle)])  # pyright: ignore
            assert len(told[0]) == 3
            for own, its in zip(*told, strict=True):
                assert np.abs(own).max() > 1 and np.abs(own - its).max() < 1e-4
        finally:
            await fleet.stop()


@pytest.mark.slow
async def test_a_server_names_the_tokens_that_a_teacher_of_the_run_names(
    url: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    config = taught(default=url)
    config.teacher.args = {"kl": "forward", "top_k": 5, "key_variable": "TEACHER_KEY"}
    config.model.max_length = 64
    samples = [one for group in tiny_groups() for one in group]
    own = FrozenPolicy(config, folder).likeliest([samples], 5, 259)
    async with ServedModel(url, teacher_options(config.teacher)) as model:
        await model.find_name(5.0)
        for each, expected in zip(samples, own, strict=True):
            one, places = each.sample, np.flatnonzero(each.sample.loss_mask)
            said = await model.places([*one.prompt_ids.tolist(), *one.completion_ids.tolist()], time.monotonic() + 30)
            of_loss = [said[len(one.prompt_ids) + place] for place in places.tolist()]
            found = likely_in(of_loss, one.loss_mask, 5, 259)
            assert found.tokens.ids.tolist() == expected.tokens.ids.tolist()
            assert found.tokens.counts.tolist() == expected.tokens.counts.tolist()
            assert np.abs(found.logprobs - expected.logprobs).max() < 1e-4
    config.teacher.args["top_k"] = 100
    with pytest.raises(ConfigError, match="cannot be a teacher: http://.* answered HTTP 400: .*100"):
        await asyncio.to_thread(check_teachers, config, resolve_model("tiny"))


@pytest.mark.slow
def test_another_model_is_refused(url: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    config = run_settings(taught(default=url), Path(folder))
    with pytest.raises(ConfigError, match="its vocabulary is not that of model.path: where the policy reads .* tokens"):
        check_teachers(config, resolve_model("smollm2-135m"))
    config.model.max_length = 300
    with pytest.raises(ConfigError, match="the server takes 300 tokens at once .* with --max-model-len 301 or more"):
        check_teachers(config, resolve_model("tiny"))
    monkeypatch.setenv("TEACHER_KEY", "wrong")
    with pytest.raises(ConfigError, match="cannot be a teacher: http://.*/v1/models answered HTTP 401"):
        check_teachers(config, resolve_model("tiny"))


@pytest.mark.proof
def test_a_run_learns_from_a_server_and_ends_with_it(folder: str, tmp_path: Path) -> None:
    """Asynchronous; after three steps the server is killed."""
    config, run = run_settings(taught(), tmp_path), tmp_path / "run"
    with vllm_server(folder, "--max-model-len", "300") as (url, server):
        words = ["recipe=smoke", f"run.dir={run}", "run.steps=1000", "env.name=dataset", "reward.function=null"]
        words += [f"+env.args.path={config.env.args['path']}", f"+teacher.models.default={url}"]
        words += ["teacher.reward_weight=0", "+teacher.args.key_variable=TEACHER_KEY", "staleness.max_versions=1"]
        words += ["deadlines.train_s=10", "model.max_length=128"]
        command = [sys.executable, "-m", "rlflow", "train", *words]
        environment = os.environ | {"TEACHER_KEY": KEY}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        with ended_after(child):
            wait_for(child, "step 3/1000")
            server.kill()
            text, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 1, text
    assert f"teacher.models.default={url} is lost: no answer from {url}/completions within" in text
    records = metrics.read(run / "metrics.jsonl")
    assert len(records) >= 3
    assert all(record["distil/kl"] > 0.1 and record["grad_norm"] > 0 for record in records)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
