"""`rlflow report RUN`."""

import argparse
from functools import partial
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.telemetry.report.report import write_report
from rlflow.telemetry.report.watch import watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--watch", action="store_true", help="show it in a browser instead, and go on as the run does")
    parser.add_argument("--port", type=int, metavar="N", help="with --watch: where on 127.0.0.1; by default a free one")


def run(options: argparse.Namespace) -> int:
    if options.watch:
        watch(options.run, options.port or 0, partial(print, flush=True))
    elif options.port is not None:
        raise ConfigError("--port has no effect without --watch; leave it out, or add --watch")
    else:
        print(write_report(options.run))
    return 0
