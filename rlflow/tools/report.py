"""`rlflow report RUN`."""

import argparse
from pathlib import Path

from rlflow.telemetry.report.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")


def run(options: argparse.Namespace) -> int:
    print(write_report(options.run) or options.run / "report.html")
    return 0
