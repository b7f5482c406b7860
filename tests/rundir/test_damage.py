"""Damaged checkpoints: each is found before anything starts, named, set aside, and the one before is used."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import commit, digests_of
from composed import compose_recipe
from fakes import FakeTrainer
from ledgers import copied

import rlflow.run
from rlflow.cli import main
from rlflow.cluster.trainers import RayActorCritic
from rlflow.config import Config
from rlflow.environments.find import load_environment
from rlflow.errors import CheckpointDamaged, ConfigError, RunError, WorkerLost
from rlflow.groups.ledger import Ledger, counts_by_state
from rlflow.groups.sampler import SamplerState, TaskSampler
from rlflow.rundir.directory import claim, rewound
from rlflow.rundir.restarts import Restarts
from rlflow.rundir.store import CheckpointStore, RunState, read_state, state_to_json, verify

FILES = ("trainer/rank_0.safetensors", "trainer/critic/rank_0.safetensors", "ready", "ledger.db")


def make_state(step: int) -> RunState:
    sampler = SamplerState(kind="uniform", tasks="e3b0", rows="", put_back=[("t3", 0)], curriculum={"position": 5})
    return RunState(step=step, version=step, sampler=sampler, ready=[])


def write(store: CheckpointStore, step: int) -> Path:
    partial = store.begin(step)
    (partial / "trainer" / "critic").mkdir(parents=True)
    for name in FILES[:3]:
        (partial / name).write_bytes(bytes(range(256)) * 20)
    ledger = Ledger()
    for _ in range(step):
        ledger.admit("t", version=0)
    (partial / "ledger.db").write_bytes(asyncio.run(copied(ledger)))
    return commit(store, partial, make_state(step))


def make_store(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", keep=3)
    for step in steps:
        write(store, step)
    return store


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def make_unreadable(path: Path) -> None:
    """For every user, root included: a link to itself."""
    path.unlink()
    path.symlink_to(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "{} is not what was written"),
    (truncate, "{} should have {} bytes, found {}"),
    (Path.unlink, "{} cannot be read (No such file or directory)"),
    (make_unreadable, "{} cannot be read (Too many levels of symbolic links)"),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_each_damage_of_each_file_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], None], text: str, name: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path, 4, 7)
    size = (store.path(7) / name).stat().st_size
    damage(store.path(7) / name)
    found = store.newest_whole()
    assert found is not None
    assert (found.folder, found.state) == (store.path(4), make_state(4))
    assert found.alarms == (
        f"checkpoint step_7 is damaged ({text.format(name, size, size - 1)}) and is now step_7.damaged; step_4 is "
        "whole, so that 3 steps are done again",
    )
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_4", "step_7.damaged"]
    again = store.newest_whole()
    assert again is not None
    assert (again.folder, again.alarms) == (store.path(4), ())


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, make_unreadable, make_folder])
def test_a_damaged_state_is_found(damage: Callable[[Path], None], tmp_path: Path) -> None:
    store = make_store(tmp_path, 4, 7)
    damage(store.path(7) / "state.json")
    found = store.newest_whole()
    assert found is not None
    assert found.folder == store.path(4)
    assert found.alarms[0].startswith("checkpoint step_7 is damaged (state.json ")


def test_no_flipped_bit_of_the_state_is_believed(tmp_path: Path) -> None:
    """Only white space may change without being noticed, and then the state is the same."""
    path = make_store(tmp_path, 7).path(7) / "state.json"
    whole = path.read_bytes()
    noticed = 0
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ (1 << index % 8)]) + whole[index + 1 :])
        try:
            assert read_state(path.parent) == make_state(7)
        except CheckpointDamaged as error:
            noticed += 1
            assert error.damage == "state.json is not what was written"
    assert noticed > len(whole.split()) * 5


def test_many_damaged_files_are_counted(tmp_path: Path) -> None:
    store = make_store(tmp_path, 7)
    for name in FILES:
        flip(store.path(7) / name)
    damage = (
        "ledger.db is not what was written, ready is not what was written, "
        "trainer/critic/rank_0.safetensors is not what was written and 1 more files"
    )
    with pytest.raises(CheckpointDamaged) as caught:
        read_state(store.path(7))
    assert caught.value.damage == damage
    assert str(caught.value).endswith(f"; use another one: `rlflow checkpoint verify {tmp_path}` says which are whole")


def test_when_none_is_whole_everything_stays_and_the_cure_is_said(tmp_path: Path) -> None:
    """A start that set them all aside would be followed by one that begins at step 0."""
    store = make_store(tmp_path, 4, 7)
    flip(store.path(4) / "ready")
    truncate(store.path(7) / "ledger.db")
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            store.newest_whole()
        size = (store.path(7) / "ledger.db").stat().st_size
        assert str(caught.value) == (
            f"no checkpoint in {store.folder} is whole: step_7: ledger.db should have {size + 1} bytes, found {size}; "
            "step_4: ready is not what was written; bring the files back from a copy, or begin anew with "
            "run.on_exists=fresh or another run.dir"
        )
    assert store.steps() == [4, 7]


def test_what_was_set_aside_is_bounded_and_counts_as_no_checkpoint(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, 4, 7)
    for step in (4, 7):
        flip(store.path(step) / "ready")
    store.newest_whole()
    assert sorted(path.name for path in store.folder.glob("*.damaged")) == ["step_4.damaged", "step_7.damaged"]
    for step in (4, 7):
        write(store, step)
    assert store.steps() == [2, 4, 7]
    flip(store.path(7) / "ready")
    store.newest_whole()
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_2", "step_4", "step_7.damaged"]


def test_another_format_is_refused_and_not_taken_for_damage(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, 4)
    path = store.path(4) / "state.json"
    path.write_text(json.dumps({"state": state_to_json(make_state(4)), "sizes": {"ready": 5120}}))
    with pytest.raises(
        RunError, match="step_4 has format 4, but this rlflow reads format 6; use the rlflow that wrote"
    ):
        store.newest_whole()
    assert store.steps() == [2, 4]


def test_a_file_without_a_digest_is_never_committed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    partial = store.begin(3)
    (partial / "ready").write_bytes(b"12345")
    digests = digests_of(partial)
    (partial / "ledger.db").write_bytes(b"12345")
    with pytest.raises(AssertionError, match=r"ledger\.db"):
        store.commit(partial, state_to_json(make_state(3)), digests)


async def test_the_files_of_policy_and_critic_are_told_by_their_folders(tmp_path: Path) -> None:
    both = RayActorCritic(FakeTrainer(), FakeTrainer())  # type: ignore[arg-type]
    await both.snapshot()
    digests = await both.write_snapshot(tmp_path / "trainer")
    assert digests == digests_of(tmp_path / "trainer")
    assert digests.keys() == {"trainer.json", "critic/trainer.json"}


def make_config(path: Path) -> Config:
    config = Config()
    config.run.dir = str(path)
    return config


def begun(path: Path, *steps: int) -> None:
    """A run's directory with checkpoints of these steps."""
    with claim(make_config(path)) as run_dir:
        for step in steps:
            write(run_dir.checkpoints, step)


