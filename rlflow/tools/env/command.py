"""`rlflow env check NAME [key=value ...]` and `rlflow env new FOLDER`."""

import argparse
from functools import partial
from pathlib import Path

from rlflow.errors import ConfigError, report_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    new = verbs.add_parser("new", help="write a small environment that works, to be changed")
    new.add_argument("path", type=Path, metavar="FOLDER", help="where; its last part is the environment's name")
    check = verbs.add_parser("check", help="play tasks with scripts in place of a model, and say what is wrong")
    check.add_argument(
        "settings",
        nargs="+",
        metavar="NAME|key=value",
        help="env.name, or recipe=NAME; env.args.x=1, reward.function=f ...",
    )
    check.add_argument("--tasks", type=int, default=20, metavar="N", help="how many; 20 by default")
    check.add_argument("--json", action="store_true", help="as one JSON object")


def run(options: argparse.Namespace) -> int:
    if options.verb == "new":
        from rlflow.tools.env.new import env_new

        print("\n".join(str(path) for path in env_new(options.path)))
        return 0
    from rlflow.settings.compose import train
    from rlflow.tools.env.check import env_check

    if options.tasks < 1:
        raise ConfigError(f"--tasks must be at least 1; got {options.tasks}")
    settings = [each if "=" in each else f"env.name={each}" for each in options.settings]
    if not any(each.startswith("recipe=") for each in settings):
        settings.append("run.name=check")
    check = partial(env_check, num_tasks=options.tasks, as_json=options.json)
    return train(settings, report_error, check, needs_recipe=False)
