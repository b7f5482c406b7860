"""`rlflow train recipe=NAME [key=value ...]`. Hydra reads all arguments but two."""

import argparse
from functools import partial
from pathlib import Path

from rlflow import __version__
from rlflow.config import Config
from rlflow.errors import ConfigError, report_error
from rlflow.telemetry.text import number
from rlflow.tools.figures import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")


def run(options: argparse.Namespace) -> int:
    if options.help:
        from rlflow.settings.describe import help_page

        print(help_page([word for word in options.words if "=" not in word]))
        return 0
    if not (options.dry_run or options.json or any(word.startswith("-") for word in options.words)):
        # Before the imports, so that something is seen at once.
        print(f"rlflow {__version__}: reading settings, tasks and model ...", flush=True)
    from rlflow.settings.compose import train

    if options.dry_run:
        from rlflow.tools.dry_run.command import dry_run

        return train(options.words, report_error, partial(dry_run, json_wanted=options.json))
    if options.json:
        raise ConfigError("--json has no effect without --dry-run; leave it out: a run writes metrics.jsonl")
    is_sweep = bool({"-m", "--multirun"} & {*options.words})
    folders: list[Path] = []

    def start(config: Config) -> int:
        if is_sweep and config.run.dir is not None:
            folders.append(Path(config.run.dir))
        code = _start(config)
        if is_sweep and code > 128:
            raise KeyboardInterrupt  # Ctrl-C ends the sweep, and not one job of it
        return code

    try:
        return train(options.words, report_error, start, lambda config: _final(Path(config.run.dir or "")))
    finally:
        if folders:
            from rlflow.tools.runs.read import HELD_OUT, REWARD

            print(table(("run", REWARD, HELD_OUT, "state"), map(_row, folders)))
            print(f"in {folders[0].parent}; rlflow compare lays their curves side by side", flush=True)


def _final(folder: Path) -> float | None:
    """The last evaluation of a run, or the reward of its last steps if it had none."""
    from rlflow.tools.runs.read import HELD_OUT, REWARD, read_run

    ended = read_run(folder)
    return ended.final(REWARD) if (evaluation := ended.final(HELD_OUT)) is None else evaluation


def _row(folder: Path) -> list[str]:
    from rlflow.tools.runs.read import HELD_OUT, REWARD, read_run

    if not (folder / "config.yaml").is_file():
        return [folder.name, "-", "-", "not begun"]
    ended = read_run(folder)
    return [folder.name, number(ended.final(REWARD)), number(ended.final(HELD_OUT)), ended.state]


def _start(config: Config) -> int:
    from rlflow.run import train  # imports Ray
    from rlflow.runtime.streams import make_dispensable

    make_dispensable()
    return train(config)
