"""What became of each message, delivery by delivery, and of each process: what a teller makes of histories."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from tests.harness.chaos.history import Event

#: Who writes down what holds up every process at once: the arena, which nothing kills or pauses.
MACHINE = "arena"


@dataclass(slots=True)
class Settling:
    """
    One use of a receipt.

    Attributes:
        delivery: whose receipt it is, None when no claim of it was answered.
        ended: when the answer was there, None when it never came.
        result: `ok`; `lost`, the receipt no longer held; `no`, it cannot have run; `unknown`.
        late: made on purpose with a receipt that had been used before.
    """

    verb: str
    asked: float
    late: bool
    delivery: "Delivery | None"
    ended: float | None = None
    result: str = "unknown"

    @property
    def may_have_run(self) -> bool:
        """Whether Redis may have done it."""
        return self.result == "ok" or (self.result == "unknown" and not self.late)

    @property
    def may_let_go(self) -> bool:
        """Whether it may have given the message up."""
        return self.verb != "extend" and self.may_have_run


@dataclass(slots=True)
class Delivery:
    """
    One claim of one message.

    Attributes:
        asked, claimed: when its first claim was sent, and when the answer came.
        grants: when each claim or extension of it that Redis granted was sent, and when it was answered.
        settlings: every use of its receipt, by whomever.
    """

    id: str
    nonce: str
    who: str
    asked: float
    claimed: float
    lease: float
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
        id: its name, unless Redis' client chose one; empty when the producer did not live to learn it.
        asked, told: when it was published, and when that was answered.
        outcome: `ok`; `unknown`; `refused`, nothing of it was written.
        durable: whether a replica confirmed it, None when none was asked.
        cancelled: when a cancel that answered `cancelled` was sent, and when it was answered.
        called_off: whether a cancel may end it, now or when its handler does not end well.
        key: as it was published, empty without one.
        deliveries: by the time of their claims.
    """

    name: str
    queue: str
    delay: float
    key: str
    asked: float
    id: str = ""
    told: float | None = None
    outcome: str = "unknown"
    durable: bool | None = None
    cancelled: tuple[float, float] | None = None
    called_off: bool = False
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def starts(self) -> list[Delivery]:
        """
        The deliveries whose handlers began, in the order of their claims.

        One that was paused between the last look at its lease and the start of its handler begins late, even after
        the next has begun; what explains that is in the claim that came first.
        """
        return [one for one in self.deliveries if one.started is not None]

    @property
    def settlings(self) -> list[Settling]:
        """Every use of its receipts."""
        return [settling for one in self.deliveries for settling in one.settlings]

    @property
    def is_done(self) -> bool:
        """Whether it was acked, or may have been: the answer to an ack never came."""
        return any(one.verb == "acked" and one.may_have_run for one in self.settlings)


@dataclass(slots=True)
class Trouble:
    """Something held a process up or cut it off."""

    kind: str
    since: float
    until: float

    def meets(self, asked: float, told: float | None) -> bool:
        """Whether it lasted while a call was under way."""
        return self.since < (inf if told is None else told) and asked < self.until


@dataclass(slots=True)
class Story:
    """
    What happened in a run.

    Attributes:
        strangers: names that were started and never published.
        deaths: process -> when it was gone.
        troubles: process, or MACHINE -> what explains that it could not keep a lease.
        rewinds: queue -> when a primary of it wrote what its replica, which took its place, may not have got.
        faults: kind, begin and end of each.
        notes: kind -> what the arena wrote of it, such as its looks at Redis.
    """

    messages: dict[str, Message] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    deaths: dict[str, float] = field(default_factory=dict)
    troubles: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    rewinds: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Trouble] = field(default_factory=list)
    notes: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def facts(self, kind: str) -> list[dict]:
        """Return the facts of each note of the arena of this kind."""
        return [event.facts for event in self.notes[kind]]

    def may_be_undone(self, message: Message, asked: float, told: float | None) -> bool:
        """Whether a primary may have forgotten, when a replica took its place, what it did for a call about a message."""
        return any(rewind.meets(asked, told) for rewind in self.rewinds[message.queue])

    def is_forgotten(self, message: Message) -> bool:
        """Whether its primary may have forgotten a message that no replica had confirmed."""
        return message.durable is not True and self.may_be_undone(message, message.asked, message.told)

    def left_at_the_end(self) -> set[str]:
        """Return the ids that are dead or alive in Redis at the end."""
        return {id for final in self.facts("final") for id in (*final["dead"], *final["alive"])}
