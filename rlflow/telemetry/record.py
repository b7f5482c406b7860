"""From a StepReport to the numbers of one line of metrics.jsonl. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rlflow.driver import StepReport
from rlflow.groups.ledger import DropReason
from rlflow.telemetry.metrics import StepRecord
from rlflow.telemetry.throughput import throughput_of
from rlflow.types import NO_VERSION, EpisodeSummary, Span

PHASES = ("rollout", "reward", "train", "weights", "checkpoint")


def step_record(report: StepReport, *, since_s: float, num_tokens_before: int, is_bfloat16: bool = False) -> StepRecord:
    """The record of a step that began when the one before ended, at `since_s` (seconds since the epoch).

    `num_tokens` goes on counting from `num_tokens_before`. `is_bfloat16`: what the trainer computes in. Means of the
    trainer that had nothing to average are None.
    """
    trained = [episode for group in report.groups for episode in group.episodes]
    step_time = max(report.end_s - since_s, 1e-9)
    versions = [episode.oldest_version for episode in trained if episode.oldest_version != NO_VERSION]
    ages = [report.trained_version - version for version in versions]
    num_tokens = sum(episode.num_prompt_tokens + episode.num_completion_tokens for episode in trained)
    shares = {
        name: busy_share([span for span in report.spans if span.name == name], since_s, report.end_s) for name in PHASES
    }
    ends = Counter(episode.end.value for episode in report.episodes)
    ends.update("close_failed" for episode in report.episodes if episode.close_failure)
    means = {name: mean.value for name, mean in report.outcome.metrics.items() if name != "num_tokens"}
    return {
        "step": report.step,
        "version": report.version,
        **(rewards := rewards_of(trained)),
        "frac_reward_zero_std": None if rewards["reward"] is None else report.num_zero_std / len(report.groups),
        "kl": None,
        **means,
        "grad_norm": report.outcome.grad_norm,
        "update_skipped": report.outcome.num_skipped,
        "lr": report.outcome.learning_rate,
        "completions/mean_length": float(np.mean([episode.num_loss_tokens for episode in trained])),
        "completions/clipped_ratio": float(np.mean([episode.end.is_truncated for episode in trained])),
        "num_tokens": num_tokens_before + num_tokens,
        "step_time": step_time,
        **{f"time/{name}": share * step_time for name, share in shares.items()},
        "throughput/tokens_per_s": num_tokens / step_time,
        "throughput/samples_per_s": len(trained) / step_time,
        **throughput_of(report.outcome, shares["train"] * step_time, is_bfloat16=is_bfloat16),
        "staleness/mean": float(np.mean(ages)) if ages else None,
        "staleness/max": max(ages, default=None),
        "weights/pause_s": report.pause_s,
        "queue/ready": report.num_ready,
        "groups/admitted": report.counts["admitted_total"],
        "groups/trained": report.counts["trained"],
        **{f"groups/dropped_{reason}": report.counts[f"dropped_{reason}"] for reason in DropReason},
        **report.curriculum,
        # How the episodes since the last step ended; what did not occur is left out.
        **{f"episodes/{end}": count for end, count in sorted(ends.items())},
        "utilisation/rollout": shares["rollout"],
        "utilisation/train": shares["train"],
    }


def busy_share(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """The share [0, 1] of the window [start_s, end_s] in which at least one of `spans` was open.

    Overlapping spans count once; what lies outside the window does not count. Times are seconds since the epoch. In an
    empty window nothing was open.
    """
    if start_s >= end_s:
        return 0.0
    busy_s, covered_until_s = 0.0, start_s
    for span in sorted(spans, key=lambda span: span.start_s):
        begin_s, finish_s = max(span.start_s, covered_until_s), min(span.end_s, end_s)
        if begin_s < finish_s:
            busy_s += finish_s - begin_s
            covered_until_s = finish_s
    return min(busy_s / (end_s - start_s), 1.0)


def rewards_of(episodes: Sequence[EpisodeSummary]) -> StepRecord:
    """The mean reward of episodes, that of each function (TRL's names), and their other metrics.

    Those without a reward are left out, because a teacher alone decides and nothing gave one.
    """
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    mean, spread = (float(np.mean(rewards)), float(np.std(rewards))) if rewards else (None, None)
    metrics: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            metrics.setdefault(name, []).append(value)
    record: StepRecord = {"reward": mean, "reward_std": spread}
    for name, values in sorted(metrics.items()):
        if name.startswith("rewards/"):
            record |= {f"{name}/mean": float(np.mean(values)), f"{name}/std": float(np.std(values))}
        else:
            record[f"episode/{name}"] = float(np.mean(values))
    return record
