"""Puts histories in order: from events to a story."""

from collections.abc import Iterable
from math import inf

from tests.harness.chaos.history import Event
from tests.harness.chaos.story import Delivery, Message, Settling, Story, Trouble

#: A call that takes so long explains that others of the process came late.
SLOW_SECONDS = 0.5


class Teller:
    """Makes a story of events, which must come by time."""

    def __init__(self) -> None:
        self.story = Story()
        self._deliveries: dict[tuple[str, str], Delivery] = {}
        self._publishes: dict[tuple[str, int], list[Message]] = {}
        self._calls: dict[tuple[str, str], list[Settling]] = {}
        self._extends: dict[tuple[str, str], list[tuple[Delivery, Settling]]] = {}
        self._names: dict[str, str] = {}  # id -> name
        self._places: dict[str, list[str]] = {}  # which processes were in which place, one after the other
        self._cancels: dict[tuple[str, int], tuple[str, str, float, float]] = {}  # id, answer, when asked, when told

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
            made.append(Message(name, "", facts["queue"], facts["delay"], event.t, key=facts.get("key", "")))
            self.story.messages[name] = made[-1]
        self._publishes[event.who, facts["call"]] = made

    def _published(self, event: Event) -> None:
        for message, id in zip(self._publishes[event.who, event.facts["call"]], event.facts["ids"], strict=True):
            message.id, message.told, message.outcome = id, event.t, "ok"
            message.durable = event.facts.get("durable")
            self._names[id] = message.name

    def _unpublished(self, event: Event) -> None:
        made = self._publishes[event.who, event.facts["call"]]
        for message, id in zip(made, event.facts["ids"], strict=False):
            message.id, message.outcome = id, "unknown" if event.facts["unknown"] else "refused"
            self._names[id] = message.name

    def _cancel(self, event: Event) -> None:
        self._cancels[event.who, event.facts["call"]] = event.facts["id"], "unknown", event.t, inf

    def _cancel_answered(self, event: Event) -> None:
        id, _, asked, _ = self._cancels[event.who, event.facts["call"]]
        self._cancels[event.who, event.facts["call"]] = id, event.facts["answer"], asked, event.t

    # ---- consumers ----------------------------------------------------------

    def _claimed(self, event: Event) -> None:
        facts = event.facts
        for id, _ in facts["ids"]:
            key = id, facts["nonce"]
            if key in self._deliveries:
                self._deliveries[key].grants.append((facts["asked"], event.t))
            else:
                granted = facts["asked"], event.t
                one = Delivery(id, key[1], event.who, *granted, facts["lease"], [granted])
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
                    self._extends[key].append((delivery, settling))

    def _answered(self, event: Event) -> None:
        settlings = self._end_call(event, "ok")
        for index in event.facts["lost"]:
            settlings[index].result = "lost"
        for delivery, own in self._extends.pop((event.who, event.facts["call"])):
            if own.result == "ok":
                delivery.grants.append((own.asked, event.t))

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
        self.story.retries, self.story.per_key = event.facts["retries"], event.facts.get("per_key", {})

    def _died(self, event: Event) -> None:
        self.story.deaths[event.facts["of"]] = event.t

    def _born(self, event: Event) -> None:
        self._places.setdefault(event.facts["of"].partition(".")[0], []).append(event.facts["of"])

    def _fault(self, event: Event) -> None:
        fault = Trouble(event.facts["of"], event.facts["began"], event.t)
        self.story.faults.append(fault)
        # Before it can say so itself, a paused one may be killed, and one that is stopped be done with writing.
        which = {"consumer_paused": -1, "consumer_stopped": -2}.get(fault.kind)
        if which:
            who = self._places[f"consumer-{event.facts['victim']}"][which]
            self._trouble(who, fault.kind.removeprefix("consumer_"), fault.since, fault.until)

    def _rewind(self, event: Event) -> None:
        rewind = Trouble("primary lost", event.facts["since"], event.facts["until"])
        for queue in event.facts["queues"]:
            self.story.rewinds[queue].append(rewind)

    def _ended(self, event: Event) -> None:
        self.story.places = event.facts["places"]

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
        for id, answer, asked, at in self._cancels.values():
            if message := by_id.get(id):
                message.called_off |= answer != "not_found" or message.was_met_without_a_body(asked, at)
                if answer == "cancelled" and message.cancelled is None:
                    message.cancelled = asked, at


def tell(events: Iterable[Event]) -> Story:
    """Return the story of `events`, which must come by time."""
    return Teller().tell(events)
