"""Answers Redis: every outcome, in batches, until Redis has it."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reliq import transitions
from reliq.doors.ids import chosen_window_ms
from reliq.errors import RedisUnavailableError
from reliq.events import Lost
from reliq.settings import BATCH_LIMIT
from reliq.worker.flight import Flight
from reliq.worker.loop import Troubles
from reliq.worker.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Call
    from reliq.doors.blocking import BlockingDoor
    from reliq.queue import Queue
    from reliq.transitions import Settled
    from reliq.worker.inflight import Inflight
    from reliq.worker.outcome import Kind

#: How long a step waits for the first outcome; nothing is late for it.
WAIT_SECONDS = 0.5
#: The most that is settled in one round trip.
GATHER_LIMIT = 4 * BATCH_LIMIT

Answer = tuple[Flight, Outcome]


class Settler:
    """Collects outcomes and settles all that are there in one round trip, again and again until it is made."""

    def __init__(
        self, door: BlockingDoor, inflight: Inflight, buried: Callable[[], None], settled: Callable[[], None]
    ) -> None:
        self._door, self._inflight = door, inflight
        self._buried, self._settled = buried, settled
        self._waiting: queue.SimpleQueue[list[Answer]] = queue.SimpleQueue()
        self._unsettled: list[Answer] = []
        self._refused: dict[str, list[Answer]] = defaultdict(list)
        self._troubles = Troubles("settler")
        self._tried: set[tuple[str, str]] = set()  # receipts of calls that may have run without our knowing

    def settle(self, flights: Sequence[Flight], outcome: Outcome) -> None:
        """Take over the outcome of `flights`."""
        if flights:
            self._waiting.put([(flight, outcome) for flight in flights])

    def nudge(self) -> None:
        """Let a step that waits return."""
        self._waiting.put([])

    def step(self) -> float:
        """Settle what is there, waiting a little for the first; return 0."""
        self._gather()
        self._take_up_refused()
        answers, self._unsettled = self._unsettled, []
        if answers:
            self._settle_all(answers)
        self._settled()
        return 0.0

    def _gather(self) -> None:
        """Wait for one outcome, unless some wait already, then take all there are."""
        wait = WAIT_SECONDS
        if self._refused:
            wait = min([wait, *(self._troubles.seconds_of(name) for name in self._refused)])
        try:
            if not self._unsettled:
                self._unsettled += self._waiting.get(timeout=wait)
            while len(self._unsettled) < GATHER_LIMIT:
                self._unsettled += self._waiting.get_nowait()
        except queue.Empty:
            return

    def _take_up_refused(self) -> None:
        for name in [name for name in self._refused if not self._troubles.waits(name)]:
            self._unsettled += self._refused.pop(name)

    def _settle_all(self, answers: list[Answer]) -> None:
        """Make every call in one round trip; what Redis did not take is made again, which is safe."""
        groups = _grouped(answers, self._tried)
        try:
            replies = self._door.run_all([call for call, _ in groups])
        except RedisUnavailableError as error:
            self._keep(answers, error)
            raise
        away: RedisUnavailableError | None = None
        for (_, group), reply in zip(groups, replies, strict=True):
            if isinstance(reply, RedisUnavailableError):
                self._keep(group, reply)
                away = reply
            elif isinstance(reply, Exception):
                self._put_off(group, reply)
            else:
                self._forget(group)
        if away is not None:
            raise away

    def _keep(self, answers: list[Answer], error: RedisUnavailableError) -> None:
        """Try again when Redis is back; if the call may have run, a receipt that no longer holds tells nothing."""
        self._unsettled += answers
        if error.maybe_ran:
            self._tried.update(flight.receipt for flight, _ in answers)

    def _put_off(self, answers: list[Answer], error: Exception) -> None:
        """Try again later what Redis refuses, until its lease is over and the message is delivered again."""
        name = answers[0][0].queue
        self._troubles.note(name, error)
        now = time.monotonic()
        self._forget([answer for answer in answers if answer[0].lease_until < now], refused=True)
        self._refused[name] += [answer for answer in answers if answer[0].lease_until >= now]

    def _forget(self, answers: list[Answer], *, refused: bool = False) -> None:
        flights = [flight for flight, _ in answers]
        self._inflight.settled(flights)
        if self._tried:
            self._tried.difference_update(flight.receipt for flight in flights)
        if answers and not refused:
            self._troubles.over(flights[0].queue)
            if any(_is_final(flight, outcome) for flight, outcome in answers):
                self._buried()


def _grouped(answers: list[Answer], tried: set[tuple[str, str]]) -> list[tuple[Call[Settled], list[Answer]]]:
    """Return the calls for `answers`, each with its own, at most BATCH_LIMIT messages in one."""
    grouped: dict[tuple[str, Kind, bool], list[Answer]] = defaultdict(list)
    for answer in answers:
        flight, outcome = answer
        kind: Kind = "nack" if outcome.kind == "reject" else outcome.kind
        grouped[flight.queue, kind, flight.lost or flight.receipt in tried].append(answer)
    calls = []
    for (_, kind, is_known_lost), group in grouped.items():
        pieces = [group[at : at + BATCH_LIMIT] for at in range(0, len(group), BATCH_LIMIT)]
        if kind == "release":
            pieces.reverse()  # each goes before what is in ready: the first at last
        for piece in pieces:
            call = _call(piece[0][0].handler.queue, kind, piece)
            calls.append((_silent(call) if is_known_lost else call, piece))
    return calls


def _silent(call: Call[Settled]) -> Call[Settled]:
    """Return `call` without news of loss: it is known, or may be our own first try's doing."""
    return replace(call, events=lambda answer: [e for e in call.events(answer) if not isinstance(e, Lost)])


def _call(queue: Queue[Any], kind: Kind, group: list[Answer]) -> Call[Settled]:
    keys = queue.keys
    if kind in ("ack", "expired"):
        rows = [(flight.delivery.claimed, _window_ms(flight, kind)) for flight, _ in group]
        history = queue.settings.history
        took_ms = [flight.took_ms for flight, _ in group] if history else ()
        return transitions.ack(
            keys, rows, kind="acked" if kind == "ack" else "expired", history=history, took_ms=took_ms
        )
    if kind == "snooze":
        return transitions.snooze(keys, [(flight.delivery.claimed, outcome.delay_ms) for flight, outcome in group])
    if kind == "release":
        return transitions.release(keys, [flight.delivery.claimed for flight, _ in group])
    failures = [
        transitions.failure(flight.delivery, out.reason, out.error, out.delay_ms, final=out.kind == "reject")
        for flight, out in group
    ]
    return transitions.nack(keys, failures)


def _window_ms(flight: Flight, kind: Kind) -> int | None:
    """Return for how long its chosen id stays taken; of a message that expired the header is gone with the body."""
    claimed = flight.delivery.claimed
    if kind == "expired":
        return chosen_window_ms(claimed.id, flight.handler.queue.settings.dedup)
    return flight.delivery.header.window_ms


def _is_final(flight: Flight, outcome: Outcome) -> bool:
    return outcome.kind == "reject" or (outcome.kind == "nack" and flight.delivery.claimed.left <= 0)
