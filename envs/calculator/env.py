"""The tool `calculator`, and a question that it can answer."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Sequence
from functools import partial

from rlflow.envs.base import EnvironmentSpec, Prompt
from rlflow.envs.calculator.data import EXAMPLES, make_tasks
from rlflow.envs.calculator.reward import right_by_tool
from rlflow.envs.seeds import seeded_tasks
from rlflow.envs.tools import ToolEnvironment
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

MAX_LENGTH = 200

_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load(digits: int = 3, size: int = 2000, seed: int = 0, evaluation_size: int = 64) -> EnvironmentSpec:
    """Sums, differences and products of two numbers of `digits` digits.

    size: number of tasks; seed: which ones; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    if not 1 <= digits <= 12:
        raise ConfigError(f"env.args.digits must be from 1 to 12; got {digits}")
    tasks, evaluation_tasks = seeded_tasks(partial(make_tasks, digits), size, seed, evaluation_size)
    return EnvironmentSpec(
        tasks=tasks, build=Calculator, reward=right_by_tool, evaluation_tasks=evaluation_tasks, expert=calculate
    )


class Calculator(ToolEnvironment):
    """Shows how some questions are answered before it asks another one."""

    def __init__(self) -> None:
        super().__init__([calculator])

    async def reset(self, task: Task) -> Prompt:
        system, question = task.prompt
        solved = []
        for expression in EXAMPLES:
            result = calculator(expression)
            solved += [
                Message(role="user", content=f"What is {expression}?"),
                Message(role="assistant", content=call_text(expression)),
                Message(role="tool", content=result, tool_call_id="example", name="calculator"),
                Message(role="assistant", content=f"{expression} = {result}"),
            ]
        return Prompt(messages=[system, *solved, question], tools=self.tool_set.schemas)


def calculator(expression: str) -> str:
    """
    Compute a number.

    Args:
        expression: Numbers with +, -, *, / and brackets, such as "12 * (3 + 4)".

    Returns:
        The result.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_LENGTH} at most")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"this is not an expression: {expression}") from error
    return str(int(value) if value == int(value) else value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType]  a number, as was just asked
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, +, -, *, / and brackets can be computed")


def call_text(expression: str) -> str:
    """A call as most models write it."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def calculate(task: Task, messages: Sequence[Message]) -> str:
    """Calls the tool, then says what it answered."""
    expression = str(task.data["expression"])
    return f"{expression} = {messages[-1]['content']}" if messages[-1]["role"] == "tool" else call_text(expression)
