"""Build the story of a run from the events of its histories."""

from collections.abc import Iterable
from math import inf

from tests.harness.chaos.history import Event
from tests.harness.chaos.story import MACHINE, Delivery, Message, Settling, Story, Trouble

#: Seconds. If a call takes this long, later calls of the same process may be late.
SLOW_SECONDS = 0.5


class Teller:
    """Builds a story from events in the order of their times."""

    def __init__(self) -> None:
        self.story = Story()
        self._deliveries: dict[tuple[str, str], Delivery] = {}
        self._publishes: dict[tuple[str, int], list[Message]] = {}
        self._calls: dict[tuple[str, str], list[Settling]] = {}
        self._names: dict[str, str] = {}  # id -> name
        self._cancels: dict[tuple[str, int], tuple[str, str, float, float]] = {}  # id, answer, sent at, answered at

    def tell(self, events: Iterable[Event]) -> Story:
        """Return the story of `events`."""
        for event in events:
            if hear := getattr(self, f"_{event.kind}", None):
                hear(event, **event.facts)
            elif event.who == MACHINE:
                self.story.notes[event.kind].append(event)
        self._put_together()
        return self.story

    # ---- producers ----------------------------------------------------------

    def _publish(self, event: Event, call, names, queue, delay, key="", cost=1) -> None:
        made = {name: Message(name, queue, delay, key, cost, event.t) for name in names}
        self.story.messages |= made
        self._publishes[event.who, call] = list(made.values())

    def _published(self, event: Event, call, ids, outcome, durable=None) -> None:
        for message, id in zip(self._publishes[event.who, call], ids, strict=outcome == "ok"):
            message.id = id
            message.outcome = outcome
            message.durable = durable
            message.told = event.t if outcome == "ok" else None
            self._names[id] = message.name

    def _cancel(self, event: Event, call, id) -> None:
        self._cancels[event.who, call] = id, "unknown", event.t, inf

    def _cancel_answered(self, event: Event, call, id, answer) -> None:
        asked = self._cancels[event.who, call][2]
        self._cancels[event.who, call] = id, answer, asked, event.t

    # ---- consumers ----------------------------------------------------------

    def _claimed(self, event: Event, asked, since, lease, items) -> None:
        for id, nonce in items:
            made = Delivery(id, nonce, event.who, asked, event.t, lease, since)
            self._deliveries.setdefault((id, nonce), made).grants.append((asked, event.t))

    def _asked(self, event: Event, call, verb, items, late) -> None:
        deliveries = [self._deliveries.get((id, nonce)) for id, nonce in items]
        settlings = [Settling(verb, event.t, late, delivery) for delivery in deliveries]
        self._calls[event.who, call] = settlings
        for settling in settlings:
            if settling.delivery:
                settling.delivery.settlings.append(settling)

    def _answered(self, event: Event, call, lost) -> None:
        for index, settling in enumerate(self._end_call(event, call, "ok")):
            if index in lost:
                settling.result = "lost"
            elif settling.verb == "extend" and settling.delivery:
                settling.delivery.grants.append((settling.asked, event.t))

    def _failed(self, event: Event, call, result) -> None:
        settlings = self._end_call(event, call, "no" if result == "again" else result)
        if result != "again":
            self._note_failure(event.who, settlings, event.t)

    def _end_call(self, event: Event, call: str, result: str) -> list[Settling]:
        settlings = self._calls.pop((event.who, call))
        for one in settlings:
            one.ended = event.t
            one.result = result
        if settlings and not settlings[0].late and event.t - settlings[0].asked > SLOW_SECONDS:
            self._note(event.who, "slow call", settlings[0].asked, event.t)
        return settlings

    def _start(self, event: Event, id, nonce, name, walk=0) -> None:
        self._names[id] = name
        if name in self.story.messages:
            self.story.messages[name].walk = walk
        else:
            self.story.strangers.append(name)
        if delivery := self._deliveries.get((id, nonce)):
            delivery.started = event.t

    def _end(self, event: Event, id, nonce, how) -> None:
        if delivery := self._deliveries.get((id, nonce)):
            delivery.ended = event.t

    def _item(self, _event: Event, id, nonce, item) -> None:
        if message := self.story.messages.get(self._names[id]):
            message.walked.append(item)

    def _trouble(self, event: Event, of, since, at="") -> None:
        self._note(at or event.who, of, since, event.t)

    # ---- arena --------------------------------------------------------------

    def _died(self, event: Event, of, code) -> None:
        self.story.deaths[of] = event.t

    def _fault(self, event: Event, of, began) -> None:
        self.story.faults.append(Trouble(of, began, event.t))

    def _rewind(self, event: Event, queues, since, until) -> None:
        for queue in queues:
            self.story.rewinds[queue].append(Trouble("primary lost", since, until))

    # ---- end of the run -----------------------------------------------------

    def _note(self, who: str, kind: str, since: float, until: float) -> None:
        self.story.troubles[who].append(Trouble(kind, since, until))

    def _note_failure(self, who: str, settlings: list[Settling], until: float) -> None:
        if settlings and not settlings[0].late:
            self._note(who, "failed call", settlings[0].asked, until)

    def _put_together(self) -> None:
        for (who, _), settlings in self._calls.items():  # calls without a reply
            self._note_failure(who, settlings, self.story.deaths.get(who, inf))
        for id, name in self._names.items():
            if name in self.story.messages:
                self.story.messages[name].id = id
        by_id = {one.id: one for one in self.story.messages.values() if one.id}
        for delivery in sorted(self._deliveries.values(), key=lambda one: one.claimed):
            if message := by_id.get(delivery.id):
                message.deliveries.append(delivery)
        for id, answer, asked, at in self._cancels.values():
            if message := by_id.get(id):
                # A cancel is repeated after a lost reply. If the first call took the body of a message in flight, the
                # message may have ended before the second call, which then returns `not_found`.
                without_body = any(one.verb == "expired" and asked <= one.asked <= at for one in message.settlings)
                message.called_off |= answer != "not_found" or without_body
                if answer == "cancelled" and message.cancelled is None:
                    message.cancelled = asked, at


def tell(events: Iterable[Event]) -> Story:
    """Return the story of `events`, which must be in the order of their times."""
    return Teller().tell(events)
