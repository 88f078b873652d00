"""The deliveries of each message and the life of each process, as read from the histories."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from tests.harness.chaos.history import Event

#: The process that records pauses of the whole machine: the arena, because no fault kills or pauses it.
MACHINE = "arena"


@dataclass(slots=True)
class Settling:
    """
    One use of a receipt.

    Attributes:
        delivery: the delivery of the receipt; None if the process got no reply to its claim.
        ended: time of the reply; None without a reply.
        result: `ok`; `lost`: the lease had expired; `no`: the call cannot have run; `unknown`: it may have run.
        late: whether the call used an old receipt on purpose.
    """

    verb: str
    asked: float
    late: bool
    delivery: "Delivery | None"
    ended: float | None = None
    result: str = "unknown"

    @property
    def may_have_run(self) -> bool:
        """Return whether Redis may have run the call."""
        return self.result == "ok" or (self.result == "unknown" and not self.late)

    @property
    def may_let_go(self) -> bool:
        """Return whether the call may have released the message."""
        return self.verb != "extend" and self.may_have_run


@dataclass(slots=True)
class Delivery:
    """
    One claim of one message.

    Attributes:
        asked, claimed: times of the first answered claim's request and of its reply.
        since: time of the first request, which may have got no reply.
        grants: times of the request and the reply of each claim or extension that Redis granted.
        settlings: every use of its receipt, by any process.
    """

    id: str
    nonce: str
    who: str
    asked: float
    claimed: float
    lease: float
    since: float
    grants: list[tuple[float, float]] = field(default_factory=list)
    started: float | None = None
    ended: float | None = None
    settlings: list[Settling] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.nonce} of {self.who}"


@dataclass(slots=True)
class Message:
    """
    One message.

    Attributes:
        id: the chosen or generated id; empty when the producer died before it got the reply.
        asked, told: times of the publish and of its reply.
        outcome: `ok`; `unknown`; `refused`, nothing was written.
        durable: whether a replica confirmed it, None when the publish did not wait for a replica.
        cancelled: times of the call and the reply of a successful cancel.
        called_off: whether a cancel may have ended the message, or may end it after a failed attempt.
        key: its message key, empty without a key.
        cost: the least that a start takes from a rate by cost.
        deliveries: in the order of their claims.
        walk, walked: the number of items of a long job, and the items that its deliveries have done.
    """

    name: str
    queue: str
    delay: float
    key: str
    cost: int
    asked: float
    id: str = ""
    told: float | None = None
    outcome: str = "unknown"
    durable: bool | None = None
    cancelled: tuple[float, float] | None = None
    called_off: bool = False
    deliveries: list[Delivery] = field(default_factory=list)
    walk: int = 0
    walked: list[int] = field(default_factory=list)

    @property
    def starts(self) -> list[Delivery]:
        """
        The deliveries whose handlers began, in the order of their claims.

        If a process pauses between the last lease check and the start of its handler, the handler begins late, even
        after the next delivery has begun; the earlier claim explains the overlap.
        """
        return [one for one in self.deliveries if one.started is not None]

    @property
    def settlings(self) -> list[Settling]:
        """Every use of its receipts."""
        return [settling for one in self.deliveries for settling in one.settlings]

    @property
    def is_done(self) -> bool:
        """Return whether the message was acked, or may have been acked because the ack got no reply."""
        return any(one.verb == "acked" and one.may_have_run for one in self.settlings)


@dataclass(slots=True)
class Trouble:
    """A time in which a process was paused or disconnected."""

    kind: str
    since: float
    until: float

    def meets(self, asked: float, told: float | None) -> bool:
        """Return whether this time overlapped with a call."""
        return self.since < (inf if told is None else told) and asked < self.until


@dataclass(slots=True)
class Story:
    """
    What happened in a run.

    Attributes:
        strangers: names of messages that started but were never published.
        deaths: process -> time of its end.
        troubles: process, or MACHINE -> events that explain why it could not renew a lease.
        rewinds: queue -> spans of writes that a failover may have lost.
        faults: kind, begin and end of each fault.
        notes: kind -> records of the arena, such as its snapshots of Redis.
    """

    messages: dict[str, Message] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    deaths: dict[str, float] = field(default_factory=dict)
    troubles: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    rewinds: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Trouble] = field(default_factory=list)
    notes: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def facts(self, kind: str) -> list[dict]:
        """Return the facts of each arena record of this kind."""
        return [event.facts for event in self.notes[kind]]

    def may_be_undone(self, message: Message, asked: float, told: float | None) -> bool:
        """Return whether a failover may have undone a call about a message."""
        return any(rewind.meets(asked, told) for rewind in self.rewinds[message.queue])

    def is_forgotten(self, message: Message) -> bool:
        """Return whether a failover may have lost the message, which no replica had confirmed."""
        return message.durable is not True and self.may_be_undone(message, message.asked, message.told)

    def left_at_the_end(self) -> set[str]:
        """Return the ids that are alive or dead letters in Redis at the end."""
        return {id for final in self.facts("final") for id in (*final["dead"], *final["alive"])}
