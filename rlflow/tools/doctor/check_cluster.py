"""Judges the nodes of a cluster beside each other, and what is between them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from rlflow.tools.doctor.facts import Link, NodeReport, TorchFacts, VllmFacts, installed_version
from rlflow.tools.doctor.findings import Finding, error, ok, warning

MAX_SKEW_S = 1.0
"""Above it lines of logs and traces of several nodes are out of order."""
WRONG_SKEW_S = 60.0
"""Above it tokens and certificates are refused."""
SLOW = 0.5
"""Share of the median bandwidth below which a pair of nodes is called slow."""


def check_nodes(reports: Sequence[NodeReport], lost: Mapping[str, str]) -> list[Finding]:
    """`lost` are nodes that did not answer, with the reason."""
    findings = [
        error("nodes", f"{name}: {reason}", "look at `ray status` and at raylet.out there; is rlflow installed on it?")
        for name, reason in lost.items()
    ]
    findings = findings or [
        ok("nodes", f"all {len(reports)} nodes answer" if len(reports) > 1 else "one, and it answers")
    ]
    return [*findings, *_versions(reports), *_clocks(reports), *_files(reports)]


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each to the next, as in a ring; none for one node."""
    return [(name, names[(index + 1) % len(names)]) for index, name in enumerate(names)] if len(names) > 1 else []


def check_links(links: Sequence[Link], failed: Mapping[str, str]) -> list[Finding]:
    """`failed` are pairs that nothing could be sent between, with the reason."""
    cure = "are the ports of Ray's object managers open between the two (ray start --object-manager-port)?"
    findings = [error("bandwidth", f"{pair}: {reason}", cure) for pair, reason in failed.items()]
    usual = median(link.bytes_per_s for link in links) if links else 0.0
    return findings + [_link(link, usual) for link in links]


def _link(link: Link, usual: float) -> Finding:
    text = f"{link.source} -> {link.target}: {link.bytes_per_s / 1e9:.2f} GB/s, {link.latency * 1e3:.1f} ms"
    if link.bytes_per_s >= SLOW * usual:
        return ok("bandwidth", text)
    return warning(
        "bandwidth",
        f"{text}; the median is {usual / 1e9:.2f} GB/s",
        "is one of them on another switch or network card, or busy? keep the trainer's ranks off it",
    )


def _versions(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    computing = [report for report in reports if report.computes]
    kinds: list[tuple[str, Sequence[NodeReport], Callable[[NodeReport], str | None]]] = [
        ("Python", reports, lambda report: report.facts.python),
        ("rlflow", reports, lambda report: report.facts.rlflow),
        ("Ray", reports, lambda report: installed_version(report.facts, "ray")),
        ("transformers", reports, lambda report: installed_version(report.facts, "transformers")),
        ("torch", computing, _torch),
        ("vLLM", computing, _vllm),
        ("driver", computing, lambda report: report.facts.driver or None),
    ]
    differing = [finding for name, of, version in kinds for finding in _version(name, of, version)]
    yield from differing or [ok("versions", "the same on all nodes")]


def _version(
    name: str, reports: Sequence[NodeReport], version: Callable[[NodeReport], str | None]
) -> Iterator[Finding]:
    found: dict[str, list[str]] = {}
    for report in reports:
        value = version(report)
        if value is not None:
            found.setdefault(value, []).append(report.name)
    if len(found) > 1:
        text = "; ".join(f"{value} on {_names(names)}" for value, names in found.items())
        if name == "driver":
            yield warning("versions", f"NVIDIA's driver differs: {text}", "install the same one everywhere")
        else:
            yield error("versions", f"{name} differs: {text}", "install the same one everywhere, or use one image")


def _clocks(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    cure = "run a time service on all nodes (chronyc tracking, timedatectl status)"
    is_skewed = False
    for report in reports:
        certain = abs(report.skew) - report.round_trip / 2
        if certain <= MAX_SKEW_S:
            continue
        is_skewed = True
        text = f"{report.name} is {report.skew:+.1f} s off the driver's"
        yield (error if certain > WRONG_SKEW_S else warning)("clocks", text, cure)
    if not is_skewed and reports:
        most = max(reports, key=lambda report: abs(report.skew))
        yield ok("clocks", f"at most {abs(most.skew) * 1e3:.1f} ms apart (+-{most.round_trip * 500:.1f} ms)")


def _files(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    blind = [report.name for report in reports if not report.sees_run_dir]
    if blind:
        path = reports[0].facts.run_dir.path
        yield error(
            "run directory",
            f"{path} is not the driver's on {_names(blind)}",
            "set run.dir to a folder on a file system that all nodes have mounted at the same path",
        )
    elif len(reports) > 1:
        yield ok("run directory", "the same on all nodes")
    without = [report.name for report in reports if not report.sees_model]
    if without:
        yield error(
            "model",
            f"its folder is not there on {_names(without)}",
            "have HF_HOME and RLFLOW_CACHE on a file system that all nodes see, or set model.path to a folder there",
        )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _torch(report: NodeReport) -> str | None:
    return report.tried.torch.version if isinstance(report.tried.torch, TorchFacts) else None


def _vllm(report: NodeReport) -> str | None:
    return report.tried.vllm.version if isinstance(report.tried.vllm, VllmFacts) else None
