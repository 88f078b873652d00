"""What one `receive` holds, and the calls for it; the clients make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reliq import commands, transitions
from reliq.errors import UndecodableError
from reliq.events import Handled
from reliq.ids import chosen_window_ms
from reliq.message import Ack, Claimed, Delivery, Duration, Nack, Reject, Snooze
from reliq.retry import DEFAULT_BACKOFF, seconds_after
from reliq.settings import MIB, lease_seconds, milliseconds, seconds, whole
from reliq.wireformat import open_envelope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.call import Call, Command
    from reliq.client.lanes import Lanes
    from reliq.codec.codec import Codec
    from reliq.keys import Keys
    from reliq.settings import QueueSettings
    from reliq.transitions import ClaimAnswer, Settled

B = TypeVar("B")

#: How long one look may block in Redis; shorter than a publisher's time-out for a reply.
LOOK_SECONDS = 0.6
#: One reply carries no more bytes of bodies than this.
READ_BYTES = 8 * MIB


@dataclass(slots=True)
class Received(Generic[B]):
    """
    One message taken with `receive`. Unless it is answered otherwise, the end of the block answers for it.

    Attributes:
        attempt: 1 for the first delivery, None for a bare body.
        due: unix seconds, or None for a bare body.
        lost: whether its lease ran out, so that another may have it.
        cancelled: whether it was cancelled meanwhile.
        answer: what it was answered, None: nothing yet.
    """

    id: str
    body: B
    attempt: int | None
    retries_left: int
    due: float | None
    headers: Mapping[str, str]
    lost: bool = False
    cancelled: bool = False
    answer: Ack | Nack | Reject | Snooze | None = field(default=None, repr=False)

    def ack(self) -> None:
        """Answer: done."""
        self.answer = Ack()

    def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """Answer: deliver again after `delay`, None for the default backoff."""
        self.answer = Nack(delay=None if delay is None else seconds("delay", delay), reason=reason)

    def reject(self, *, reason: str = "") -> None:
        """Answer: a dead letter at once."""
        self.answer = Reject(reason=reason)

    def snooze(self, *, delay: Duration, reason: str = "") -> None:
        """Answer: deliver again after `delay`, and spend no retry."""
        self.answer = Snooze(delay=seconds("delay", delay), reason=reason)


class Batch(Generic[B]):
    """
    What one `receive` holds.

    Attributes:
        claimed: what the claim took.
        undecodable: what of it was nacked because its body does not decode.
        jobs: what of it can be worked.
        given_up: whether nobody wants it any more.

    Raises:
        ConfigurationError: the limit or the lease is not allowed.
    """

    def __init__(
        self, keys: Keys, codec: Codec[B], settings: QueueSettings, lanes: Lanes, *, limit: int, lease: Duration
    ) -> None:
        self._keys, self._codec, self._settings = keys, codec, settings
        self._limit = whole("limit", limit, least=1, most=500)
        self.lease_seconds = lease_seconds(lease)
        self._lanes, self._lane = lanes, lanes.take()[0]
        self.claimed: list[Claimed] = []
        self.undecodable: list[Handled] = []
        self.jobs: list[Received[B]] = []
        self._deliveries: list[Delivery] = []  # of the jobs, in their order
        self.given_up = False

    def give_up(self) -> None:
        """Note that nobody waits for the messages any more."""
        self.given_up = True

    def look(self) -> list[Call[Any]]:
        """Return the calls of one look: what is due or overdue comes first."""
        lease_ms = milliseconds(self.lease_seconds)
        claim = transitions.claim(self._keys, self._lane.next(), limit=self._limit, lease_ms=lease_ms)
        return [transitions.promote(self._keys), transitions.reclaim(self._keys), claim]

    def looked(self, answers: Sequence[Any]) -> float:
        """Keep what was claimed; return the seconds in which nothing else will come due. Raise what was refused."""
        claim: ClaimAnswer | Exception = answers[2]
        self.claimed = [] if isinstance(claim, Exception) else claim.claimed
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        waits: list[float] = [due / 1000 for due in (answers[0][1], answers[1].next_in_ms) if due > 0]
        return min([LOOK_SECONDS, *waits])

    def over(self) -> None:
        """Note that the last look has its answer: its lane is free."""
        self._lanes.give_back(self._lane)

    def token(self, for_seconds: float) -> Command[bool]:
        """Return the wait for something to claim."""
        return commands.wake_token(self._keys, for_seconds)

    def bodies(self) -> list[Command[list[bytes | None]]]:
        """Return the calls for the values of what was claimed, each of a bounded size."""
        size = max(1, READ_BYTES // self._settings.max_body)
        ids = [one.id for one in self.claimed]
        return [commands.bodies(self._keys, ids[at : at + size]) for at in range(0, len(ids), size)]

    def fill(self, answers: Sequence[Any]) -> list[Call[Settled]]:
        """Turn what was claimed into jobs; return the calls that settle what has no body or does not decode."""
        values: list[bytes | None] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            values += answer
        missing: list[tuple[Claimed, int | None]] = []
        undecodable: list[tuple[Claimed, int, str, bytes]] = []
        for one, value in zip(self.claimed, values, strict=True):
            if value is None:
                missing.append((one, chosen_window_ms(one.id, self._settings.dedup)))
                continue
            delivery = Delivery(one, value, *open_envelope(value, bare=self._keys.bare))
            try:
                self._add(delivery, self._codec.decode(delivery.payload))
            except Exception as error:
                known = isinstance(error, UndecodableError)
                why = str(error) if known else f"decoding the body raised {type(error).__name__}"
                undecodable.append(transitions.failure(delivery, "undecodable", why, backoff_ms(delivery)))
                self.undecodable.append(
                    Handled(self._keys.name, one.id, delivery.attempt, "nack", 0.0, error=why, failed=True)
                )
        calls: list[Call[Settled]] = []
        calls += [transitions.ack(self._keys, missing, kind="expired")] if missing else []
        calls += [transitions.nack(self._keys, undecodable)] if undecodable else []
        return calls

    def release(self) -> Call[Settled]:
        """Return the call that gives everything back unspent."""
        return transitions.release(self._keys, self.claimed)

    def renew(self) -> Call[Settled]:
        """Return the call that extends every lease that still holds."""
        held = [one.claimed for job, one in zip(self.jobs, self._deliveries, strict=True) if not job.lost]
        return transitions.extend(self._keys, held, lease_ms=milliseconds(self.lease_seconds))

    def renewed(self, answer: Settled) -> None:
        """Tell the jobs what the renewal showed."""
        for job in self.jobs:
            job.lost = job.lost or job.id in answer.lost
            job.cancelled = job.cancelled or job.id in answer.cancelled

    settled = renewed

    def settle(self, error: BaseException | None) -> list[Call[Settled]]:
        """Return the calls that settle everything: unanswered jobs are acked, after an error nacked."""
        unanswered = Ack() if error is None else Nack(reason=type(error).__name__)
        acks: list[tuple[Claimed, int | None]] = []
        nacks: list[tuple[Claimed, int, str, bytes]] = []
        snoozes: list[tuple[Claimed, int]] = []
        for job, delivery in zip(self.jobs, self._deliveries, strict=True):
            match job.answer or unanswered:
                case Snooze(delay=delay):
                    snoozes.append((delivery.claimed, milliseconds(delay)))
                case Nack(delay=delay, reason=reason):
                    wait_ms = backoff_ms(delivery) if delay is None else milliseconds(delay)
                    nacks.append(transitions.failure(delivery, "failed", reason, wait_ms))
                case Reject(reason=reason):
                    nacks.append(transitions.failure(delivery, "rejected", reason, 0, final=True))
                case _:
                    acks.append((delivery.claimed, delivery.header.window_ms))
        calls: list[Call[Settled]] = [transitions.ack(self._keys, acks, history=self._settings.history)] if acks else []
        calls += [transitions.nack(self._keys, nacks)] if nacks else []
        calls += [transitions.snooze(self._keys, snoozes)] if snoozes else []
        return calls

    def _add(self, delivery: Delivery, body: B) -> None:
        one, header = delivery.claimed, delivery.header
        due = None if header.due is None else header.due / 1000
        self._deliveries.append(delivery)
        self.jobs.append(Received(one.id, body, delivery.attempt, one.left, due, header.headers))


def backoff_ms(delivery: Delivery) -> int:
    """Return the default wait after a failed delivery, in ms."""
    return milliseconds(seconds_after(DEFAULT_BACKOFF, delivery.attempt or 1))
