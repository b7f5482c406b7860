"""From a StepReport to the numbers of one line of metrics.jsonl: a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlflow.driver import StepReport
from rlflow.groups.ledger import DropReason
from rlflow.telemetry.metrics import StepRecord
from rlflow.telemetry.utilisation import busy_share
from rlflow.types import EpisodeSummary

PHASES = ("rollout", "reward", "train", "weights", "checkpoint")


def step_record(report: StepReport, *, since_s: float, num_tokens_before: int) -> StepRecord:
    """The record of a step that began when the one before ended, at `since_s` (seconds since the epoch).

    `num_tokens` goes on counting from `num_tokens_before`. Means of the trainer that had nothing to average are None.
    """
    trained = [episode for group in report.groups for episode in group.episodes]
    step_time = max(report.end_s - since_s, 1e-9)
    num_tokens = sum(episode.num_prompt_tokens + episode.num_completion_tokens for episode in trained)
    shares = {name: _share(report, name, since_s) for name in PHASES}
    means = {name: mean.value for name, mean in report.outcome.metrics.items() if name != "num_tokens"}
    return {
        "step": report.step,
        "version": report.version,
        **rewards_of(trained),
        "frac_reward_zero_std": report.num_zero_std / len(report.groups),
        "kl": None,
        **means,
        "grad_norm": report.outcome.grad_norm,
        "update_skipped": int(not report.outcome.applied),
        "lr": report.outcome.learning_rate,
        **_completions(trained),
        "num_tokens": num_tokens_before + num_tokens,
        "step_time": step_time,
        **{f"time/{name}": share * step_time for name, share in shares.items()},
        "throughput/tokens_per_s": num_tokens / step_time,
        "throughput/samples_per_s": len(trained) / step_time,
        **_staleness(report.trained_version, trained),
        "weights/pause_s": report.pause_s,
        "queue/ready": report.num_ready,
        "groups/admitted": report.counts["admitted_total"],
        "groups/trained": report.counts["trained"],
        **{f"groups/dropped_{reason}": report.counts[f"dropped_{reason}"] for reason in DropReason},
        **report.curriculum,
        **_ends(report.episodes),
        "utilisation/rollout": shares["rollout"],
        "utilisation/train": shares["train"],
    }


def _share(report: StepReport, name: str, since_s: float) -> float:
    spans = [span for span in report.spans if span.name == name]
    return busy_share(spans, since_s, report.end_s)


def rewards_of(episodes: Sequence[EpisodeSummary]) -> StepRecord:
    """Of episodes that all have one: the reward, its functions as TRL names them, and the episodes' other metrics."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    metrics: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            metrics.setdefault(name, []).append(value)
    record: StepRecord = {"reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    for name, values in sorted(metrics.items()):
        if name.startswith("rewards/"):
            record |= {f"{name}/mean": float(np.mean(values)), f"{name}/std": float(np.std(values))}
        else:
            record[f"episode/{name}"] = float(np.mean(values))
    return record


def _completions(episodes: Sequence[EpisodeSummary]) -> StepRecord:
    lengths = [episode.num_completion_tokens for episode in episodes]
    clipped = [episode.end.is_truncated for episode in episodes]
    return {"completions/mean_length": float(np.mean(lengths)), "completions/clipped_ratio": float(np.mean(clipped))}


def _staleness(trained_version: int, episodes: Sequence[EpisodeSummary]) -> StepRecord:
    versions = [trained_version - episode.oldest_version for episode in episodes]
    return {"staleness/mean": float(np.mean(versions)), "staleness/max": max(versions)}


def _ends(episodes: Sequence[EpisodeSummary]) -> StepRecord:
    """How the episodes since the last step ended; what did not occur is left out."""
    ends = Counter(f"episodes/{episode.end}" for episode in episodes)
    return {name: ends[name] for name in sorted(ends)}
