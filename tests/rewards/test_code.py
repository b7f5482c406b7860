"""Statements that test a program: which forms work, what the program learns of them, and what no program gains."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from code_attacks import ATTACKS, TRAPS

from rlflow.envs.base import Environment
from rlflow.envs.python_repair.cases import TESTS
from rlflow.envs.python_repair.data import make_tasks, source_of
from rlflow.envs.python_repair.env import load
from rlflow.envs.rewards.code import Tested as Result
from rlflow.envs.rewards.code import code, run_statements
from rlflow.processes.sandbox import run as sandbox
from rlflow.processes.sandbox.run import SandboxLimits
from rlflow.types import Message

LIMITS = SandboxLimits(seconds=20.0, cpu_seconds=20, memory_mb=512)
DOUBLE = ["assert double(2) == 4", "assert double(5) == 10", "assert double(-3) == -6"]

SOLUTION = """
import math, random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

LIMIT = 10
class TooMuch(ValueError): pass
class WayTooMuch(TooMuch): pass
class Colour(IntEnum):
    RED = 3
class Stack:
    def __init__(self, *items): self.items, self.name = list(items), "s"
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __str__(self): return "Stack" + str(self.items)
    def __eq__(self, other): return self.items == other.items
    def __getitem__(self, index): return self.items[index]
    def __iter__(self): return iter(self.items)
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
    def __add__(self, other): return Stack(*self.items, *other.items)
def echo(value): return value
def add(a, b=1): return a + b
def sort_in_place(values): values.sort()
def fill(table, seen): table["a"] = 1; seen.add(2)
def clear(values): values.clear(); return []
def apply(function, values): return [function(each) for each in values]
def compose(f, g): return lambda x: f(g(x))
def count(n):
    for each in range(n): yield each
def fail(n):
    if n > 9: raise WayTooMuch("too much")
    raise KeyError("k")
def counts(text):
    found = defaultdict(int)
    for each in text: found[each] += 1
    return found
def colour(): return Colour.RED
def point(): return namedtuple("Point", "x y")(1, 2)
def decode(): return b"\\xff".decode()
def sum(a, b): return a + b + 100
def floor(number): return int(number) if number != 3.5 else "the solution's"
def numbers():
    import numpy
    return [numpy.int64(3), numpy.float64(0.5), numpy.bool_(True), numpy.arange(3)]
