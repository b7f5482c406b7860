"""The life of an engine, and who serves."""

import pytest

from rlflow.rollout.health import MAX_DEATHS, EngineState, Health, serving, waves


def engine(health: Health, version: int | None = None, deaths: int = 0) -> EngineState:
    return EngineState(health=health, version=version, deaths=deaths)


def healthy(version: int = 1) -> EngineState:
    return engine(Health.HEALTHY, version)


def loading(version: int | None = 1) -> EngineState:
    return engine(Health.STALE, version)


GIVEN_UP = engine(Health.DEAD, deaths=MAX_DEATHS)


def test_a_whole_life() -> None:
    state = EngineState()
    state.start()
    state.started()
    assert (state.health, state.version, state.is_up) == (Health.STALE, None, True)
    state.load()
    state.loaded(3)
    assert (state.health, state.version) == (Health.HEALTHY, 3)
    state.load()
    assert (state.health, state.version) == (Health.STALE, 3)
    state.loaded(4)
    state.died("killed")
    assert (state.health, state.version, state.deaths, state.last_death) == (Health.DEAD, None, 1, "killed")


@pytest.mark.parametrize(
    ("health", "step"),
    [
        (Health.DEAD, lambda state: state.started()),
        (Health.DEAD, lambda state: state.loaded(1)),
        (Health.DEAD, lambda state: state.load()),
        (Health.DEAD, lambda state: state.died("again")),
        (Health.STARTING, lambda state: state.loaded(1)),
        (Health.STARTING, lambda state: state.start()),
        (Health.STARTING, lambda state: state.load()),
        (Health.STALE, lambda state: state.start()),
        (Health.STALE, lambda state: state.started()),
        (Health.HEALTHY, lambda state: state.start()),
        (Health.HEALTHY, lambda state: state.loaded(2)),
        (Health.HEALTHY, lambda state: state.load_failed()),
    ],
)
def test_no_transition_is_left_out(health: Health, step: object) -> None:
    state = engine(health)
    with pytest.raises(AssertionError):
        step(state)  # pyright: ignore[reportCallIssue]
    assert state.health is health


def test_three_deaths_without_service_give_an_engine_up() -> None:
    state = EngineState()
    for number in range(MAX_DEATHS):
        assert not state.is_given_up
        state.start()
        state.started()
        state.load()
        state.loaded(7)
        state.died(f"death {number}")
    assert state.is_given_up
    with pytest.raises(AssertionError, match="given up stays dead"):
        state.start()


@pytest.mark.parametrize("how", ["answered", "two versions"])
def test_service_forgives_earlier_deaths(how: str) -> None:
    state = engine(Health.DEAD, deaths=MAX_DEATHS - 1)
    state.start()
    state.started()
    state.loaded(7)
    assert state.deaths == 2
    if how == "answered":
        state.served()
    else:
        state.load()
        state.loaded(8)
    state.died("killed")
    assert (state.deaths, state.is_given_up) == (1, False)


def test_a_failed_load_leaves_no_version() -> None:
    state = healthy()
    state.load()
    state.load_failed()
    assert (state.health, state.version) == (Health.STALE, None)


@pytest.mark.parametrize(
    ("states", "pinned", "expected"),
    [
        ([healthy(1), healthy(2)], set(), (0, 1)),
        ([healthy(), loading()], set(), (0,)),
        ([loading(), loading(None)], set(), (0,)),
        ([loading(None), engine(Health.STARTING)], set(), ()),
        ([healthy(), healthy()], {1}, (0,)),
        ([engine(Health.STARTING), healthy()], {1}, ()),
        ([GIVEN_UP, healthy()], {1}, (1,)),
        ([healthy()], {0}, (0,)),
        ([engine(Health.DEAD)], set(), ()),
    ],
)
def test_who_serves(states: list[EngineState], pinned: set[int], expected: tuple[int, ...]) -> None:
    assert serving(states, pinned) == expected


def test_waves_are_a_quarter_of_the_engines() -> None:
    assert list(waves(range(9), 9, is_rolling=True)) == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
        range(8, 9),
    ]
    assert list(waves([0, 2, 3], 8, is_rolling=True)) == [[0, 2], [3]]
    assert list(waves([0, 1], 2, is_rolling=True)) == [[0], [1]]
    assert list(waves([0, 2, 3], 8, is_rolling=False)) == [[0, 2, 3]]
    assert list(waves([], 8, is_rolling=False)) == []
