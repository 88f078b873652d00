"""Where the handlers of this process stand: files, lines and functions, and neither values nor lines of code."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from reliq.foreign import printable
from reliq.roster import SLOTS_LIMIT
from reliq.stacks import HandlerStack, StackReport
from reliq.text import clean_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from reliq.worker.delivery import HandlerCall

#: A stack tells its innermost frames.
STACK_FRAMES = 40
#: Characters of one frame, and of all stacks of a report: a page must be able to show it, and Redis to hold it.
FRAME_CHARACTERS, REPORT_CHARACTERS = 300, 60_000


def stack_report(runs: Sequence[HandlerCall], loop_thread: int) -> StackReport:
    """Return where each of `runs` stands, and the thread of the event loop where a coroutine is among them."""
    of_thread = sys._current_frames()  # noqa: SLF001  the documented way to see other threads
    found = [_stack_of(run, of_thread.get(run.thread)) for run in sorted(runs, key=lambda run: run.started_at)]
    if any(run.task is not None for run in runs):
        found.insert(0, HandlerStack("", "", _told(list(_outwards(of_thread.get(loop_thread))))))
    told: list[HandlerStack] = []
    room = REPORT_CHARACTERS
    for stack in found[: SLOTS_LIMIT + 1]:
        room -= sum(map(len, stack.frames)) + len(stack.id)
        if room < 0:
            break
        told.append(stack)
    return StackReport(round(time.time(), 3), tuple(told), len(found) - len(told))


def _stack_of(run: HandlerCall, frame: FrameType | None) -> HandlerStack:
    first = run.deliveries[0]
    frames = list(_outwards(frame)) if run.task is None else list(awaiting(run.task))[::-1]
    return HandlerStack(first.queue, first.delivery.id.encode("utf-8", "replace").decode(), _told(frames))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first, up to the handler: what called that is ours."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    while found and _is_ours(found[-1]):
        found.pop()
    yield from found


def awaiting(task: Any) -> Iterator[FrameType]:
    """Yield the frames of a task, from the handler to what it awaits; a foreign awaitable may have none."""
    one = task.get_coro()
    while one is not None:
        frame = getattr(one, "cr_frame", None) or getattr(one, "gi_frame", None) or getattr(one, "ag_frame", None)
        if frame is not None and not _is_ours(frame):
            yield frame
        one = getattr(one, "cr_await", None) or getattr(one, "gi_yieldfrom", None) or getattr(one, "ag_await", None)


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == "threading" or name.startswith("reliq.")


def _told(innermost_first: Sequence[FrameType]) -> tuple[str, ...]:
    return tuple(
        printable(clean_text(f"{one.f_code.co_filename}:{one.f_lineno} {one.f_code.co_qualname}", FRAME_CHARACTERS))
        for one in innermost_first[:STACK_FRAMES]
    )[::-1]
