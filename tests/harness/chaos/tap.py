"""A wire that writes down every claim and every settling call, when it was made and what Redis answered."""

import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, ClassVar

from redis.exceptions import NoScriptError, ResponseError

from reliq import Consumer
from reliq.call import id_text
from reliq.lua import script
from reliq.message import Claimed
from reliq.transport.failures import NotSentError
from tests.harness.chaos.history import Journal

SETTLING = ("ack", "nack", "extend", "release", "snooze")
LETTING_GO = ("ack", "nack", "release", "snooze")
#: What a claim answers before its messages.
HEAD_OF_CLAIM = 4
_TAPPED = [script(name, keyed=keyed) for name in ("claim", *SETTLING) for keyed in (False, True)]
_BY_CODE = {code: one for one in _TAPPED for code in (one.sha, one.text)}


class Tap:
    """
    What `wire` does, written down.

    Attributes:
        spent: the last receipts that were used in this process, by queue: what a late worker would still hold.
    """

    spent: ClassVar[deque[tuple[str, Claimed]]] = deque(maxlen=40)

    def __init__(self, wire: Any, journal: Journal, *, late: bool = False) -> None:
        self._wire, self._journal, self._late = wire, journal, late
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send `commands`, and note what of them is to be noted before and after."""
        spied = [_spied(command) for command in commands]
        numbers = [self._ask(one) for one in spied]
        asked_at = time.monotonic()
        try:
            replies = self._wire.exchange(commands)
        except BaseException as error:
            for number in filter(None, numbers):
                self._journal.write("failed", call=number, result=_failure(error))
            raise
        for number, one, reply in zip(numbers, spied, replies, strict=True):
            if one is not None:
                self._answered(number, one, asked_at, reply)
        return replies

    def _ask(self, one: "Spied | None") -> str:
        if one is None or one.name == "claim":
            return ""
        number = f"{id(self)}.{next(self._numbers)}"
        items = [[row["id"], row["nonce"]] for row in one.rows]
        self._journal.write("asked", call=number, verb=one.verb, queue=one.queue, items=items, late=self._late)
        return number

    def _answered(self, number: str, one: "Spied", asked_at: float, reply: Any) -> None:
        if isinstance(reply, Exception):
            if number:
                self._journal.write("failed", call=number, result=_failure(reply))
        elif one.name == "claim":
            ids_by_nonce = defaultdict(list)
            size = 4 if one.is_keyed else 3
            for id, left, deaths in zip(*(reply[HEAD_OF_CLAIM + at :: size] for at in range(3)), strict=True):
                nonce = f"{deaths}~{one.head['nonce']}" if deaths else one.head["nonce"]
                ids_by_nonce[nonce].append([id.decode(), int(left)])
            lease = int(one.head["lease_ms"]) / 1000
            for nonce, ids in ids_by_nonce.items():
                self._journal.write("claimed", asked=asked_at, queue=one.queue, nonce=nonce, lease=lease, ids=ids)
        else:
            lost = one.lost(reply if one.name in ("ack", "release") else reply[0])
            self._journal.write("answered", call=number, lost=lost)
            self._keep(one, lost)

    def _keep(self, one: "Spied", lost: Sequence[int]) -> None:
        if one.name in LETTING_GO and not self._late:
            for index, row in enumerate(one.rows):
                if index not in lost:
                    self.spent.append(
                        (one.queue, Claimed(row["id"], row["nonce"], 1, key="" if one.is_keyed else None))
                    )


def _failure(error: BaseException) -> str:
    """Return what is known of a call that failed: it was refused and is made again, it cannot have run, or it may."""
    if isinstance(error, NoScriptError):
        return "again"
    return "no" if isinstance(error, NotSentError | ResponseError) else "unknown"


class Spied:
    """A command that runs one of the scripts of interest, taken apart by the script's header."""

    def __init__(self, command: Sequence[Any]) -> None:
        one = _BY_CODE[command[1]]
        keys, args = command[3 : 3 + command[2]], command[3 + command[2] :]
        self.name, self.is_keyed = one.name, "held" in one.keys
        # A shard's tag ends in a number that spreads them over the slots: {reliq:spread#3.52}.
        self.queue = keys[one.keys.index("unack")].partition(":")[2].partition("}")[0].partition(".")[0]
        self.head = dict(zip(one.args, args, strict=False))
        self.verb = self.head.get("kind") or self.name  # acked or expired
        tail, size = args[len(one.args) :], max(1, len(one.tail_args))
        self.rows = [dict(zip(one.tail_args, tail[at : at + size], strict=True)) for at in range(0, len(tail), size)]

    def lost(self, ids: Sequence[bytes]) -> list[int]:
        """Return the places of the receipts that no longer hold; of two of one message that of the earlier claim."""
        left = Counter(id_text(id) for id in ids)
        found = []
        for at, row in sorted(enumerate(self.rows), key=lambda one: _claim_number(one[1]["nonce"])):
            if left[row["id"]] > 0:
                left[row["id"]] -= 1
                found.append(at)
        return sorted(found)


def _claim_number(nonce: str) -> int:
    """Return the number of a claim in its lane; an outcome that could not be sent stands behind those that came later."""
    return int(nonce.rpartition(":")[0].rpartition(".")[2] or 0)


def _spied(command: Sequence[Any]) -> Spied | None:
    return Spied(command) if command[0] in ("EVALSHA", "EVAL") and command[1] in _BY_CODE else None


class TappedConsumer(Consumer):
    """A consumer whose worker's calls are written down."""

    journal: Journal

    def connection(self, handlers: Any) -> Any:
        return TappedConnection(super().connection(handlers), self.journal)


class TappedConnection:
    """A connection whose wires are tapped."""

    def __init__(self, connection: Any, journal: Journal) -> None:
        self._connection, self._journal = connection, journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def wire(self, timeout_seconds: float) -> Tap:
        return Tap(self._connection.wire(timeout_seconds), self._journal)
