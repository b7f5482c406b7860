"""Benchmarks of mathematics by name: rows of the hub, or a copy of them, an instruction, and the reward `math`."""

from dataclasses import dataclass, replace
from functools import partial

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.dataset.env import read_tasks
from rlflow.envs.dataset.sources import find_source
from rlflow.envs.rewards.math import math
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."


@dataclass(kw_only=True, slots=True, frozen=True)
class Benchmark:
    """What `env.name` means when it is a benchmark's name."""

    name: str
    evaluation: str
    """The rows to measure with, as a name of the hub; its split is also that of a folder that is given without one."""
    training: str | None = None
    """Rows to train on; None: it has none, because what is measured with is not trained on."""
    answer_mark: str = ""
    """A row's answer is a text that has the final answer behind this."""
    kind: str = ""
    """The column that says which kind of problem it is."""
    reply_tokens: int
    """What the replies of a model without long thoughts need; see `EnvironmentSpec.reply_tokens`."""

    def load(
        self,
        path: str | None = None,
        evaluation_path: str | None = None,
        system_prompt: str = "",
        instruction: str = INSTRUCTION,
    ) -> EnvironmentSpec:
        """What `env.name` means; the arguments are `env.args`.

        path, evaluation_path: rows in place of those of the hub, to train on and to measure with; as `path` of
            `envs/dataset`.
        system_prompt: put before each problem.
        instruction: put behind each problem.

        Raises ConfigError when the reward's package is missing; the tasks do when the rows cannot be had.
        """
        math("", "0")
        read = partial(self._tasks, system_prompt, instruction)
        return EnvironmentSpec(
            tasks=partial(read, "path", path or self.training),
            build=SingleTurn,
            reward=math,
            evaluation_tasks=partial(read, "evaluation_path", evaluation_path or self.evaluation),
            expert=_solution,
            reply_tokens=self.reply_tokens,
        )

    def _tasks(self, system_prompt: str, instruction: str, argument: str, path: str | None) -> list[Task]:
        if path is None:
            raise ConfigError(
                f"env.name={self.name} has no tasks to train on, because it is there to measure with; train on another "
                "env.name, or on rows of your own: env.args.path=FILE"
            )
        split = self.evaluation.rpartition(":")[2] if argument == "evaluation_path" else "train"
        tasks = read_tasks(find_source(path, f"env.args.{argument}", split), system_prompt)
        return [self._task(task, instruction) for task in tasks]

    def _task(self, task: Task, instruction: str) -> Task:
        """The row's task, asked and answered as the benchmark does."""
        if task.answer is None:
            raise ConfigError(
                f"env.name={self.name}: task {task.id} has no answer; give each row an `answer`; its columns are "
                f"{', '.join(sorted(task.data))}"
            )
        *before, problem = task.prompt
        text = f"{problem['content']}\n\n{instruction}" if instruction else problem["content"]
        answer = str(task.answer)
        return replace(
            task,
            prompt=(*before, Message(role=problem["role"], content=text)),
            answer=answer.rpartition(self.answer_mark)[2].strip() if self.answer_mark else answer,
            kind=str(task.data.get(self.kind) or task.kind),
            data={**task.data, "solution": answer} if self.answer_mark else task.data,
        )


def _solution(task: Task, messages: object) -> str:
    """The row's solution, if it has one, and the final answer as the instruction wants it."""
    return f"{task.data.get('solution', '')}\n\\boxed{{{task.answer}}}"


# Cobbe et al., arXiv:2110.14168; `question`, and `answer`: a solution that ends in "#### 72"
GSM8K = Benchmark(
    name="gsm8k",
    training="openai/gsm8k/main:train",
    evaluation="openai/gsm8k/main:test",
    answer_mark="####",
    reply_tokens=512,
)
# 500 problems of Hendrycks et al., arXiv:2103.03874, which Lightman et al., arXiv:2305.20050, held out
MATH500 = Benchmark(name="math500", evaluation="HuggingFaceH4/MATH-500:test", kind="subject", reply_tokens=2048)
# Both examinations of a year, 30 problems
AIME24 = Benchmark(name="aime24", evaluation="HuggingFaceH4/aime_2024:train", reply_tokens=8192)
AIME25 = Benchmark(name="aime25", evaluation="math-ai/aime25:test", reply_tokens=8192)

BENCHMARKS = {each.name: f"{__name__}:{each.name.upper()}.load" for each in (GSM8K, MATH500, AIME24, AIME25)}
"""Name -> the path of what loads it."""
