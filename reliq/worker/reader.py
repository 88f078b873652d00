"""Reads the bodies of what was claimed, and lets it start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reliq import reads
from reliq.codec import open_envelope
from reliq.errors import RedisRefusedError
from reliq.message import Delivery
from reliq.settings import BATCH_LIMIT, MIB
from reliq.worker.outcome import EXPIRED, RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.doors.blocking import BlockingDoor
    from reliq.handler import Handler
    from reliq.worker.flight import Flight
    from reliq.worker.inflight import Inflight
    from reliq.worker.loop import Troubles
    from reliq.worker.outcome import Outcome

#: One round trip brings no more bytes of bodies than about this, so that neither Redis nor this process is held up.
READ_BYTES = 8 * MIB

Piece = tuple[str, list["Flight"]]


class Reader:
    """
    Reads bodies, a bounded number of bytes in one round trip, and starts what it has before it reads on.

    How large a queue's bodies are is told by the largest so far, and before the first by the queue's `max_body`.
    """

    def __init__(
        self,
        door: BlockingDoor,
        handlers: Sequence[Handler],
        inflight: Inflight,
        troubles: Troubles,
        submit: Callable[[list[Flight]], None],
        settle: Callable[[list[Flight], Outcome], None],
    ) -> None:
        self._door, self._inflight, self._troubles = door, inflight, troubles
        self._submit, self._settle = submit, settle
        self._keys = {handler.queue.name: handler.queue.keys for handler in handlers}
        self._expected = {handler.queue.name: handler.queue.settings.max_body for handler in handlers}
        self._largest: dict[str, int] = {}
        self._unread: dict[str, list[Flight]] = {}

    def add(self, flights: list[Flight]) -> None:
        """Know of claimed `flights` of one queue until they can be read."""
        if flights:
            self._inflight.add(flights)
            self._unread.setdefault(flights[0].queue, []).extend(flights)

    def read(self) -> None:
        """Read everything; what fails is given back when Redis refuses it, and else left for the next time."""
        failures: dict[str, Exception] = {}
        while pieces := self._pieces(failures):
            answers = self._door.run_all([_request(self._keys[name], piece) for name, piece in pieces])
            ready: list[Flight] = []
            for (name, piece), answer in zip(pieces, answers, strict=True):
                if isinstance(answer, RedisRefusedError):
                    self._give_back(piece)
                if isinstance(answer, Exception):
                    failures[name] = answer
                else:
                    del self._unread[name][: len(piece)]
                    ready += self._filled(name, piece, answer)
            if ready:
                self._start(ready)
        for name, failure in failures.items():
            self._troubles.note(name, failure)

    def _pieces(self, failed: dict[str, Exception]) -> list[Piece]:
        """Return what is read next: the first of each queue, as many as are expected to fit."""
        rest, pieces = READ_BYTES, []
        for name, waiting in list(self._unread.items()):
            group = self._unread[name] = [flight for flight in waiting if not flight.settling]
            if not group:
                del self._unread[name]
            elif name not in failed and rest > 0:
                size = self._largest.get(name, self._expected[name])
                piece = group[: max(1, min(BATCH_LIMIT, rest // size))]
                rest -= size * len(piece)
                pieces.append((name, piece))
        return pieces

    def _filled(self, name: str, piece: list[Flight], values: list[bytes | None]) -> list[Flight]:
        """Give flights their bodies; return those that have one, end the others."""
        bare, now = self._keys[name].bare, time.monotonic()
        filled, gone, largest = [], [], self._largest.get(name, 1)
        for flight, value in zip(piece, values, strict=True):
            if value is None:
                gone.append(flight)
                continue
            header, payload = open_envelope(value, bare=bare)
            flight.delivery = Delivery(flight.delivery.claimed, value, header, payload)
            flight.held_since = now
            largest = max(largest, len(value))
            filled.append(flight)
        self._largest[name] = largest
        if gone:
            self._settle(self._inflight.withdraw(gone), EXPIRED)
        return filled

    def _start(self, flights: list[Flight]) -> None:
        """Let `flights` run: what must not wait first, and of suspects only one."""
        urgent = [flight for flight in flights if flight.must_start]
        if urgent:
            spare = self._inflight.suspects - 1
            suspects = [flight for flight in urgent if flight.delivery.claimed.suspect]
            if spare > 0:
                self._give_back(suspects[-spare:])
            flights = urgent + [flight for flight in flights if not flight.must_start]
        self._submit(flights)

    def _give_back(self, flights: list[Flight]) -> None:
        self._settle(self._inflight.withdraw(flights), RELEASED)


def _request(keys: Any, piece: list[Flight]) -> Any:
    return reads.bodies(keys, [flight.delivery.claimed.id for flight in piece])
