"""What a teacher is told besides: the text, its tokens in samples, on disk, and before the same completion."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from letters import LetterRenderer, limits

from rlflow.config import TeacherConfig
from rlflow.errors import ConfigError, NoReply
from rlflow.rollout.chat import Chat
from rlflow.rollout.hint import check_hints, hinted
from rlflow.rollout.payloads import load_payloads, payload_bytes, save_payloads
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.rollout.samples import as_told, chains_of, sample_of, turns_before
from rlflow.types import EpisodePayload, Message, Sample, Task

TASK = Task(id="t", prompt=(Message(role="user", content="2+3"),), answer=5, data={"hint": "{answer}!", "none": None})


def said(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def test_the_template_stands_in_the_place_of_the_last_message_before_the_first_reply() -> None:
    talk = [said("system", "Add."), said("user", "2+3"), said("assistant", "4"), said("user", "again")]
    found = hinted(talk, TASK, "{prompt} = {answer} {hint} {other}")
    assert found == [talk[0], said("user", "2+3 = 5 {answer}! {other}"), *talk[2:]]
    assert talk[1]["content"] == "2+3"
    assert hinted(talk[:2], TASK, "{answer}") == [talk[0], said("user", "5")]
    assert hinted(talk[2:], TASK, "{answer}") == talk[2:]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{prompt} {why}",
            "teacher.args.prompt has the field {why}, which the task t lacks; it has answer, hint",
        ),
        ("{prompt} {none}", "teacher.args.prompt has the field {none}, which the task t lacks"),
        ("{prompt}", "teacher.args.prompt={prompt} has no effect; add what only the teacher may know"),
    ],
)
def test_fields_that_a_task_lacks_are_found_before_anything_starts(template: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_hints(TeacherConfig(models={"default": "a"}, args={"prompt": template}), [TASK])
    assert str(refused.value).startswith(message)
    check_hints(TeacherConfig(models={"default": "a"}, args={"prompt": "{prompt} {answer} {hint}"}), [TASK])
    check_hints(TeacherConfig(models={"default": "a"}), [TASK])


async def nobody(request: GenerateRequest) -> Completion:
    raise AssertionError("no engine is asked")


async def samples_of(renderer: LetterRenderer, template: str) -> list[Sample]:
    """Of two turns."""
    chat = Chat(nobody, renderer, limits(), hint=partial(hinted, task=TASK, template=template))
    talk = [said("user", "2+3")]
    talk += [(await chat.reply(talk, given=said("assistant", "4"))).message, said("user", "again")]
    await chat.reply(talk, given=said("assistant", "5"))
    return [sample_of(chain, turns_before(chat.turns, chain[0])) for chain in chains_of(chat.turns)]


async def test_a_sample_has_what_the_teacher_reads_before_the_same_completion(tmp_path: Path) -> None:
    renderer = LetterRenderer()
    (sample,) = await samples_of(renderer, "{prompt}={answer}")
    told = renderer.prompt([said("user", "2+3=5")])
    assert sample.teacher_prompt_ids is not None and sample.teacher_prompt_ids.tolist() == told
    assert sample.prompt_ids.tolist() == renderer.prompt([said("user", "2+3")])
    read = as_told(sample)
    assert read.prompt_ids.tolist() == told and read.teacher_prompt_ids is None
    assert read.completion_ids is sample.completion_ids and read.loss_mask is sample.loss_mask
    (plain,) = await samples_of(renderer, "{prompt}={answer}")
    plain.teacher_prompt_ids = None
    assert as_told(plain) is plain
    payloads = [EpisodePayload(samples=[sample, plain], messages=[]), EpisodePayload(samples=[], messages=[])]
    assert payload_bytes(payloads[0]) - 2 * payload_bytes(EpisodePayload(samples=[plain], messages=[])) == 4 * len(told)
    save_payloads(tmp_path / "payloads", payloads)
    loaded, _ = load_payloads(tmp_path / "payloads")
    assert isinstance(loaded, EpisodePayload)
    first, second = (each.teacher_prompt_ids for each in loaded.samples)
    assert first is not None and np.array_equal(first, told) and second is None


async def test_a_reply_leaves_room_for_what_the_teacher_reads() -> None:
    renderer = LetterRenderer()
    asked, told = (len(renderer.prompt([said("user", text)])) for text in ("2+3", "2+3=5"))
    assert told > asked
    hint = partial(hinted, task=TASK, template="{prompt}={answer}")
    chat = Chat(nobody, renderer, limits(max_length=told), hint=hint)
    with pytest.raises(NoReply, match=f"has {asked} tokens, and with what the teacher is told besides {told}"):
        await chat.reply([said("user", "2+3")], given=said("assistant", "5"))
    chat = Chat(nobody, renderer, limits(max_length=told + 2), hint=hint)
    assert len((await chat.reply([said("user", "2+3")], given=said("assistant", "5"))).turn.output_ids) == 2
