"""What an environment can do wrong costs its own episode, at most those of its process; nothing of it is a reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import ATTACKS, GROUP_SIZE, PROCESSES, play_all

from rlflow.types import EpisodeEnd

TRIED_ELSEWHERE = ("hang, waiting, ignores cancellation", "hang in a thread")
"""By the tests of the pool, which wait less."""


@pytest.mark.slow
async def test_every_failure_has_its_end_and_the_processes_recover(tmp_path: Path) -> None:
    attacks = [attack for attack in ATTACKS if attack.name not in TRIED_ELSEWHERE]
    aftermaths = await play_all(attacks, tmp_path)
    assert len(aftermaths) == len(attacks) == len(ATTACKS) - len(TRIED_ELSEWHERE)
    in_same_process = GROUP_SIZE // PROCESSES - 1
    for aftermath in aftermaths:
        attack = aftermath.attack
        attacked, *others = aftermath.episodes
        assert attacked.end is attack.end, (attack.name, attacked)
        assert attacked.detail.startswith(attack.detail), attack.name
        assert (attacked.reward is None) == attacked.end.is_error, attack.name
        ends = sorted(episode.end for episode in others)
        beside = [attack.beside] * in_same_process
        assert ends == sorted([*beside, *[EpisodeEnd.COMPLETED] * (len(others) - in_same_process)]), attack.name
        assert aftermath.num_open == 0, attack.name
