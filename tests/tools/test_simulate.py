"""The simulator: what it conserves, what it repeats, and what it says of small fleets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rlflow.cli import main
from rlflow.config import Update
from rlflow.errors import ConfigError, RunError, StaleGroup, WorkerError
from rlflow.roles import StagedWeights
from rlflow.tools.simulate import simulate as module
from rlflow.tools.simulate.clock import run_virtually
from rlflow.tools.simulate.models import Meter, ModelledEngine, ModelledEngines, ModelledRunners, ModelledTrainer, Slots
from rlflow.tools.simulate.plan import Figures, Plan, check
from rlflow.tools.simulate.simulate import simulate
from rlflow.types import EpisodeEnd, EpisodeSummary, GroupOrder, ReadyGroup, Task

SMALL = Plan(engines=4, in_flight=2, group_size=4, steps=8, max_tokens=20000)
ALWAYS_100 = Plan(engines=1, in_flight=1, group_size=2, median_tokens=100, sigma=0, token_s=0.1, weights_s=5.0)
"""A group lasts 10 s."""


def without_machine(figures: Figures) -> Figures:
    """The figures that must repeat: all but those that this machine's clock and memory decide."""
    return replace(figures, driver_ms_per_group=0.0, wall_s=0.0, rss_first_mb=0.0, rss_last_mb=0.0)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_groups_are_conserved_and_never_too_old(bound: int) -> None:
    figures = simulate(replace(SMALL, max_versions=bound, failures=0.1))
    assert figures.groups_started == figures.groups_ended
    assert sum(figures.staleness.values()) == figures.steps * figures.groups_per_step == 64
    assert 0 <= min(figures.staleness) <= max(figures.staleness) <= bound
    assert figures.dropped["failed"] > 0
    assert 0 < figures.utilisation_engines <= 1
    assert 0 < figures.utilisation_trainer <= 1


def test_a_seed_repeats_and_another_one_differs() -> None:
    plan = replace(SMALL, max_versions=2, failures=0.05)
    first, again, other = simulate(plan), simulate(plan), simulate(replace(plan, seed=1))
    assert without_machine(first) == without_machine(again)
    assert first.step_s != other.step_s