def test_a_run_is_claimed_with_its_newest_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own ledger, which the processes of the run before wrote, does not matter."""
    begun(tmp_path, 4, 7)
    flip(tmp_path / "checkpoints" / "step_7" / "trainer" / "rank_0.safetensors")
    (tmp_path / "ledger.db").write_bytes(b"\xff" * 8192)
    (tmp_path / "ledger.db-wal").write_bytes(b"\xff" * 100)
    reading = f"reading the newest checkpoint in {tmp_path}/checkpoints to check it ...\n"
    with claim(make_config(tmp_path)) as run_dir:
        assert (run_dir.resume_from, run_dir.state) == (tmp_path / "checkpoints" / "step_4", make_state(4))
        assert counts_by_state(run_dir.ledger)["admitted"] == 4
    assert capsys.readouterr().out == (
        f"{reading}ALARM: checkpoint step_7 is damaged (trainer/rank_0.safetensors is not what was written) and is now "
        "step_7.damaged; step_4 is whole, so that 3 steps are done again\n"
    )
    with claim(make_config(tmp_path)):
        assert capsys.readouterr().out == reading


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"", b"run: [", b"run: 3\n"])
def test_settings_that_cannot_be_read_are_named(content: bytes | None, tmp_path: Path) -> None:
    begun(tmp_path, 4)
    settings = tmp_path / "config.yaml"
    settings.unlink() if content is None else settings.write_bytes(content)
    named = pytest.raises(ConfigError, match=r"config\.yaml, with which the run was begun, cannot be read \(.*fresh")
    with named, claim(make_config(tmp_path)):
        raise AssertionError("resumed")


class Told:
    """As much of a RunObserver as a loss needs."""

    num_steps = 8

    def __init__(self) -> None:
        self.alarms: list[str] = []

    def phase(self, name: str) -> None:
        pass

    def alarm(self, text: str) -> None:
        self.alarms.append(text)


def test_a_driver_that_goes_on_after_a_loss_checks_too(tmp_path: Path) -> None:
    begun(tmp_path, 4, 7)
    with claim(make_config(tmp_path)) as run_dir:
        flip(tmp_path / "checkpoints" / "step_7" / "ledger.db")
        run = rlflow.run._Run(
            config=make_config(tmp_path),
            spec=None,  # type: ignore[arg-type]  # a loss asks for none of these
            tasks=[],
            rows="",
            evaluation_tasks=[],
            model_path="",
            reward_models={},
            run_dir=replace(run_dir, resume_from=None, state=None),
        )
        told = Told()
        lost = WorkerLost("the trainer rank 0 died")
        after = asyncio.run(rlflow.run._after(lost, run, told, Restarts(7)))  # type: ignore[arg-type]
    assert after.run_dir.state == make_state(4)
    assert after.setback is not None
    assert after.setback.step == 8
    damaged, lost_steps = told.alarms
    assert damaged.startswith("checkpoint step_7 is damaged (ledger.db is not what was written)")
    assert "the run goes on after step 4, which is the last that was saved, so that 4 are done again" in lost_steps


def test_a_disk_that_refuses_the_ledger_after_a_loss_is_told_with_the_cure(tmp_path: Path) -> None:
    begun(tmp_path, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with claim(make_config(tmp_path)) as run_dir:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(RunError, match=r"the run cannot be written in .*ulimit -f.* and run the same command"):
                rewound(run_dir)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_verify_has_a_line_for_each_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no checkpoint yet\n"
    store = make_store(tmp_path, 2, 4, 7)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step_2  whole\nstep_4  whole\nstep_7  whole\n"
    flip(store.path(4) / "ready")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "step_2  whole\nstep_4  ready is not what was written\nstep_7  whole\n"
    assert main(["checkpoint", "verify", str(store.path(7))]) == 0
    assert capsys.readouterr().out == "step_7  whole\n"
    (store.path(7) / "state.json").unlink()
    assert verify(store.path(7)) == {"step_7": "state.json cannot be read (No such file or directory)"}
    assert store.steps() == [2, 4, 7]


def test_a_checkpoint_is_known_by_the_folder_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "step_2-try"
    store = make_store(run, 4)
    assert verify(run) == {"step_4": None}
    monkeypatch.chdir(store.path(4))
    assert verify(Path()) == {"step_4": None}


def make_rows(path: Path, *answers: str) -> None:
    path.write_text("".join(f'{{"question": "q{row}", "answer": "{answer}"}}\n' for row, answer in enumerate(answers)))


def test_edited_tasks_are_refused_before_anything_starts_unless_a_file_accepts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    settings = ["recipe=smoke", f"run.dir={run}", "env.name=dataset", f"env.args.path={rows}"]
    config = compose_recipe(*settings[:-1], f"+{settings[-1]}")

    def sampler() -> TaskSampler:
        return TaskSampler(load_environment(config.env, config.reward).tasks(), 0)

    make_rows(rows, "1", "2", "3")
    with claim(config) as run_dir:
        partial = run_dir.checkpoints.begin(1)
        (partial / "ledger.db").write_bytes(asyncio.run(copied(Ledger())))
        state = RunState(step=1, version=1, sampler=sampler().state, ready=[])
        commit(run_dir.checkpoints, partial, state)
    with claim(config) as run_dir:
        rlflow.run._check_same_tasks(run_dir, sampler(), state)
    assert "ALARM" not in capsys.readouterr().out
    make_rows(rows, "1", "2", "4")
    assert main(["train", *settings]) == 2
    out, error = capsys.readouterr()
    assert out.splitlines()[1:] == [f"reading the newest checkpoint in {run}/checkpoints to check it ..."]
    assert error == (
        f"rlflow: error: 1 of 3 tasks ('rows/3') were edited since {run}/checkpoints/step_1 was saved; restore the "
        f"data, begin another run.dir, or make the file {run}/accept_edited_tasks to go on with them as they are now\n"
    )
    (run / "accept_edited_tasks").touch()
    with claim(config) as run_dir:
        rlflow.run._check_same_tasks(run_dir, sampler(), state)
        assert capsys.readouterr().out.splitlines()[-1] == (
            f"ALARM: 1 of 3 tasks ('rows/3') were edited since {run}/checkpoints/step_1 was saved; "
            f"{run}/accept_edited_tasks accepts it"
        )
        make_rows(rows, "1", "2")
        with pytest.raises(ConfigError, match="the checkpoint was saved with other tasks than the 2 that"):
            rlflow.run._check_same_tasks(run_dir, sampler(), state)
