"""`rlflow train recipe=NAME [key=value ...]`. Hydra reads all arguments but two."""

import argparse
from functools import partial

from rlflow.config import Config
from rlflow.errors import ConfigError, report_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    from rlflow.settings.compose import train

    if options.dry_run:
        from rlflow.tools.dry_run.command import dry_run

        return train(options.words, report_error, partial(dry_run, json_wanted=options.json))
    if options.json:
        raise ConfigError("--json has no effect without --dry-run; leave it out: a run writes metrics.jsonl")
    return train(options.words, report_error, _start)


def _start(config: Config) -> int:
    from rlflow.run import train  # imports Ray
    from rlflow.runtime.streams import make_dispensable

    make_dispensable()
    return train(config)