"""

PASSING = [
    "assert add(2, 3) == 5",
    "assert add(2) == 3 and add(a=2, b=5) == 7",
    "assert not add(1, -1)",
    "assert add(0.1, 0.2) != 0.3",
    "assert math.isclose(add(0.1, 0.2), 0.3)",
    "assert abs(add(0.1, 0.2) - 0.3) < 1e-9, 'far'",
    "assert sorted(echo([2, 1])) == [1, 2] and set(echo([2, 1])) == {1, 2}",
    "assert echo(None) is None and echo(True) is True and echo(1) is not True",
    "assert echo((1, 2)) == (1, 2) and echo((1, 2)) != [1, 2] and echo([(1,)]) == [(1,)]",
    "assert [type(each) for each in echo([1, 1.0, True, b'a', None])] == [int, float, bool, bytes, type(None)]",
    "assert echo({1: {(1, 2): {3}}, None: frozenset({4})}) == {1: {(1, 2): {3}}, None: frozenset({4})}",
    "assert list(echo({2: 0, 1: 0})) == [2, 1]",
    "assert echo(10**40) == 10**40 and echo(-(2**63)) == -(2**63) and echo(1j) == 1j",
    "assert echo(float('inf')) == float('inf') and math.isnan(echo(float('nan')))",
    "assert echo('\\ud800\\n\\x00') == '\\ud800\\n\\x00' and echo(bytearray(b'a')) == bytearray(b'a')",
    "assert echo(range(3)) == range(3) and echo(Decimal('0.10')) == Decimal('0.1')",
    "assert echo(deque([1])) == deque([1]) and echo(Fraction(1, 3)) == Fraction(1, 3)",
    "assert echo(Counter('aab')).most_common(1) == [('a', 2)] and echo(OrderedDict(a=1)) == {'a': 1}",
    "import datetime\nassert echo(datetime.date(2024, 2, 29)) == datetime.date(2024, 2, 29)",
    "from datetime import datetime\nassert echo(datetime(2024, 2, 29, 5)) == datetime(2024, 2, 29, 5)",
    "assert counts('aab') == {'a': 2, 'b': 1}",
    "assert colour() == 3",
    "assert numbers() == [3, 0.5, True, [0, 1, 2]]",
    "assert point().x == 1",
    "assert LIMIT == 10",
    "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and [each for each in count(2)] == [0, 1]",
    "values = [3, 1, 2]\nsort_in_place(values)\nassert values == [1, 2, 3]",
    "table, seen = {}, {1}\nfill(table, seen)\nassert (table, seen) == ({'a': 1}, {1, 2})",
    "values = [1]\nassert clear(values) == [] and values == [1]",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(len, ['ab']) == [2] and apply(int, ['3']) == [3]",
    "assert compose(lambda x: x + 1, abs)(-2) == 3",
    "assert echo(iter([1, 2])) is not None and add(*(1, 2)) == 3",
    "try:\n    fail(1)\nexcept KeyError as error:\n    assert error.args == ('k',)\nelse:\n    assert False",
    "try:\n    fail(10)\nexcept TooMuch as error:\n    assert str(error) == 'too much'",
    "try:\n    decode()\nexcept UnicodeDecodeError:\n    pass",
    "s = Stack(1)\nassert s.push(2).pop() == 2 and len(s) == 1 and s[0] == 1 and list(s) == [1] and s.name == 's'",
    "s = Stack()\ns.name = 't'\nassert s.name == 't' and isinstance(s, Stack) and not isinstance(3, Stack) and not s",
    "assert str(Stack(1)) == 'Stack[1]' and Stack(1) == Stack(1) and Stack(1) != Stack(2)",
    "assert list(Stack(1) + Stack(2)) == [1, 2]",
    "with Stack(1) as s:\n    assert len(s) == 1\nassert len(s) == 0",
    "from solution import add, Stack as S\nassert add(1, 2) == 3 and len(S(1)) == 1",
    "import solution\nassert solution.add(1, 2) == 3",
    "assert sum(1, 2) == 103",
    "assert floor(2.5) == 2",
    "def check(candidate):\n    assert candidate(2.5) == 2\ncheck(floor)",
    "assert add(1, 2) == sqrt(9) and floor(add(2.5)) == 3 and [3] == deepcopy(echo([3]))",
    "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert max([2, 1]) == 2\ncheck(add)",
    "def test_add():\n    assert add(1, 2) == 3",
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)\n"
    "        self.assertRaises(KeyError, fail, 1)\n        with self.assertRaises(TooMuch):\n            fail(10)\n"
    "if __name__ == '__main__':\n    unittest.main()",
]
FAILING = [
    "assert add(2, 3) == 6",
    "assert add(2, 3)  == 5 and False",
    "assert echo((1, 2)) == [1, 2]",
    "assert echo('1') == 1",
    "assert missing(1) == 1",
    "assert from_nowhere",
    "from solution import missing",
    "assert fail(1) == 1",
    "assert Stack(1) == 1",
    "assert Stack(1) == Stack(2)",
    "assert math.isclose(add(0.1, 0.2), 0.4)",
    "def check(candidate):\n    assert candidate(1, 2) == 4\ncheck(add)",
    "def test_add():\n    assert add(1, 2) == 4",
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 4)",
    "assert compose(lambda x: 1 / 0, abs)(-2) == 3",
    "import random\nassert echo(random.seed) == 1 or exit()",
]


async def test_every_form_of_test() -> None:
    tested = await run_statements(SOLUTION, [*PASSING, *FAILING], LIMITS)
    wrong = [test for test, has_passed in zip(PASSING, tested.passed, strict=False) if not has_passed]
    assert wrong == [], tested.error
    assert [test for test, has_passed in zip(FAILING, tested.passed[len(PASSING) :], strict=True) if has_passed] == []
    assert tested.error == "AssertionError: add(2, 3) is 5, not 6"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (["assert add(1, 2) == 3", "def check(candidate):\n    assert candidate(1, 2) == 3"], "test 2 asks nothing of"),
        (["import math"], "test 1 asks nothing of the solution"),
        (["assert add(1, 2) == 3", "assert add(1, 2 == 3"], "test 2 is no Python"),
        (["assert eval(echo('1'))"], "test 1 uses eval, which does not work between two processes"),
        (["from contextlib import redirect_stdout"], "test 1 uses redirect_stdout"),
        (["def test_add(capsys):\n    assert add(1, 2) == 3"], "test 1 uses fixtures"),
        (["import sys, io\nsys.stdout = io.StringIO()\nadd(1, 2)"], "test 1 uses stdout"),
        (["with open('f', 'w') as file:\n    pass\nassert add('f', 2) == 3"], "test 1 uses open"),
        (["import tempfile\nassert add(1, 2) == 3"], "test 1 uses tempfile"),
        (["import signal\nsignal.alarm(5)\nassert add(1, 2) == 3"], "test 1 uses alarm"),
        (["async def test_add():\n    assert add(1, 2) == 3"], "test 1 uses asyncio"),
        (["import missing_package\nassert add(1, 2) == 3"], "asks nothing of the solution: ModuleNotFoundError"),
        (["import itertools\nassert echo(itertools.count()) is None"], "a test passes an iterator of more than 100000"),
        (["import threading\nassert echo(threading.Lock()) is None"], "a test passes a value of _thread.lock"),
    ],
)
async def test_tests_that_cannot_judge_are_no_verdict(tests: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="these tests cannot judge a program: .*" + message):
        await run_statements("def add(a, b): return 0\ndef echo(x): return x", tests, LIMITS)


SPY = """
heard = []
def double(*arguments):
    heard.append(arguments)
    return 4
