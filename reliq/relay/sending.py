"""The calls that a relay makes: rows of one queue on the same terms, and how what they say becomes a publish."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.errors import ConfigurationError
from reliq.hashtags import SHARDS_LIMIT
from reliq.ids import made_at
from reliq.keys import Keys
from reliq.outbox.rows import RowTerms
from reliq.relay.lanes import REMEMBERED_MS
from reliq.transitions import CallNumber, PublishAnswer
from reliq.wireformat import ENVELOPE_START, envelope_rest, open_envelope

if TYPE_CHECKING:
    from collections.abc import Collection

    from reliq.call import Call
    from reliq.client.lanes import Lane
    from reliq.message import Header
    from reliq.outbox.store import StoredRow
    from reliq.transitions import AskStatus

#: A message that is sent for a second time, and has an id of reliq's own, is published as one of a chosen id with this
#: window: not while it is alive, nor within that time of its end.
AGAIN_WINDOW_MS = 600_000
#: The fence of a call that gets its answer if it has run, and else is refused by every shard.
NEVER = "never"
#: Rows share a call when their due times are as near as a thousandth of their delay, and a second at most.
DELAY_PARTS, LONGEST_STEP_MS = 1000, 1000
#: The answer to a call of a lane that has had a later one since: it was made.
STALE = PublishAnswer(0, {})


@dataclass(slots=True)
class Sending:
    """
    Rows that one call publishes.

    Attributes:
        left_ms: until they are due, when they were taken; `taken_at`, by the monotonic clock.
        again: whether they, or a call with their number, may have been sent before.
        lane: of this relay, when the call is its own.
        fence: of the map by which `keys` are the shard of the rows; NEVER when they are not.
        old_home: the shard that may have messages of their chosen ids; None: there is none.
    """

    keys: Keys
    terms: RowTerms
    left_ms: int
    again: bool
    rows: list[StoredRow]
    number: CallNumber
    lane: Lane | None = None
    fence: str = "0"
    old_home: Keys | None = None
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def seqs(self) -> list[int]:
        """The rows."""
        return [row.seq for row in self.rows]

    @property
    def number_text(self) -> str:
        """The number of the call as it is written down, with the shard that it is for."""
        return f"{self.number.lane}.{self.number.number}.{self.keys.shard}"

    def question(self) -> Call[list[AskStatus]] | None:
        """Return the call that asks the old home of chosen ids which of them are free; None where there is none."""
        if self.old_home is None:
            return None
        replace = self.terms.replace and not self.again
        return transitions.ask(self.old_home, [row.id for row in self.rows], fence=self.fence, replace=replace)

    def call(self, taken: Collection[str] = ()) -> Call[PublishAnswer]:
        """Return the publish of all rows whose ids are not `taken`; its rows are due as long after they were written as their publisher asked."""
        terms, window_ms = self.terms, self.terms.window_ms
        if self.again and window_ms is None:
            window_ms = AGAIN_WINDOW_MS
        gone_ms = int((time.monotonic() - self.taken_at) * 1000)
        rows = [row for row in self.rows if row.id not in taken]
        made = transitions.publish(
            self.keys,
            [(row.id, self._value(row)) for row in rows],
            self.number,
            ttl_ms=terms.ttl_ms,
            retries=terms.retries,
            delay_ms=max(0, self.left_ms - gone_ms),
            at_ms=terms.at_ms,
            window_ms=window_ms,
            replace=terms.replace and not self.again,
            bare=self.keys.bare,
            fence=self.fence,
            message_keys=[_header(row)[0].line or "" for row in rows] if terms.keyed else None,
            remember_ms=REMEMBERED_MS,
        )
        parse = made.parse
        return replace(made, parse=lambda reply: STALE if reply == b"stale" else parse(reply))

    def _value(self, row: StoredRow) -> bytes:
        """Return the value of a row; one that is sent again says that its id is one to be checked."""
        value = bytes(row.value)
        if not self.again or self.keys.bare or self.terms.window_ms is not None:
            return value
        header, body = _header(row)
        enqueued = made_at(row.id) if header.enqueued is None else header.enqueued
        headers, line = header.headers, header.line or ""
        return envelope_rest(self.terms.retries, enqueued, AGAIN_WINDOW_MS, headers, header.incarnation, line) + body


def _header(row: StoredRow) -> tuple[Header, bytes]:
    """Return header and body of a row's value, which begins after the due time."""
    return open_envelope(b"%b0%b" % (ENVELOPE_START.encode(), bytes(row.value)))


def parse_number(text: str) -> tuple[CallNumber, int] | None:
    """Return the number of a call that was written down and its shard; None for what is none."""
    lane, _, rest = text.partition(".")
    number, _, shard = rest.partition(".")
    if not (lane and lane.isprintable() and number.isdecimal() and shard.isdecimal() and int(shard) < SHARDS_LIMIT):
        return None
    return CallNumber(lane, int(number)), int(shard)


def checked(row: StoredRow) -> tuple[Keys, RowTerms]:
    """Return queue and terms of a row; raise ConfigurationError when it can be published nowhere."""
    keys = Keys.registered(row.queue)
    if keys is None:
        raise ConfigurationError(f"{row.queue[:80]!r} is no queue")
    return keys, RowTerms.parse(row.terms)


def left_ms(terms: RowTerms, age_ms: int) -> int:
    """Return until when a message waits that was written so long ago; nothing is due early, and few times differ."""
    left = max(0, terms.delay_ms - max(0, age_ms))
    step = min(max(1, terms.delay_ms // DELAY_PARTS), LONGEST_STEP_MS)
    return -(-left // step) * step
