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
        ended: when the answer was there, None when it never came.
        result: `ok`; `lost`, the receipt no longer held; `no`, it cannot have run; `unknown`.
        late: made on purpose with a receipt that had been used before.
    """

    verb: str
    who: str
    asked: float
    late: bool = False
    ended: float | None = None
    result: str = "unknown"

    @property
    def may_have_run(self) -> bool:
        """Whether Redis may have done it."""
        return self.result == "ok" or (self.result == "unknown" and not self.late)


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
    grants: list[tuple[float, float]]
    started: float | None = None
    ended: float | None = None
    settlings: list[Settling] = field(default_factory=list)

    def let_go_before(self, t: float) -> bool:
        """Whether its holder may have given the message up before `t`."""
        return any(one.verb != "extend" and one.may_have_run and one.asked < t for one in self.settlings)


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
    id: str
    queue: str
    delay: float
    asked: float
    told: float | None = None
    outcome: str = "unknown"
    durable: bool | None = None
    cancelled: tuple[float, float] | None = None
    called_off: bool = False
    key: str = ""
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def starts(self) -> list[Delivery]:
        """
        The deliveries whose handlers began, in the order of their claims.

        One that was paused between the last look at its lease and the start of its handler begins late, even after
        the next has begun; what explains that is in the claim that came first.
        """
        return [one for one in self.deliveries if one.started is not None]

    def was_met_without_a_body(self, since: float, until: float) -> bool:
        """
        Whether its holder found that meanwhile.

        A cancel whose reply is lost is made again: by the second call a message that was held when the first one took
        its body may have ended, and the answer is `not_found`.
        """
        settlings = [settling for one in self.deliveries for settling in one.settlings]
        return any(one.verb == "expired" and since <= one.asked <= until for one in settlings)

    @property
    def started(self) -> float:
        """When the first handler began, infinity when none did."""
        return min((one.started for one in self.deliveries if one.started is not None), default=inf)


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
        retries: of the messages of each queue.
        per_key: how many messages of a key may run at once, by queue.
        places: each queue, or shard of one, that there was at the end.
        strangers: names that were started and never published.
        deaths: process -> when it was gone.
        troubles: process, or MACHINE -> what explains that it could not keep a lease.
        rewinds: queue -> when a primary of it wrote what its replica, which took its place, may not have got.
        faults: kind, begin and end of each.
        looks: what the scans found broken.
        finals: of each queue at the end.
        clocks: how far the clock of the day was ahead of the monotonic one, look by look.
    """

    retries: dict[str, int] = field(default_factory=dict)
    per_key: dict[str, int] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    messages: dict[str, Message] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    deaths: dict[str, float] = field(default_factory=dict)
    troubles: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    rewinds: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Trouble] = field(default_factory=list)
    looks: list[Event] = field(default_factory=list)
    finals: dict[str, Event] = field(default_factory=dict)
    clocks: list[float] = field(default_factory=list)
    start: float = 0.0
    seconds: float = 0.0
    drained: float | None = None

    def may_be_undone(self, message: Message, asked: float, told: float | None) -> bool:
        """Whether a primary may have forgotten, when a replica took its place, what it did for a call about a message."""
        return any(rewind.meets(asked, told) for rewind in self.rewinds[message.queue])

    @property
    def by_id(self) -> dict[str, Message]:
        """The messages whose ids are known."""
        return {one.id: one for one in self.messages.values() if one.id}
