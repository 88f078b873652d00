"""A connection that records every claim and every settling call, with its time and Redis' reply."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, ClassVar

from redis.exceptions import NoScriptError, ResponseError

from reliq import Consumer
from reliq.lua import script
from reliq.message import Claimed
from reliq.redis.commands import id_text
from reliq.redis.connection import NotSentError
from tests.harness.chaos.history import Journal

SETTLING = ("ack", "nack", "extend", "release", "snooze")
#: Number of fields before the messages in the reply of a claim.
HEAD_OF_CLAIM = 5
_TAPPED = [script(name) for name in ("claim", *SETTLING)]
_BY_CODE = {code: one for one in _TAPPED for code in (one.sha, one.text)}


class Tap:
    """
    Record the calls of `wire`.

    Attributes:
        spent: queue -> the last receipts that this process used; the process settles them again on purpose.
    """

    spent: ClassVar[deque[tuple[str, Claimed]]] = deque(maxlen=40)
    #: Nonce of a claim without a reply -> the time of its first call.
    _unanswered: ClassVar[dict[str, float]] = {}

    def __init__(self, wire: Any, journal: Journal, *, late: bool = False) -> None:
        self._wire, self._journal, self._late = wire, journal, late
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send `commands`; record claims and settling calls before they are sent, and their replies."""
        spied = [_spied(command) for command in commands]
        for one in filter(None, spied):
            self._ask(one)
        asked_at = time.monotonic()
        try:
            replies = await self._wire.exchange(commands)
        except BaseException as error:
            for one in filter(None, spied):
                self._failed(one, error)
                if one.name == "claim":
                    self._unanswered.setdefault(one.head["nonce"], asked_at)
            raise
        for one, reply in zip(spied, replies, strict=True):
            if one is not None:
                self._answered(one, asked_at, reply)
        return replies

    def _ask(self, one: "Spied") -> None:
        if one.name != "claim":
            one.number = f"{id(self)}.{next(self._numbers)}"
            items = [[row["id"], row["nonce"]] for row in one.rows]
            self._journal.write("asked", call=one.number, verb=one.verb, items=items, late=self._late)

    def _failed(self, one: "Spied", error: BaseException) -> None:
        if one.name != "claim":
            self._journal.write("failed", call=one.number, result=_failure(error))

    def _answered(self, one: "Spied", asked_at: float, reply: Any) -> None:
        if isinstance(reply, Exception):
            self._failed(one, reply)
        elif one.name == "claim":
            lease, nonce = int(one.head["lease_ms"]) / 1000, one.head["nonce"]
            ids, deaths = (reply[HEAD_OF_CLAIM + at :: 3] for at in (0, 2))
            nonces = [f"{number}~{nonce}" if number else nonce for number in deaths]
            items = [[id.decode(), own] for id, own in zip(ids, nonces, strict=True)]
            since = self._unanswered.pop(nonce, asked_at)
            self._journal.write("claimed", asked=asked_at, since=since, lease=lease, items=items)
        else:
            lost = one.lost(reply if one.name in ("ack", "release") else reply[0])
            self._journal.write("answered", call=one.number, lost=lost)
            for index, row in enumerate(one.rows):
                if one.name != "extend" and not self._late and index not in lost:
                    self.spent.append((one.queue, Claimed(row["id"], row["nonce"], 1, key=row.get("key"))))


def _failure(error: BaseException) -> str:
    """Classify a failed call: `again`, it will be repeated; `no`, it cannot have run; `unknown`, it may have run."""
    if isinstance(error, NoScriptError):
        return "again"
    return "no" if isinstance(error, NotSentError | ResponseError) else "unknown"


class Spied:
    """A command that runs a recorded script, parsed with the script's header."""

    def __init__(self, command: Sequence[Any]) -> None:
        one = _BY_CODE[command[1]]
        keys, args = command[3 : 3 + command[2]], command[3 + command[2] :]
        self.name = one.name
        # The hash tag of a shard ends in a number that spreads the shards over the slots: {reliq:spread#3.52}.
        self.queue = keys[one.keys.index("unack")].partition(":")[2].partition("}")[0].partition(".")[0]
        self.head = dict(zip(one.args, args, strict=False))
        self.verb = self.head.get("kind") or self.name  # acked or expired
        brings_no_keys = "keyed" in self.head and self.head["keyed"] != "1"
        tail, size = args[len(one.args) :], max(1, len(one.tail_args) - brings_no_keys)
        self.rows = [dict(zip(one.tail_args, tail[at : at + size], strict=False)) for at in range(0, len(tail), size)]

    def lost(self, ids: Sequence[bytes]) -> list[int]:
        """Return the positions of lost receipts. If a message has two receipts, its earlier claim is lost."""
        left = Counter(id_text(id) for id in ids)
        found = []
        for at, row in sorted(enumerate(self.rows), key=lambda one: _claim_number(one[1]["nonce"])):
            if left[row["id"]] > 0:
                left[row["id"]] -= 1
                found.append(at)
        return sorted(found)


def _claim_number(nonce: str) -> int:
    """Return the call number of a claim; later claims of a process have higher numbers."""
    return int(nonce.rpartition(":")[0].rpartition(".")[2] or 0)


def _spied(command: Sequence[Any]) -> Spied | None:
    return Spied(command) if command[0] in ("EVALSHA", "EVAL") and command[1] in _BY_CODE else None


class TappedConsumer(Consumer):
    """A consumer whose worker's calls are recorded."""

    journal: Journal

    def connection(self, handlers: Any) -> Any:
        return TappedConnection(super().connection(handlers), self.journal)


class TappedConnection:
    """A connection whose calls are recorded."""

    def __init__(self, connection: Any, journal: Journal) -> None:
        self._connection, self._journal = connection, journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def wire(self, timeout_seconds: float) -> Tap:
        return Tap(self._connection.wire(timeout_seconds), self._journal)