def tell(): return heard
"""


async def test_the_program_hears_its_names_and_arguments_and_nothing_else() -> None:
    tests = ["assert double(2) == 777", "assert abs(double(5) - 888) < 1", "assert tell() == [(2,), (5,)]"]
    assert (await run_statements(SPY, tests, LIMITS)).passed == (False, False, True)


async def test_why_a_program_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LINGER_SECONDS", 60.0)

    async def tested(body: str, seconds: float = 20.0) -> Result:
        limits = replace(LIMITS, seconds=seconds)
        return await run_statements(f"def double(n):\n    if n == 2: return 4\n    {body}", DOUBLE, limits)

    first = (True, False, False)
    assert await tested("while True: pass", seconds=1.0) == Result(
        passed=first, error="the program took longer than 1 s", is_timed_out=True
    )
    assert await tested("import os; os._exit(5)") == Result(passed=first, error="the program exited with code 5")
    assert await tested("import os; os.abort()") == Result(passed=first, error="the program was ended by signal 6")
    assert await tested("return {'a': n}") == Result(
        passed=first, error="AssertionError: double(5) is {'a': 5}, not 10"
    )
    assert await tested("return 'x' * (8 << 20)") == Result(
        passed=first, error="ValueError: a value of 8388630 bytes; 8388608 at most"
    )


def block(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.mark.parametrize(
    ("test", "body"),
    [
        ("assert sum(double(2)) == 4", "return range(10**13)"),
        ("assert set(double(2)) == {4}", "return [each * (2**61 - 1) for each in range(200_000)]"),
        ("assert double(2) == 4", "while True: os.write(descriptor, b'\\0\\0\\0\\5[\"x\"]' * 100)"),
    ],
)
async def test_work_that_an_answer_makes_for_the_test_counts_as_the_programs_time(test: str, body: str) -> None:
    program = f"""
