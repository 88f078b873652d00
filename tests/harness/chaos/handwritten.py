"""Histories written by hand, for the tests of the checker."""

from tests.harness.chaos.checker import check
from tests.harness.chaos.history import Event
from tests.harness.chaos.teller import tell

A, B = "consumer-0.0", "consumer-1.0"


class History:
    """A run written by hand: one message, `m`, in the queue with one retry."""

    def __init__(self):
        self.events = []
        self.totals = {"published": 1, "acked": 1}
        self.dead, self.left, self.alive, self.drained = [], {}, [], True
        self.calls = 0

    def write(self, t, who, kind, **facts):
        self.events.append(Event(t, who, kind, facts))
        return self

    def published(self, t=1.0, delay=0.0, name="m", durable=None):
        self.write(t, "p", "publish", call=1, names=[name], queue="frail", delay=delay)
        return self.write(t + 0.1, "p", "published", call=1, ids=[name], durable=durable)

    def claimed(self, t, who=A, nonce="n1", asked=None, id="m"):
        asked = t - 0.01 if asked is None else asked
        return self.write(t, who, "claimed", asked=asked, queue="frail", nonce=nonce, lease=2.0, ids=[[id, 1]])

    def started(self, t, who=A, nonce="n1", name="m"):
        return self.write(t, who, "start", id=name, nonce=nonce, name=name)

    def ended(self, t, who=A, nonce="n1"):
        return self.write(t, who, "end", id="m", nonce=nonce, how="ack")

    def used(self, t, verb="acked", who=A, nonce="n1", answer="answered", late=False, took=0.01):
        self.calls += 1
        self.write(t, who, "asked", call=self.calls, verb=verb, queue="frail", items=[["m", nonce]], late=late)
        if answer:
            facts = {"lost": [0] if answer == "lost" else []} if answer in ("answered", "lost") else {}
            self.write(t + took, who, "answered" if facts else answer, call=self.calls, **facts)
        return self

    def cancelled(self, t, answer="cancelled", took=0.01):
        self.write(t, "p", "cancel", call=2, queue="frail", id="m")
        return self.write(t + took, "p", "cancel_answered", call=2, id="m", answer=answer) if answer else self

    def rewound(self, since, until, queue="frail"):
        return self.write(until, "arena", "rewind", queues=[queue], since=since, until=until)

    def done_by(self, who, nonce, t):
        return self.claimed(t, who, nonce).started(t + 0.1, who, nonce).ended(t + 0.2, who, nonce)

    def story(self):
        end = [Event(100.0, "arena", "drained", {"seconds": 1.0})] if self.drained else []
        for queue, totals in (("frail", self.totals), ("sturdy", {})):
            alive, dead, left = (self.alive, self.dead, self.left) if queue == "frail" else ([], [], {})
            end.append(
                Event(
                    101.0,
                    "arena",
                    "final",
                    {"queue": queue, "totals": totals, "alive": alive, "dead": dead, "left": left},
                )
            )
        begun = Event(0.0, "arena", "begun", {"start": 0.0, "seconds": 60.0, "retries": {"frail": 1, "sturdy": 20}})
        end.append(Event(102.0, "arena", "ended", {"places": ["frail", "sturdy"]}))
        return tell([begun, *sorted(self.events, key=lambda event: event.t), *end])

    def found(self):
        return {name for name, some in check(self.story()).violations.items() if some}
