"""The event loop on which coroutine handlers run, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq.error_text import placed
from reliq.worker.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from reliq.worker.delivery import HandlerCall
    from reliq.worker.inflight import Inflight
    from reliq.worker.runner import Runner


logger = logging.getLogger(__name__)

#: The event loop wakes at least this often.
TICK_SECONDS = 1.0

#: Notes which call takes a step in the event loop, None after the step; returns the call noted before.
NoteStep = Callable[["HandlerCall | None"], "HandlerCall | None"]
#: The call of the handler that runs, also in tasks that the handler makes.
_current: contextvars.ContextVar[HandlerCall | None] = contextvars.ContextVar("reliq_handler_call", default=None)


class Steps(Coroutine[Any, Any, Any]):
    """
    A coroutine of a handler call, which notes each step before it runs.

    A step that holds the interpreter lets no other thread run, so the note must come first. Code that inspects the
    task finds the attributes of the coroutine itself.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], run: HandlerCall, note: NoteStep) -> None:
        self._coroutine, self._run, self._note = coroutine, run, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Run the next step."""
        # A task that outlives its handler call is no longer the call's.
        is_over = self._run.task is not None and self._run.task.done()
        before = self._note(None if is_over else self._run)
        try:
            return self._coroutine.send(value)
        finally:
            self._note(before)

    def throw(self, *error: Any) -> Any:
        """Run the next step, in which an error is raised first."""
        is_over = self._run.task is not None and self._run.task.done()
        before = self._note(None if is_over else self._run)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._note(before)

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()


class AsyncExecutor:
    """
    Coroutine handlers, each a task of its own on one event loop.

    Attributes:
        note_step: notes the call whose coroutine, or task, takes a step; None when nothing reads the notes.
    """

    note_step: NoteStep | None = None

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
        loop.set_task_factory(self._make_task)
        self._tick(loop)
        self._started.set_result(loop)
        try:
            if self._run_until_stopped(loop):
                loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the loop each second: after a handler has closed its selector, only the next wait fails."""
        loop.call_later(TICK_SECONDS, self._tick, loop)

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
            except BaseException as error:
                logger.error("a task tried to end the event loop of the handlers: %s", placed(error))  # noqa: TRY400  no text
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
        coroutine: Coroutine[Any, Any, None] = self._run(run)
        if self.note_step is not None:
            coroutine = Steps(coroutine, run, self.note_step)
        context = self._context.copy()
        context.run(_current.set, run)
        try:
            # Not by the argument `context`, which older task factories do not take.
            run.task = context.run(self._loop.create_task, coroutine)
        except BaseException as error:
            coroutine.close()
            self._runner.end(run, None, error)
        return run.task is not None

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task; the steps of a task that a handler makes are noted as steps of the handler's call."""
        run = _current.get()
        if run is not None and self.note_step is not None and inspect.iscoroutine(coroutine):
            coroutine = Steps(coroutine, run, self.note_step)
        return asyncio.Task(coroutine, loop=loop, **options)

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
