"""`rlflow checkpoint verify RUN`."""

import argparse
from pathlib import Path

from rlflow.rundir.store import CheckpointStore, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="VERB", required=True)
    check = verbs.add_parser("verify", help="one line for each checkpoint; exit code 1 if one is not whole")
    check.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or the folder of one checkpoint")


def run(options: argparse.Namespace) -> int:
    found, best = verify(options.run), CheckpointStore(options.run / "checkpoints", keep=1).best()
    names = {name: f"{name} (best)" if name == f"step_{best}" else name for name in found}
    print("\n".join(f"{names[name]}  {damage or 'whole'}" for name, damage in found.items()) or "no checkpoint yet")
    return int(any(found.values()))