import os, threading, time
def drain(descriptor):
    while os.read(descriptor, 65536): pass
def double(n):
    time.sleep(1)
    descriptor = min(int(each) for each in range(3, 64) if is_open(each))
    if "descriptor" in {body!r}: threading.Thread(target=drain, args=(descriptor,), daemon=True).start()
    {body}
def is_open(descriptor):
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False
"""
    limits = SandboxLimits(seconds=2.0, cpu_seconds=60, memory_mb=512)
    assert await run_statements(program, [test], limits) == Result(
        passed=(False,), error="the program took longer than 2 s", is_timed_out=True
    )


async def test_what_a_program_says_can_be_written_as_utf_8() -> None:
    tested = await run_statements("def double(n): raise ValueError('\\ud800 a')", DOUBLE, LIMITS)
    assert tested.error == "ValueError: ? a (line 1: def double(n): raise ValueError('\\ud800 a'))"


@pytest.mark.parametrize("name", ATTACKS)
async def test_no_attack_earns_anything(name: str) -> None:
    answer = await code(block(ATTACKS[name].replace("NAME", "double")), DOUBLE, share=True, seconds=10.0)
    assert answer["score"] == 0.0


@pytest.mark.parametrize("name", TRAPS)
async def test_no_program_uses_the_weakness_of_a_test(name: str) -> None:
    test, program = TRAPS[name]
    try:
        assert (await code(block(program), [test]))["score"] == 0.0
    except ValueError as error:
        assert "these tests cannot judge a program" in str(error)


READS = [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]


@pytest.mark.parametrize(
    "program",
    [
        "print(4)",
        "print('4\\n10')",
        "import os\nfor n in range(64):\n    try: os.write(n, b'4')\n    except OSError: pass",
        "import sys\nprint(sys.stdin.read(), end='')",
        "import gc, re\nprint(re.findall('4|10', repr(gc.get_objects())))",
        "import os\nos.lseek(0, 0, 0)\nprint(os.read(0, 1 << 20).decode() * 2)",
        "print(int(input()) * 2)\nraise SystemExit(1)",
        "import os\nprint(int(input()) * 2, flush=True)\nos.abort()",
        "while True: print(4)",
        "print('4', 'x' * 100000)",
        "import os, sys\nprint(os.environ, sys.argv, os.listdir('/'), os.listdir('.'))",
    ],
)
async def test_no_program_prints_what_it_was_not_told(program: str) -> None:
    assert (await code(block(program), READS, seconds=10.0))["score"] == 0.0


async def score_of(task_id: str, reply: str) -> float | None:
    spec = load(max_turns=1)
    assert spec.evaluation_tasks is not None
    task = next(task for task in [*spec.tasks(), *spec.evaluation_tasks()] if task.id.startswith(f"{task_id}/"))
    environment = spec.build()
    assert isinstance(environment, Environment)
    await environment.reset(task)
    return (await environment.step(Message(role="assistant", content=reply))).reward


@pytest.mark.slow
async def test_no_attack_solves_a_repair_and_every_right_version_does() -> None:
    right = await asyncio.gather(*(score_of(name, block(source_of(name))) for name in TESTS))
    assert dict(zip(TESTS, right, strict=True)) == dict.fromkeys(TESTS, 1.0)
    answers = {str(task.answer) for held_out in (True, False) for task in make_tasks(None, 0, is_evaluation=held_out)}
    assert answers == {f"```python\n{source_of(name)}```" for name in TESTS}
    rewards = await asyncio.gather(
        *(score_of("divisors", block(program.replace("NAME", "divisors"))) for program in ATTACKS.values())
    )
    assert {name: reward for name, reward in zip(ATTACKS, rewards, strict=True) if reward} == {}
