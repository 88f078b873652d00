"""What a queue asks of Redis besides publishing, checked before anything is sent."""

from __future__ import annotations

import getpass
import re
import socket
import time
from typing import TYPE_CHECKING, Literal

from reliq import commands, transitions
from reliq.errors import ConfigurationError
from reliq.ids import check_id
from reliq.message import Letter, Pause
from reliq.publish.orders import when
from reliq.settings import BATCH_LIMIT, MIB, milliseconds, seconds, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from reliq.call import Call, Command
    from reliq.keys import Keys
    from reliq.message import CancelStatus, Duration, RescheduleStatus
    from reliq.settings import QueueSettings

REASON_LIMIT = 200
#: Bodies that one redrive writes back, at most.
LETTER_BYTES = 8 * MIB

_LETTER_NAME = re.compile(r"\d{1,20}-\d{1,20}")


def cancelling(keys: Keys, id: str | UUID, tombstone: Duration | None) -> Call[list[CancelStatus]]:
    """Return the call that cancels a message; raise ConfigurationError for what is no id, or no time."""
    return transitions.cancel(keys, [check_id(id)], tombstone_ms=tombstone_ms(tombstone))


def tombstone_ms(tombstone: Duration | None) -> int | None:
    """Return for how long a cancelled id is refused; raise ConfigurationError for what is no time above 0."""
    return None if tombstone is None else milliseconds(seconds("tombstone", tombstone, least=0.001))


def rescheduling(keys: Keys, id: str | UUID, delay: Duration, at: datetime | None) -> Call[list[RescheduleStatus]]:
    """Return the call that gives a message another due time; raise ConfigurationError for one that is not allowed."""
    at_ms, delay_ms = when(delay, at)
    return transitions.reschedule(keys, [check_id(id)], at_ms=at_ms, delay_ms=delay_ms)


def pausing(keys: Keys, reason: str, for_: Duration | None) -> Command[None]:
    """Return the command that pauses a queue; raise ConfigurationError for a reason or time that is not allowed."""
    if not isinstance(reason, str) or not reason.isprintable() or len(reason) > REASON_LIMIT:
        raise ConfigurationError(f"reason must be one line of at most {REASON_LIMIT} characters")
    for_seconds = None if for_ is None else seconds("for_", for_, least=0.001)
    now = round(time.time(), 3)
    pause = Pause(_who(), now, reason, None if for_seconds is None else now + for_seconds)
    return commands.pause(keys, pause, None if for_seconds is None else milliseconds(for_seconds))


def listing(keys: Keys, limit: int, after: str) -> Command[list[Letter]]:
    """Return the command that reads dead letters; raise ConfigurationError for a limit or place not allowed."""
    if not isinstance(after, str) or (after and _LETTER_NAME.fullmatch(after) is None):
        raise ConfigurationError("after must be the `letter` of a dead letter, such as '1700000000000-0', or empty")
    return commands.letters(keys, count=whole("limit", limit, least=1, most=BATCH_LIMIT), after=after)


def redriving(
    keys: Keys, settings: QueueSettings, letters: Sequence[Letter], delay: Duration
) -> list[Call[list[Literal["redriven", "alive", "not_found"]]]]:
    """Return the calls that publish dead letters again; raise ConfigurationError for what is none, or too many."""
    if not isinstance(letters, list | tuple) or not all(isinstance(one, Letter) for one in letters):
        raise ConfigurationError(
            f"letters must be a list of dead letters, as `letters()` returns them, not {type(letters).__name__}"
        )
    whole("number of letters", len(letters), most=BATCH_LIMIT)
    ttl_ms, delay_ms = milliseconds(settings.ttl), milliseconds(seconds("delay", delay))
    calls = []
    for some in by_bytes(letters):
        retries = [settings.retries if one.header.retries is None else one.header.retries for one in some]
        rows = [(one.letter, one.id, left) for one, left in zip(some, retries, strict=True)]
        calls.append(transitions.redrive(keys, rows, ttl_ms=ttl_ms, delay_ms=delay_ms))
    return calls


def by_bytes(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Yield letters in pieces of at most `LETTER_BYTES` of bodies, or of one: a script holds all others up."""
    piece, size = list[Letter](), 0
    for letter in letters:
        size += len(letter.payload)
        if piece and size > LETTER_BYTES:
            yield piece
            piece, size = [], len(letter.payload)
        piece.append(letter)
    if piece:
        yield piece


def _who() -> str:
    """Return user@host; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
