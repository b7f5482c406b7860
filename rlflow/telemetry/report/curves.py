"""Which curves the report shows, from the records of a run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rlflow.telemetry.report.charts import Bucket, Chart, Series, make_series

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl, oldest first."""

PHASES = ("rollout", "reward", "train", "weights", "checkpoint")


def column(records: Records, name: str) -> list[float | None]:
    """The finite numbers of one metric, one for each record; None where a record has none."""
    values = (record.get(name) for record in records)
    return [float(value) if isinstance(value, int | float) and math.isfinite(value) else None for value in values]


def hold_evaluations(records: Sequence[dict[str, Any]], evaluations: Records) -> None:
    """Give each record the evaluation reward that was the latest when its step began."""
    held: float | None = None
    remaining = list(evaluations)
    for record in records:
        while remaining and remaining[0]["step"] < record["step"]:
            held = remaining.pop(0)["eval/reward"]
        record["eval/reward"] = held
    if records and remaining:
        records[-1]["eval/reward"] = remaining[-1]["eval/reward"]


def sections(records: Records, buckets: Sequence[Bucket]) -> list[tuple[str, list[Chart]]]:
    """Headings, each with its charts."""
    curves = _Curves(records, buckets)
    return [("Learning", curves.learning()), ("Freshness", curves.freshness()), ("Speed", curves.speed())]


class _Curves:
    """Charts of one run's records."""

    def __init__(self, records: Records, buckets: Sequence[Bucket]) -> None:
        self._records, self._buckets = records, buckets

    def learning(self) -> list[Chart]:
        evaluation = self._one("eval/reward", "Evaluation reward", "held-out tasks; the latest when a step began")
        kl = self._one("kl", "KL to the reference", "nats a token")
        cut_off = self._one("completions/clipped_ratio", "Completions cut off", "share that reached the length limit")
        no_signal = self._one("frac_reward_zero_std", "Groups without a signal", "share with equal rewards")
        length = self._one("completions/mean_length", "Completion length", "mean tokens after the prompt")
        for chart in (cut_off, no_signal, length):
            chart.from_zero = True
        return [
            self._reward(),
            self._one("loss", "Loss"),
            self._one("grad_norm", "Gradient norm", "before clipping"),
            self._one("entropy", "Entropy", "nats a token"),
            length,
            cut_off,
            no_signal,
            # Only a run that evaluates has the one, only one with a reference policy the other.
            *(chart for chart in (evaluation, kl) if chart.has_values),
        ]

    def freshness(self) -> list[Chart]:
        staleness = self._several("staleness", "Staleness", {"mean": "mean", "max": "oldest token"})
        staleness.note = "versions behind the update"
        oldest = staleness.series[1]
        # The mean of several maxima would hide the one that comes near the bound.
        oldest.values = make_series("", column(self._records, "staleness/max"), self._buckets).high or oldest.values
        mismatch = self._one(
            "sampling/logp_difference_mean", "Engine against trainer", "mean |log-probability difference|"
        )
        staleness.from_zero = mismatch.from_zero = True
        return [staleness, mismatch]

    def speed(self) -> list[Chart]:
        throughput = self._one("throughput/tokens_per_s", "Throughput", "trained tokens a second")
        ready = self._one("queue/ready", "Ready groups", "waiting for the trainer")
        phases = self._several("time", "Time by phase", {phase: phase for phase in PHASES})
        phases.note, phases.stacked, phases.unit = "seconds of a step; phases may overlap", True, " s"
        busy = self._several("utilisation", "Utilisation", {"rollout": "rollout", "train": "training"})
        busy.note, busy.top = "share of a step in which at least one was at work", 1.0
        for chart in (throughput, ready, phases, busy):
            chart.from_zero = True
        return [throughput, ready, phases, busy]

    def _one(self, name: str, title: str, note: str = "") -> Chart:
        series = make_series(title, column(self._records, name), self._buckets)
        return Chart(key=name.replace("/", "-").replace("_", "-"), title=title, series=[series], note=note)

    def _several(self, group: str, title: str, labels: Mapping[str, str]) -> Chart:
        """One chart of `group/<name>` for each name; lines without bands, which would hide one another."""
        columns = {label: column(self._records, f"{group}/{name}") for name, label in labels.items()}
        series = [
            Series(name=label, values=make_series(label, values, self._buckets).values)
            for label, values in columns.items()
        ]
        return Chart(key=group, title=title, series=series)

    def _reward(self) -> Chart:
        means = make_series("reward", column(self._records, "reward"), self._buckets).values
        spreads = make_series("spread", column(self._records, "reward_std"), self._buckets).values
        pairs = [(mean, spread or 0.0) for mean, spread in zip(means, spreads, strict=True)]
        series = Series(
            name="reward",
            values=means,
            low=[None if mean is None else mean - spread for mean, spread in pairs],
            high=[None if mean is None else mean + spread for mean, spread in pairs],
        )
        note = "mean over the episodes of a step; the band is one standard deviation to each side"
        return Chart(key="reward", title="Reward", series=[series], note=note, wide=True)
