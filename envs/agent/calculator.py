"""An agent as anybody writes one, with the `openai` package, a tool and a loop. It knows nothing of rlflow.

The task comes as JSON on standard input, the endpoint from OPENAI_BASE_URL; the last line printed is the result.
"""

import json
import re
import sys
from typing import Any

from openai import OpenAI

TURNS = 3
SYSTEM = "You call the calculator with the sum, and then you reply with the number that it gives you."
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 2 + 3."}},
            "required": ["expression"],
        },
    },
}


def example(sum_: str, result: str, call_id: str) -> list[Any]:
    """A conversation that shows the model what to do."""
    function = {"name": "calculator", "arguments": json.dumps({"expression": sum_})}
    return [
        {"role": "user", "content": f"What is {sum_}?"},
        {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
        {"role": "assistant", "content": result},
    ]


EXAMPLES = [*example("31 + 45", "76", "first"), *example("68 + 57", "125", "second")]


def calculate(arguments: str) -> str:
    """The tool's answer. If the call is wrong, the answer says why, for the model to read."""
    try:
        expression = json.loads(arguments)["expression"]
        terms = re.fullmatch(r"\s*(\d{1,9})\s*\+\s*(\d{1,9})\s*", expression)
    except (ValueError, TypeError, KeyError) as error:
        return f"error: expected an object with the text `expression` ({error})"
    return str(int(terms[1]) + int(terms[2])) if terms else f"error: not a sum: {expression!r}"


def is_right(text: str, answer: str) -> bool:
    """Whether the last number of the text is the answer; a list of numbers is one guess."""
    numbers = [word.strip(".,") for word in re.findall(r"[-\w.,]+", text) if re.search(r"[0-9]", word)]
    return numbers[-1:] == [answer]


def main() -> None:
    task = json.load(sys.stdin)
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *EXAMPLES, *task["prompt"]]
    results: list[str] = []
    text = ""
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR]).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            text = reply.content or ""
            break
        for call in reply.tool_calls:
            assert call.type == "function"
            results.append(calculate(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
    right = is_right(text, task["answer"])
    reward = 0.2 * bool(results) + 0.3 * (results[-1:] == [task["answer"]]) + 0.5 * right
    print(json.dumps({"reward": reward, "metrics": {"right": float(right), "tools/calls": len(results)}}))


if __name__ == "__main__":
    main()
