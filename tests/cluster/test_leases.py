"""Which runner has which of the environment's leases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlflow.cluster.runners import leases_of_runners


@pytest.mark.parametrize(
    ("leases", "runners", "group_size", "found"),
    [
        ("", 3, 2, ["", "", ""]),
        ("abcdefgh", 8, 8, ["abcdefgh"]),
        ("abcdefgh", 8, 4, ["aceg", "bdfh"]),
        ("abcdefgh", 2, 2, ["aceg", "bdfh"]),
        ("abc", 8, 8, ["abc"]),
        ("abcde", 8, 2, ["ace", "bd"]),
    ],
)
def test_a_group_can_play_all_of_its_episodes_at_once(
    leases: str, runners: int, group_size: int, found: Sequence[str]
) -> None:
    assert leases_of_runners(leases, runners, group_size) == found
