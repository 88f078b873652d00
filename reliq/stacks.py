"""
The stacks of a worker's handlers, which an operator asks for through Redis: where each stands, and no value.

The request is a key that the worker takes together with writing its record, every 5 s; the answer is another, which
expires.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from reliq.call import Command
from reliq.foreign import LAST_SECOND
from reliq.keys import WORKERS_KEY, stack_request_key, stacks_key
from reliq.replies import read_nothing
from reliq.rights import runs

if TYPE_CHECKING:
    from collections.abc import Callable

#: A worker that does not take a request within this many ms is asked no longer.
REQUEST_MS = 60_000
#: The stacks are kept for ten minutes.
REPORT_MS = 600_000


@dataclass(frozen=True, slots=True)
class HandlerStack:
    """
    Where one handler stands.

    Attributes:
        queue: empty for the thread of the event loop, on which coroutines run.
        id: the message, of a batch the first.
        frames: `file:line function`, the innermost last.
    """

    queue: str
    id: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackReport:
    """
    Where the handlers of a worker process stood.

    Attributes:
        at: when, in unix seconds by its clock.
        stacks: of the handlers that had run the longest first.
        left_out: how many more there were than a report has room for.
    """

    at: Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]
    stacks: tuple[HandlerStack, ...]
    left_out: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0


_decoder = msgspec.json.Decoder(StackReport)


@runs("stack_request_key:GETDEL")
def take_request(id: str, asked: Callable[[], Any]) -> Command[None]:
    """Take the request for the stacks of a worker; call `asked` when there was one."""

    def read(reply: bytes | None) -> None:
        if reply is not None:
            asked()

    return Command(("GETDEL", stack_request_key(id)), read)


@runs("stacks_key:SET")
def write_report(id: str, report: StackReport) -> Command[None]:
    """Write the stacks of a worker, which somebody asked for."""
    return Command(("SET", stacks_key(id), msgspec.json.encode(report), "PX", REPORT_MS), read_nothing)


@runs("stack_request_key:SET stacks_key:DEL")
def request(id: str) -> list[Command[Any]]:
    """Ask a worker for its stacks, and forget those that it told before."""
    return [
        Command(("DEL", stacks_key(id)), int),
        Command(("SET", stack_request_key(id), "1", "PX", REQUEST_MS), read_nothing),
    ]


@runs("stack_request_key:PTTL stacks_key:GET WORKERS_KEY:ZSCORE")
def look(id: str) -> list[Command[Any]]:
    """
    Read for how many ms a request has waited for its worker, and the stacks that it told; None where there is none.

    The third answer is whether the worker was alive within the last hour.
    """
    waited = Command(("PTTL", stack_request_key(id)), lambda left: REQUEST_MS - left if left >= 0 else None)
    known = Command(("ZSCORE", WORKERS_KEY, id), lambda seen: seen is not None)
    return [waited, Command(("GET", stacks_key(id)), _read_report), known]


def _read_report(reply: bytes | None) -> StackReport | None:
    try:
        return None if reply is None else _decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