def test_more_ranks_change_nothing_but_the_cost_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: how far a simulation is goes to standard error."""
    monkeypatch.setattr(module, "_TELL_S", 0.0)
    one, many = (without_machine(simulate(replace(SMALL, ranks=ranks))) for ranks in (1, 40))
    assert one == many
    assert capsys.readouterr().err.startswith("staleness 4: step 1 of 16\nstaleness 4: step 2 of 16\n")


def test_staleness_is_faster_than_synchronous() -> None:
    synchronous, stale = (simulate(replace(SMALL, max_versions=bound)) for bound in (0, 4))
    assert synchronous.staleness == {0: 64}
    assert stale.groups_per_s > 1.5 * synchronous.groups_per_s
    assert stale.utilisation_engines > 0.9 > synchronous.utilisation_engines


def test_equal_lengths_without_pauses_keep_a_synchronous_fleet_busy_but_for_the_trainer() -> None:
    plan = Plan(engines=3, in_flight=2, max_versions=0, steps=5, sigma=0, median_tokens=100, token_s=0.1, weights_s=0)
    figures = simulate(plan)
    # All groups end after 10 s, and then the balanced trainer takes 10 s for them.
    assert figures.step_s == pytest.approx(20.0)
    assert (figures.utilisation_engines, figures.utilisation_trainer) == pytest.approx((0.5, 0.5))
    assert figures.tokens_per_s == pytest.approx(6 * 8 * 100 / 20)


def test_a_slow_trainer_is_the_limit() -> None:
    figures = simulate(replace(SMALL, trainer_speed=0.25))
    assert figures.utilisation_trainer > 0.95
    assert figures.utilisation_engines < 0.5


def test_a_run_in_which_everything_fails_stops() -> None:
    with pytest.raises(RunError, match="the simulated run stopped: 16 groups in a row gave nothing to train on"):
        simulate(replace(SMALL, failures=0.999))


def test_expected_lengths() -> None:
    plan = Plan(median_tokens=100, sigma=1.0, max_tokens=1_000_000, group_size=2)
    assert plan.mean_tokens == pytest.approx(164.87, rel=2e-3)  # 100 exp(1/2)
    assert plan.mean_longest_tokens == pytest.approx(250.70, rel=2e-3)  # 2 * 164.87 * P(Z < 1/sqrt 2)
    assert replace(plan, sigma=0.0, max_tokens=70).mean_tokens == 70
    assert replace(plan, max_tokens=1).mean_tokens == pytest.approx(1.0, rel=1e-3)


# -- the workers


def staged(version: int) -> StagedWeights:
    return StagedWeights(version=version, path="", num_bytes=0, slots=(), buckets=())


def order(group_id: int) -> GroupOrder:
    return GroupOrder(group_id=group_id, task=Task(id=f"t{group_id}", prompt=()), num_episodes=2, seed=group_id)


def test_slots_go_to_the_least_loaded_engine_and_then_in_order() -> None:
    async def scenario() -> None:
        engines = [ModelledEngine(0), ModelledEngine(1)]
        slots = Slots(engines, in_flight=2)
        taken = [slots.ask() for _ in range(4)]
        assert [engine.index for engine in taken if isinstance(engine, ModelledEngine)] == [0, 1, 0, 1]
        first, second, third = slots.ask(), slots.ask(), slots.ask()
        assert isinstance(first, asyncio.Future) and isinstance(second, asyncio.Future)
        assert isinstance(third, asyncio.Future)
        first.cancel()
        slots.give_back(engines[1])
        slots.give_back(engines[0])
        assert (second.result(), third.result()) == (engines[1], engines[0])
        slots.give_back(engines[1])
        assert slots.ask() is engines[1]

    run_virtually(scenario())


def test_a_group_outlasts_the_pause_of_its_engine_and_ends_under_the_new_version() -> None:
    async def scenario() -> tuple[float, int, int, float]:
        engines = ModelledEngines(ALWAYS_100, Meter())
        runners = ModelledRunners(ALWAYS_100, engines, Meter())
        await engines.load_weights(staged(0))
        playing = asyncio.create_task(runners.play(order(1)))
        await asyncio.sleep(2)
        await engines.load_weights(staged(1))
        played = await playing
        now = asyncio.get_running_loop().time()
        return now, played.episodes[0].oldest_version, played.episodes[0].newest_version, engines.occupancy.total(now)

    # 5 s of loading, 2 s and 8 s of sampling with 5 s of pause between them.
    assert run_virtually(scenario()) == (20.0, 0, 1, 10.0)


def test_engines_load_a_quarter_at_a_time_or_all_at_once() -> None:
    async def seconds(update: Update) -> float:
        engines = ModelledEngines(Plan(engines=8, weights_s=5.0, update=update), Meter())
        await engines.load_weights(staged(1))
        assert {engine.version for engine in engines.engines} == {1}
        return asyncio.get_running_loop().time()

    assert run_virtually(seconds(Update.rolling)) == 20.0
    assert run_virtually(seconds(Update.all)) == 5.0


def test_stale_groups_are_cancelled_and_their_slot_goes_on() -> None:
    async def scenario() -> float:
        engines = ModelledEngines(ALWAYS_100, Meter())
        runners = ModelledRunners(ALWAYS_100, engines, Meter())
        await engines.load_weights(staged(0))
        stale, waiting = (asyncio.create_task(runners.play(order(group_id))) for group_id in (1, 2))
        await asyncio.sleep(2)
        await runners.cancel_stale(0)
        assert not stale.done()
        await runners.cancel_stale(1)
        with pytest.raises(StaleGroup, match="group 1 began under version 0"):
            await stale
        await waiting
        assert (runners.num_started, runners.num_ended) == (2, 2)
        return asyncio.get_running_loop().time()

    assert run_virtually(scenario()) == 17.0  # loading 5 s, group 1 for 2 s, group 2 for 10 s


def test_a_group_cancelled_while_it_waits_gives_back_nothing_it_has_not() -> None:
    async def scenario() -> int:
        engines = ModelledEngines(ALWAYS_100, Meter())
        runners = ModelledRunners(ALWAYS_100, engines, Meter())
        plays = [asyncio.create_task(runners.play(order(group_id))) for group_id in (1, 2)]
        await asyncio.sleep(1)
        for play in plays:
            play.cancel()
        await asyncio.gather(*plays, return_exceptions=True)
        return engines.engines[0].load

    assert run_virtually(scenario()) == 0


def test_a_failing_group_raises_before_its_end() -> None:
    async def scenario() -> float:
        plan = replace(ALWAYS_100, failures=1.0)
        engines = ModelledEngines(plan, Meter())
        with pytest.raises(WorkerError, match="group 1 was made to fail"):
            await ModelledRunners(plan, engines, Meter()).play(order(1))
        return asyncio.get_running_loop().time()

    assert 0.0 < run_virtually(scenario()) < 10.0


def test_the_balanced_trainer_takes_as_long_as_the_fleet() -> None:
    async def scenario() -> float:
        trainer = ModelledTrainer(ALWAYS_100, Meter())
        episode = EpisodeSummary(
            end=EpisodeEnd.COMPLETED,
            reward=1.0,
            num_prompt_tokens=0,
            num_completion_tokens=100,
            num_loss_tokens=100,
            oldest_version=0,
            newest_version=0,
        )
        group = ReadyGroup(
            group_id=1,
            task_id="t1",
            episodes=[episode] * 2,
            payloads=[None] * 2,
            task_kind="",
            advantages=[[0.0]] * 2,
            num_bytes=0,
        )
        await trainer.accumulate([group], None)
        return trainer.occupancy.total(asyncio.get_running_loop().time())

    assert run_virtually(scenario()) == pytest.approx(10.0)  # as long as the one slot of the fleet


# -- the command


REFUSED: list[tuple[dict[str, float], str]] = [
    ({"engines": 0}, "--engines must be at least 1; got 0"),
    ({"group_size": 1}, "--group-size must be at least 2, to have something to compare; got 1"),
    ({"groups_per_step": 0}, "--groups-per-step must be at least 1; got 0"),
    ({"max_versions": -1}, "--staleness must not be negative; got -1"),
    ({"token_s": 0.0}, "--token-s must be a positive number; got 0.0"),
    ({"sigma": float("nan")}, "--sigma must be a number that is not negative; got nan"),
    ({"failures": 1.0}, "--failures is a probability in [0, 1); got 1.0"),
    ({"seed": -1}, "--seed must not be negative; got -1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_plan_that_no_fleet_can_have(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(replace(Plan(), **changes))  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == message


def test_the_command_prints_a_table_and_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --engines 2 --in-flight 2 --group-size 2 --steps 4 --staleness 0,2 --json"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["staleness", "0", "2"]
    first, second = json.loads(lines[-1])["runs"]
    assert (first["max_versions"], second["max_versions"]) == (0, 2)
    assert (first["engines"], first["slots"], first["groups_per_step"], first["steps"]) == (2, 4, 4, 4)
    assert first["speed_up"] == 1.0
    assert second["speed_up"] == pytest.approx(second["groups_per_s"] / first["groups_per_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--staleness often", "--staleness must be whole numbers such as 0,1,4; got often"),
        ("--engines 0", "--engines must be at least 1; got 0"),
    ],
)
def test_a_wrong_value_costs_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words.split()]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"rlflow: error: {message}\n")


def test_the_simulator_loads_neither_ray_nor_torch_nor_vllm() -> None:
    code = (
        "import sys\nfrom rlflow.cli import main\n"
        "main('simulate --engines 1 --in-flight 2 --steps 1 --staleness 0'.split())\n"
        "print([name for name in ('ray', 'torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
