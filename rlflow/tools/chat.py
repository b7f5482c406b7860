"""`rlflow chat RUN|CHECKPOINT|MODEL [key=value ...]`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rlflow.tools.serve import add_target

if TYPE_CHECKING:
    from rlflow.tools.server import Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="what stands before the conversation")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0: greedy; 1 by default, as in training"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of a reply; by default what the context has room for"
    )
    parser.epilog = "Ctrl-C ends a reply, Ctrl-D the chat."


def run(options: argparse.Namespace) -> int:
    from rlflow.tools.server import serving
    from rlflow.tools.target import find_target

    target = find_target(options.target, options.step, options.words)
    print(f"loading {target.name} ...", flush=True)
    with serving(target, port=None) as server:
        print("Ctrl-C ends a reply, Ctrl-D the chat", flush=True)
        messages = [] if options.system is None else [{"role": "system", "content": options.system}]
        wanted = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        while (question := _ask()) is not None:
            if question.strip():
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": _reply(server, messages, wanted)})
    return 0


def _ask() -> str | None:
    """What the person types; None at its end."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


def _reply(server: Server, messages: list[dict[str, str]], wanted: dict[str, Any]) -> str:
    """Print a reply as it comes; what came of it when Ctrl-C ends it. Raises RunError when the model cannot answer."""
    import httpx

    from rlflow.errors import RunError
    from rlflow.telemetry.text import printable

    said: list[str] = []
    body = {"model": server.name, "messages": messages, "stream": True, **wanted}
    headers = {"Authorization": f"Bearer {server.key}"}
    try:
        with server.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.is_error:
                raise RunError(f"the model cannot answer: {answer.read().decode(errors='replace')}")
            for line in answer.iter_lines():
                event = line.removeprefix("data: ")
                if event and event != "[DONE]":
                    choices = json.loads(event).get("choices") or [{"delta": {}}]
                    said.append(choices[0]["delta"].get("content") or "")
                    print(printable(said[-1]), end="", flush=True)
    except httpx.TransportError as error:
        raise RunError(f"the model's process has ended ({error}); begin again") from error
    except KeyboardInterrupt:
        print(" [ended]", end="")
    print()
    return "".join(said)
