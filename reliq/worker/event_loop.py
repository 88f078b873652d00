"""The event loop on which coroutine handlers run, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq.worker.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from reliq.worker.delivery import HandlerCall
    from reliq.worker.inflight import Inflight
    from reliq.worker.runner import Runner


logger = logging.getLogger(__name__)


class AsyncExecutor:
    """Coroutine handlers, each a task of its own on one event loop."""

    def __init__(self, runner: Runner, inflight: Inflight) -> None:
        self._runner, self._inflight = runner, inflight
        self._done: list[HandlerCall] = []  # calls whose slots are to be freed
        self._filling = False  # whether the loop will call `_fill`
        self._timer: asyncio.TimerHandle | None = None  # for a batch that lingers
        self._thread = threading.Thread(target=self._serve, name="reliq-asyncio", daemon=True)
        self._context = contextvars.copy_context()  # of the consumer's start; each handler gets a copy
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = False

    def start(self) -> None:
        """Start the event loop's thread."""
        self._thread.start()
        self._loop = self._started.result()

    @property
    def is_running(self) -> bool:
        """Whether the event loop's thread has not ended."""
        return self._thread.is_alive()

    def more(self) -> None:
        """Start what may start; called by other threads."""
        with suppress(RuntimeError):  # the loop is closed: nothing starts any more
            self._loop.call_soon_threadsafe(self._fill)

    def ping(self, answer: Callable[[], None]) -> None:
        """Schedule `answer` on the loop; other threads call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(answer)

    @property
    def thread_id(self) -> int:
        """The loop's thread."""
        return self._thread.ident or 0

    def cancel(self, run: HandlerCall) -> None:
        """Cancel the task of `run`, if it still goes on."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(run.task.cancel)

    def see_to(self, run: HandlerCall) -> None:
        """Answer for `run` if its task was cancelled before its first step: then nobody else does."""
        if run.task is not None and run.task.done() and run.unanswered:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end_unbegun, run)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on this loop, and return its future."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()  # the loop is closed
            raise

    def cancel_all(self, timeout_seconds: float = 5.0) -> None:
        """Cancel what still runs and wait a while for it to end."""
        ended = self.run(self._cancel_all())
        with suppress(TimeoutError):
            ended.result(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End the thread."""
        self._closing = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds)

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.set_default_executor(DaemonThreads())
        self._started.set_result(loop)
        try:
            if self._run_until_stopped(loop):
                loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _run_until_stopped(self, loop: asyncio.AbstractEventLoop) -> bool:
        """
        Run the loop, also on when SystemExit comes out of a task that a handler has made; say whether it still can.

        What any callback raises besides stays in the loop: another exception is the loop's own, such as that its
        selector is closed. It would come again at once; the thread ends, and the process is replaced.
        """
        while not self._closing:
            try:
                loop.run_forever()
            except Exception:
                logger.exception("the event loop of the handlers is broken")
                return False
            except BaseException:
                logger.exception("a task tried to end the event loop of the handlers")
        return True

    async def _cancel_all(self) -> None:
        tasks = [run.task for run in self._inflight.runs() if run.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for run in self._inflight.runs():
            self.see_to(run)

    def _fill(self) -> None:
        """Free the slots of what has ended, and start what may start, until nothing more may."""
        self._filling = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while True:
            done, self._done = self._done, []
            runs, linger = self._inflight.next_async(done)
            for run in runs:
                if not (self._runner.begin(run) and self._start(run)):
                    self._done.append(run)
            if not self._done:
                break
        if linger is not None:
            self._timer = self._loop.call_later(linger, self._fill)

    def _start(self, run: HandlerCall) -> bool:
        """Make a task of `run`; say whether there is one: a task factory is the application's."""
        coroutine = self._run(run)
        try:
            # Not by the argument `context`, which older task factories do not take.
            run.task = self._context.copy().run(self._loop.create_task, coroutine)
        except BaseException as error:
            coroutine.close()
            self._runner.end(run, None, error)
        return run.task is not None

    async def _run(self, run: HandlerCall) -> None:
        try:
            await self._runner.arun(run)
        finally:
            self._free(run)

    def _free(self, run: HandlerCall) -> None:
        """Have the slot of `run` freed."""
        self._done.append(run)
        if not self._filling:
            self._filling = True
            self._loop.call_soon(self._fill)

    def _end_unbegun(self, run: HandlerCall) -> None:
        if run.unanswered:  # not seen to before
            try:
                self._runner.end(run, None, asyncio.CancelledError())
            finally:
                self._free(run)
