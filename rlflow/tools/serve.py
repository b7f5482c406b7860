"""`rlflow serve RUN|CHECKPOINT|MODEL [key=value ...] [--step N|best] [--port N]`."""

import argparse

from rlflow.errors import RunError

_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--port", type=int, default=_PORT, metavar="N", help="of 127.0.0.1; %(default)s by default")
    parser.epilog = "It asks for a key: VLLM_API_KEY, or else a random one. Ctrl-C ends it."


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL", help="a folder, a hub id or a built-in model")
    parser.add_argument("--step", metavar="N|best", help="of the run's checkpoints; the last one by default")


def run(options: argparse.Namespace) -> int:
    from rlflow.tools.server import serving
    from rlflow.tools.target import find_target

    target = find_target(options.target, options.step, options.words)
    print(f"starting vLLM's server with {target.name} ...", flush=True)
    with serving(target, options.port) as server:
        print(
            f"base URL  http://127.0.0.1:{options.port}/v1\nmodel     {server.name}\nkey       {server.key}\n"
            "Ctrl-C ends it",
            flush=True,
        )
        raise RunError(f"vLLM's server has ended by itself, with exit code {server.process.wait()}")
