"""What SIGINT, SIGTERM and SIGHUP do to a run."""

import asyncio
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_passed_on: dict[int, Callable[[], object]] = {}
"""Signal -> what tells the Stopper of another thread, because Python lets the main thread alone handle signals."""


@contextmanager
def hang_ups_ignored() -> Iterator[None]:
    """Processes that are started in the block survive the loss of the terminal, because the run ends by itself then."""
    if not _is_main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """After the block, signals do what they did before it."""
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_done(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run(work)`; in a thread of its own if this thread runs a loop, as that of a notebook's cell does.

    The main thread, which alone gets signals, passes them on to the work's Stopper. Raises KeyboardInterrupt when the
    work was cancelled, which a Stopper does on a second SIGINT.
    """
    if _is_main_thread() and asyncio._get_running_loop() is None:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlflow") as thread, handlers_kept():
        if _is_main_thread():
            for number in (each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN):
                signal.signal(number, lambda number, _: _passed_on.get(number, bool)())
        try:
            return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Stopper:
    """The first SIGINT, SIGTERM or SIGHUP asks the run to stop. A second SIGINT ends the process at once, or, if that
    is more than the run (a notebook), cancels the task that made the Stopper.

    A second one of the others changes nothing, because a job often gets several at the same time. SIGHUP says that the
    terminal is gone; a process that was started to ignore it (nohup) ignores it.
    """

    def __init__(self, what_is_kept: Callable[[], str]) -> None:
        """Handle the signals of the running event loop. `what_is_kept` is told to people if no step is under way."""
        self.signal: signal.Signals | None = None
        """The first one."""
        self._what_is_kept = what_is_kept
        self._on_stop: Callable[[], None] | None = None
        self._tell: Callable[[str], None] = print
        self._stopped = asyncio.Event()
        self._task = asyncio.current_task()
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._handled = [each for each in _SIGNALS if not (is_ignored and each is signal.SIGHUP)]
        loop = asyncio.get_running_loop()
        for number in self._handled:
            if _is_main_thread():
                loop.add_signal_handler(number, self._handle, number)
            else:
                _passed_on[number] = lambda number=number: loop.call_soon_threadsafe(self._handle, number)

    def restore(self) -> None:
        """Give signals back to Python. After a first one only SIGINT counts, because the process is about to end."""
        for number in self._handled:
            if not _is_main_thread():
                _passed_on.pop(number, None)
                continue
            asyncio.get_running_loop().remove_signal_handler(number)
            if self.signal is not None and number is not signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    async def run_unless_stopped(self, starting: Coroutine[Any, Any, T], tell: Callable[[str], None]) -> T | None:
        """The result of `starting`, or None if a signal comes first. From now on, people are told through `tell`."""
        self._tell = tell
        start = asyncio.create_task(starting)
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if start.done():
            return start.result()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return None

    def hand_to(self, on_stop: Callable[[], None] | None) -> None:
        """From now on a signal calls `on_stop`, also one that came before. None takes that back."""
        self._on_stop = on_stop
        if on_stop is not None and self.signal is not None:
            on_stop()

    def _handle(self, number: signal.Signals) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                sys.stderr.write("rlflow: stopped at once; the last complete checkpoint is kept\n")
                sys.stderr.flush()
                if _is_main_thread() or self._task is None:
                    os._exit(128 + signal.SIGINT)
                self._task.cancel()
            return
        self.signal = number
        self._stopped.set()
        if self._on_stop is None:
            self._tell(f"stopping; {self._what_is_kept()}")
            return
        self._tell("stopping: finishing the step and saving; Ctrl-C once more to leave at once")
        self._on_stop()
