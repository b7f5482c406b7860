"""How many requests an engine takes at a time."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rlflow.workers.engine.admission import ROOM, STEPS_PER_INCREASE, Gate, RunningLimit


def test_it_starts_at_the_maximum_and_stays_there() -> None:
    limit = RunningLimit(8)
    for _ in range(3 * STEPS_PER_INCREASE):
        limit.step(running=8, cache_usage=0.2, preempted=0)
    assert limit.value == 8


def test_one_shortage_is_one_decrease() -> None:
    limit = RunningLimit(64)
    limit.step(running=39, cache_usage=0.99, preempted=1)
    assert limit.value == 30
    limit.step(running=38, cache_usage=0.99, preempted=1)
    limit.step(running=31, cache_usage=0.99, preempted=2)
    assert limit.value == 30
    limit.step(running=30, cache_usage=0.9, preempted=0)
    limit.step(running=29, cache_usage=0.99, preempted=1)
    assert limit.value == 22


def test_it_rises_slowly_while_there_is_room_and_the_limit_binds() -> None:
    limit = RunningLimit(64)
    limit.step(running=7, cache_usage=0.99, preempted=1)
    assert limit.value == 6
    for _ in range(STEPS_PER_INCREASE):
        limit.step(running=5, cache_usage=0.2, preempted=0)
        limit.step(running=6, cache_usage=ROOM, preempted=0)
    assert limit.value == 6
    for _ in range(STEPS_PER_INCREASE - 1):
        limit.step(running=6, cache_usage=0.5, preempted=0)
    assert limit.value == 6
    limit.step(running=6, cache_usage=0.5, preempted=0)
    assert limit.value == 7


def test_a_weight_update_is_no_shortage() -> None:
    limit = RunningLimit(64)
    limit.step(running=30, cache_usage=0.5, preempted=0)  # and 10 more have come since
    limit.forgive(40)
    limit.step(running=10, cache_usage=0.2, preempted=10)
    limit.step(running=40, cache_usage=0.5, preempted=30)
    assert limit.value == 64
    limit.step(running=39, cache_usage=0.99, preempted=1)
    assert limit.value == 30


@given(
    maximum=st.integers(1, 64),
    steps=st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1), st.integers(0, 8)), max_size=300),
)
def test_it_stays_within_its_bounds(maximum: int, steps: list[tuple[int, float, int]]) -> None:
    limit = RunningLimit(maximum)
    for running, cache_usage, preempted in steps:
        before = limit.value
        limit.step(running, cache_usage, preempted)
        assert 1 <= limit.value <= maximum
        assert limit.value <= before + 1
        if preempted:
            assert limit.value <= before


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class Visitors:
    """Requests that enter a gate and stay until told to leave."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.entered: list[int] = []
        self.leave = [asyncio.Event() for _ in range(10)]

    def come(self, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._visit(number))

    async def _visit(self, number: int) -> None:
        async with self.gate.admitted():
            self.entered.append(number)
            await self.leave[number].wait()


async def test_the_gate_is_first_come_first_served() -> None:
    gate = Gate(RunningLimit(2))
    visitors = Visitors(gate)
    tasks = [visitors.come(number) for number in range(4)]
    await settle()
    assert visitors.entered == [0, 1]
    visitors.leave[1].set()
    await settle()
    assert visitors.entered == [0, 1, 2]
    gate.limit.value = 1
    visitors.leave[0].set()
    await settle()
    assert (visitors.entered, gate.inside) == ([0, 1, 2], 1)
    gate.limit.value = 2
    gate.refill()
    await settle()
    assert visitors.entered == [0, 1, 2, 3]
    for event in visitors.leave:
        event.set()
    await asyncio.gather(*tasks)
    assert gate.inside == 0


async def test_a_cancelled_request_gives_its_turn_to_the_next() -> None:
    gate = Gate(RunningLimit(1))
    visitors = Visitors(gate)
    tasks = [visitors.come(number) for number in range(4)]
    await settle()
    tasks[1].cancel()
    await settle()
    visitors.leave[0].set()
    await asyncio.sleep(0)
    assert (gate.inside, visitors.entered) == (1, [0]), "the third was let in and does not know yet"
    tasks[2].cancel()
    await settle()
    assert visitors.entered == [0, 3]
    visitors.leave[3].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.inside == 0
