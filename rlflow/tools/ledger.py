"""`rlflow ledger RUN`."""

import argparse
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.groups.ledger import counts_by_state
from rlflow.tools.figures import print_figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(options: argparse.Namespace) -> int:
    path = options.run / "ledger.db"
    if not path.is_file():
        raise ConfigError(f"{options.run} has no ledger.db; give the directory of a run that has started")
    print_figures(counts_by_state(path), as_json=options.json)
    return 0
