"""The tool `calculator`, and a question that it can answer."""

import ast
import json
import operator
import random
from collections.abc import Callable, Sequence
from functools import partial

from rlflow.envs.arithmetic.reward import is_right
from rlflow.envs.base import EnvironmentSpec, Prompt
from rlflow.envs.seeds import seeded_tasks
from rlflow.envs.texts import prompt_of
from rlflow.envs.tools import ToolEnvironment
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

OPERATIONS = ("+", "-", "*")
EXAMPLES = ("205 * 314", "614 + 950", "853 - 271")
"""Solved in the prompt, so that a small model sees what a call looks like."""
SYSTEM_PROMPT = "You answer with a number. Use the calculator for every question."
RIGHT_CALL = 0.2
"""The reward of a wrong answer after the right call."""
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


def make_tasks(digits: int, size: int, seed: int) -> list[Task]:
    """`size` questions about two numbers of `digits` digits each."""
    chance = random.Random(f"calculator/{digits}/{seed}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    tasks = []
    for index in range(size):
        left, operation, right = chance.randint(low, high), chance.choice(OPERATIONS), chance.randint(low, high)
        answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
        expression = f"{left} {operation} {right}"
        tasks.append(
            Task(
                id=f"calculator/{digits}/{seed}/{index}",
                prompt=prompt_of(SYSTEM_PROMPT, f"What is {expression}?"),
                answer=str(answer),
                data={"expression": expression},
            )
        )
    return tasks


def right_by_tool(task: Task, completion: str, messages: list[Message]) -> float | None:
    """1.0 when the tool has said the answer and the last reply says so too, RIGHT_CALL without the latter, else 0.0.

    The last call counts, because a model could try all numbers.
    """
    said = [message["content"] for message in messages if message["role"] == "tool"]
    if said[-1:] != [task.answer]:
        return 0.0
    return 1.0 if is_right(task, completion) else RIGHT_CALL
