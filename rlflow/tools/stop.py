"""`rlflow stop RUN`."""

import argparse
from pathlib import Path

from rlflow.rundir.lock import stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="how long to wait; by default what the run's deadlines allow"
    )


def run(options: argparse.Namespace) -> int:
    print(stop(options.run, options.timeout))
    return 0
