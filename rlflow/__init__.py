"""rlflow: distributed reinforcement learning for language models.

    run = rlflow.train(model="smollm2-135m", reward=my_function, data=rows, settings={"run.steps": 20})

Importing this package loads neither torch nor vLLM nor Ray; each part imports what it needs.
"""

from typing import TYPE_CHECKING

from rlflow.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rlflow.library import Run, open, train

__all__ = ["ConfigError", "Run", "RunError", "open", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Children of a run import this package too, and need none of it.
    if name in __all__:
        from rlflow import library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
