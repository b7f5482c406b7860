"""The best and the worst episode of a step, for people to read.

driver's transcript -> ShownEpisode -> samples/step_N.json -> the report
                                   \\-> rows of text -> the console
"""

import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlflow.driver import TrainedEpisode
from rlflow.errors import RunError
from rlflow.runtime.disk import disk_errors, write_whole
from rlflow.telemetry.text import number, printable, shorten
from rlflow.types import EpisodeEnd, Message

FOLDER = "samples"
MAX_ROWS = 24
"""Rows that one episode may take on the console."""
MAX_CHARACTERS = 2000
"""Characters of one message on the console."""
COLUMNS = ("episode", "reward", "task", "ended", "expected", "advantage", "prompt", "reply")
"""The columns of the table that trackers show."""
_FILE_NAME = re.compile(r"step_(\d+)\.json")


@dataclass(kw_only=True, slots=True, frozen=True)
class ShownEpisode:
    """One episode as a person reads it."""

    task_id: str
    reward: float | None
    end: EpisodeEnd
    messages: Sequence[Message]
    answer: str | None = None
    """What the reward compares with; None when the task has no answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Rewards by function, as rewards/NAME, and whatever else was measured."""
    advantages: list[float] | None = None
    """One value, or one for each turn; None if there is none."""
    figures: dict[str, int] = field(default_factory=dict)
    """prompt_tokens, completion_tokens, oldest_version and newest_version."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepSamples:
    """What samples/step_N.json holds."""

    step: int
    best: ShownEpisode
    worst: ShownEpisode


def shown_episode(trained: TrainedEpisode, messages: Sequence[Message]) -> ShownEpisode:
    summary = trained.summary
    return ShownEpisode(
        task_id=trained.task.id,
        reward=summary.reward,
        end=summary.end,
        messages=messages,
        answer=None if trained.task.answer is None else str(trained.task.answer),
        metrics=summary.metrics,
        advantages=trained.advantages,
        figures={
            "prompt_tokens": summary.num_prompt_tokens,
            "completion_tokens": summary.num_completion_tokens,
            "oldest_version": summary.oldest_version,
            "newest_version": summary.newest_version,
        },
    )


def table_row(label: str, episode: ShownEpisode) -> list[str]:
    """One row of COLUMNS, bounded and safe to print."""
    *before, last = episode.messages or [Message(role="", content="")]
    cells = (
        label,
        number(episode.reward),
        episode.task_id,
        episode.end.value,
        episode.answer or "",
        " ".join(map(number, episode.advantages or [])),
        "\n".join(f"{message['role']}: {message['content']}" for message in before),
        last["content"],
    )
    return [shorten(printable(cell), MAX_CHARACTERS) for cell in cells]


def write_samples(run_dir: Path, step: int, best: ShownEpisode, worst: ShownEpisode) -> Path:
    """Write samples/step_N.json, whole or not at all. Raises RunError when the disk is full."""
    folder = run_dir / FOLDER
    path = folder / f"step_{step}.json"
    content = json.dumps({"step": step, "best": asdict(best), "worst": asdict(worst)}, indent=1)
    with disk_errors("samples", folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, content + "\n", "samples")
    return path


def sampled_steps(run_dir: Path) -> list[int]:
    """The steps that have a samples file, in order."""
    names = (_FILE_NAME.fullmatch(path.name) for path in (run_dir / FOLDER).glob("step_*.json"))
    return sorted(int(name.group(1)) for name in names if name)


def read_samples(run_dir: Path, step: int) -> StepSamples:
    """Raises RunError for a file that `write_samples` did not write."""
    path = run_dir / FOLDER / f"step_{step}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return StepSamples(step=content["step"], best=_episode(content["best"]), worst=_episode(content["worst"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} does not hold the samples of a step ({error!r}); delete it") from error


def _episode(content: dict[str, Any]) -> ShownEpisode:
    reward, messages = content["reward"], content["messages"]
    if not isinstance(messages, list) or not (reward is None or isinstance(reward, float | int)):
        raise TypeError("reward or messages have the wrong type")
    return ShownEpisode(
        task_id=str(content["task_id"]),
        reward=reward,
        end=EpisodeEnd(str(content["end"])),
        messages=[Message(role=str(message["role"]), content=str(message["content"])) for message in messages],
        **{name: content[name] for name in ("answer", "metrics", "advantages", "figures") if name in content},
    )


def title(label: str, episode: ShownEpisode) -> str:
    """One line about an episode, safe to print."""
    task_id = shorten(printable(episode.task_id).replace("\n", " "), 60)
    parts = {
        name.removeprefix("rewards/"): value for name, value in episode.metrics.items() if name.startswith("rewards/")
    }
    shown = ", ".join(f"{printable(name)} {number(value)}" for name, value in parts.items()) if len(parts) > 1 else ""
    return f"{label}: reward {number(episode.reward)}{shown and f' ({shown})'}, task {task_id}, {episode.end.value}"


def rows(episode: ShownEpisode, *, width: int, max_rows: int = MAX_ROWS, has_system: bool = True) -> list[str]:
    """The conversation and the expected answer in at most `max_rows` rows of at most `width` characters, safe to print.

    If it is longer, the end is kept. The rows are plain text and must not be printed as markup. `has_system`: with its
    system prompts.
    """
    assert width >= 20 and max_rows >= 2, f"no room to show an episode: width {width}, rows {max_rows}"
    said = [(each["role"], each["content"]) for each in episode.messages if has_system or each["role"] != "system"]
    if episode.answer is not None:
        said.append(("expected", episode.answer))
    shown: list[str] = []
    for role, content in said:
        for line in shorten(printable(f"{role}: {content}"), MAX_CHARACTERS).split("\n"):
            shown += textwrap.wrap(line, width, drop_whitespace=False, subsequent_indent="  ") or [""]
    if len(shown) <= max_rows:
        return shown
    return [f"[... {len(shown) - max_rows + 1} rows cut ...]", *shown[len(shown) - max_rows + 1 :]]
