"""What is said of machines with other packages than the driver's."""

from __future__ import annotations

from rlflow.cluster.versions import differing

OURS = {"Python": "3.11", "torch": "2.13.0+cpu", "ray": "2.60.0"}


def test_each_machine_with_another_version_is_named() -> None:
    found = {
        "a": {"Python": "3.11", "torch": "2.13.0+cu130", "ray": "2.60.0", "vllm": "0.32"},
        "b": {"Python": "3.12", "torch": "2.11.0", "ray": "2.60.0"},
    }
    assert differing(OURS, found) == [
        "b has Python 3.12, where the driver has 3.11 and torch 2.11.0, where the driver has 2.13.0+cpu"
    ]


def test_a_package_that_only_one_of_them_has_does_not_count() -> None:
    assert differing({"ray": "2.60.0"}, {"a": {"torch": "2.13.0"}}) == []
