"""Histories put in order: what became of each message, delivery by delivery, and of each process."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from tests.chaos.history import Event


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
        grants: when each claim or extension of it was sent that Redis granted.
        settlings: every use of its receipt, by whomever.
    """

    id: str
    nonce: str
    who: str
    asked: float
    claimed: float
    lease: float
    grants: list[float]
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
        cancelled: when a cancel that answered `cancelled` was answered.
        called_off: whether a cancel may end it, now or when its handler does not end well.
        deliveries: by the time of their claims.
    """

    name: str
    id: str
    queue: str
    delay: float
    asked: float
    told: float | None = None
    outcome: str = "unknown"
    cancelled: float | None = None
    called_off: bool = False
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def starts(self) -> list[Delivery]:
        """The deliveries whose handlers began, in that order."""
        begun = [one for one in self.deliveries if one.started is not None]
        return sorted(begun, key=lambda one: one.started or 0.0)


@dataclass(slots=True)
class Trouble:
    """Something held a process up or cut it off."""

    kind: str
    since: float
    until: float


@dataclass(slots=True)
class Story:
    """
    What happened in a run.

    Attributes:
        strangers: names that were started and never published.
        deaths: process -> when it was gone.
        troubles: process -> what explains that it could not keep a lease.
        faults: kind, begin and end of each.
        looks: what the scans found broken.
        finals: of each queue at the end.
        clocks: how far the clock of the day was ahead of the monotonic one, look by look.
    """

    messages: dict[str, Message] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    deaths: dict[str, float] = field(default_factory=dict)
    troubles: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Trouble] = field(default_factory=list)
    looks: list[Event] = field(default_factory=list)
    finals: dict[str, Event] = field(default_factory=dict)
    clocks: list[float] = field(default_factory=list)
    start: float = 0.0
    seconds: float = 0.0
    drained: float | None = None

    @property
    def by_id(self) -> dict[str, Message]:
        """The messages whose ids are known."""
        return {one.id: one for one in self.messages.values() if one.id}


class Teller:
    """Makes a story of events, which must come by time."""

    def __init__(self) -> None:
        self.story = Story()
        self._deliveries: dict[tuple[str, str], Delivery] = {}
        self._publishes: dict[tuple[str, int], list[Message]] = {}
        self._calls: dict[tuple[str, str], list[Settling]] = {}
        self._extends: dict[tuple[str, str], list[Delivery]] = {}
        self._names: dict[str, str] = {}  # id -> name
        self._places: dict[str, str] = {}  # which process is in which place
        self._cancels: dict[tuple[str, int], tuple[str, str, float]] = {}  # id, answer, when that came

    def tell(self, events: Iterable[Event]) -> Story:
        """Return the story of `events`."""
        for event in events:
            if hear := getattr(self, f"_{event.kind}", None):
                hear(event)
        self._put_together()
        return self.story

    # ---- producers ----------------------------------------------------------

    def _publish(self, event: Event) -> None:
        facts, made = event.facts, []
        for name in facts["names"]:
            made.append(Message(name, "", facts["queue"], facts["delay"], event.t))
            self.story.messages[name] = made[-1]
        self._publishes[event.who, facts["call"]] = made

    def _published(self, event: Event) -> None:
        for message, id in zip(self._publishes[event.who, event.facts["call"]], event.facts["ids"], strict=True):
            message.id, message.told, message.outcome = id, event.t, "ok"
            self._names[id] = message.name

    def _unpublished(self, event: Event) -> None:
        made = self._publishes[event.who, event.facts["call"]]
        for message, id in zip(made, event.facts["ids"], strict=False):
            message.id, message.outcome = id, "unknown" if event.facts["unknown"] else "refused"
            self._names[id] = message.name

    def _cancel(self, event: Event) -> None:
        self._cancels[event.who, event.facts["call"]] = event.facts["id"], "unknown", event.t

    def _cancel_answered(self, event: Event) -> None:
        self._cancels[event.who, event.facts["call"]] = event.facts["id"], event.facts["answer"], event.t

    # ---- consumers ----------------------------------------------------------

    def _claimed(self, event: Event) -> None:
        facts = event.facts
        for id, _ in facts["ids"]:
            key = id, facts["nonce"]
            if key in self._deliveries:
                self._deliveries[key].grants.append(facts["asked"])
            else:
                one = Delivery(id, key[1], event.who, facts["asked"], event.t, facts["lease"], [facts["asked"]])
                self._deliveries[key] = one

    def _asked(self, event: Event) -> None:
        key = event.who, event.facts["call"]
        self._calls[key], self._extends[key] = [], []
        for id, nonce in event.facts["items"]:
            settling = Settling(event.facts["verb"], event.who, event.t, event.facts["late"])
            self._calls[key].append(settling)
            if delivery := self._deliveries.get((id, nonce)):
                delivery.settlings.append(settling)
                if settling.verb == "extend":
                    self._extends[key].append(delivery)

    def _answered(self, event: Event) -> None:
        settlings = self._end_call(event, "ok")
        for index in event.facts["lost"]:
            settlings[index].result = "lost"
        for delivery in self._extends.pop((event.who, event.facts["call"])):
            own = [one for one in settlings if one in delivery.settlings]
            delivery.grants += [one.asked for one in own if one.result == "ok"]

    def _no(self, event: Event) -> None:
        self._note_failure(event, "no")

    def _unknown(self, event: Event) -> None:
        self._note_failure(event, "unknown")

    def _again(self, event: Event) -> None:
        self._end_call(event, "no")

    def _end_call(self, event: Event, result: str) -> list[Settling]:
        settlings = self._calls.pop((event.who, event.facts["call"]))
        for one in settlings:
            one.ended, one.result = event.t, result
        if settlings and not settlings[0].late and event.t - settlings[0].asked > SLOW_SECONDS:
            self._trouble(event.who, "slow call", settlings[0].asked, event.t)
        return settlings

    def _note_failure(self, event: Event, result: str) -> None:
        settlings = self._end_call(event, result)
        for one in [one for one in settlings if not one.late][:1]:
            self._trouble(event.who, "failed call", one.asked, event.t)

    def _start(self, event: Event) -> None:
        facts = event.facts
        self._names[facts["id"]] = facts["name"]
        if facts["name"] not in self.story.messages:
            self.story.strangers.append(facts["name"])
        if delivery := self._deliveries.get((facts["id"], facts["nonce"])):
            delivery.started = event.t

    def _end(self, event: Event) -> None:
        if delivery := self._deliveries.get((event.facts["id"], event.facts["nonce"])):
            delivery.ended = event.t

    def _late(self, event: Event) -> None:
        self._trouble(event.who, "late renewal", event.t - event.facts["seconds"], event.t)

    def _stalled(self, event: Event) -> None:
        self._trouble(event.who, "stalled", event.facts["since"], event.t)

    # ---- the arena ----------------------------------------------------------

    def _begun(self, event: Event) -> None:
        self.story.start, self.story.seconds = event.facts["start"], event.facts["seconds"]

    def _died(self, event: Event) -> None:
        self.story.deaths[event.facts["of"]] = event.t

    def _born(self, event: Event) -> None:
        self._places[event.facts["of"].partition(".")[0]] = event.facts["of"]

    def _fault(self, event: Event) -> None:
        fault = Trouble(event.facts["of"], event.facts["began"], event.t)
        self.story.faults.append(fault)
        if fault.kind == "consumer_paused":  # it may be killed before it can say so itself
            who = self._places[f"consumer-{event.facts['victim']}"]
            self._trouble(who, "paused", fault.since, fault.until)

    def _look(self, event: Event) -> None:
        self.story.looks.append(event)

    def _clock(self, event: Event) -> None:
        self.story.clocks.append(event.facts["ahead"])

    def _drained(self, event: Event) -> None:
        self.story.drained = event.facts["seconds"]

    def _final(self, event: Event) -> None:
        self.story.finals[event.facts["queue"]] = event

    # ---- at the end ---------------------------------------------------------

    def _trouble(self, who: str, kind: str, since: float, until: float) -> None:
        self.story.troubles[who].append(Trouble(kind, since, until))

    def _put_together(self) -> None:
        for who, call in self._calls:  # no answer ever came
            for one in [one for one in self._calls[who, call] if not one.late][:1]:
                self._trouble(who, "failed call", one.asked, self.story.deaths.get(who, inf))
        for id, name in self._names.items():
            if name in self.story.messages:
                self.story.messages[name].id = id
        by_id = self.story.by_id
        for delivery in sorted(self._deliveries.values(), key=lambda one: one.claimed):
            if message := by_id.get(delivery.id):
                message.deliveries.append(delivery)
        for id, answer, at in self._cancels.values():
            if message := by_id.get(id):
                message.called_off |= answer != "not_found"
                if answer == "cancelled" and message.cancelled is None:
                    message.cancelled = at


#: A call that takes so long explains that others of the process came late.
SLOW_SECONDS = 0.5


def tell(events: Iterable[Event]) -> Story:
    """Return the story of `events`, which must come by time."""
    return Teller().tell(events)
