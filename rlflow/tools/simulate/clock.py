"""An event loop whose clock jumps: waiting takes no time, and computing takes none of the clock's."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaitSelector(selectors.SelectSelector):
    """Asks for events without waiting; the loop advances its clock by the time it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            assert timeout is not None, "deadlock: nothing is scheduled and nothing is ready"
            self.clock += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no time."""

    def __init__(self) -> None:
        self._virtual = _NoWaitSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.clock

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """At once, in this thread: the clock would not wait for another one."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, on the virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
