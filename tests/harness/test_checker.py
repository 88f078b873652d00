"""Each check finds its violation in a handwritten history, and finds nothing in a clean history."""

from tests.harness.chaos.checker import AFTER_THE_DRAIN, ALWAYS, check, name
from tests.harness.chaos.history import Event
from tests.harness.chaos.report import report
from tests.harness.chaos.scan import Snapshot, broken
from tests.harness.chaos.teller import tell

A, B = "consumer-0.0", "consumer-1.0"


class History:
    """A run of the queue `frail`, with one retry, as the processes' histories record it."""

    def __init__(self, **at_the_end):
        self.events, self.calls = [], 0
        totals = {"published": 1, "acked": 1}
        self.final = {"totals": totals, "alive": [], "dead": [], "left": {}, "results": 1, **at_the_end}

    def write(self, t, who, kind, **facts):
        self.events.append(Event(t, who, kind, facts))
        return self

    def published(self, t=1.0, id="m", durable=None, **facts):
        self.write(t, "p", "publish", call=t, names=[id], queue="frail", **{"delay": 0.0} | facts)
        return self.write(t + 0.1, "p", "published", call=t, ids=[id], outcome="ok", durable=durable)

    def claimed(self, t, who=A, nonce="n1", id="m"):
        return self.write(t, who, "claimed", asked=t - 0.01, since=t - 0.01, lease=2.0, items=[[id, nonce]])

    def started(self, t, who=A, nonce="n1", name="m"):
        return self.write(t, who, "start", id=name, nonce=nonce, name=name)

    def used(self, t, verb="acked", who=A, nonce="n1", id="m", late=False):
        self.calls += 1
        self.write(t, who, "asked", call=self.calls, verb=verb, items=[[id, nonce]], late=late)
        return self.write(t + 0.01, who, "answered", call=self.calls, lost=[])

    def done(self, t=2.0, who=A, nonce="n1"):
        self.claimed(t, who, nonce).started(t + 0.1, who, nonce)
        return self.write(t + 0.2, who, "end", id="m", nonce=nonce, how="ack")

    def cancelled(self, t):
        self.write(t, "p", "cancel", call=2, id="m")
        return self.write(t + 0.01, "p", "cancel_answered", call=2, id="m", answer="cancelled")

    def story(self, *, drained=True):
        per_key = {"frail": 1} if any(one.facts.get("key") for one in self.events) else {}
        limits = {"per_key": per_key, "costs": {"frail": (10, 50)}}
        begun = {"seed": 7, "seconds": 60.0, "retries": {"frail": 1}, **limits}
        end = [Event(100.0, "arena", "drained", {"seconds": 1.0})] * drained
        end.append(Event(101.0, "arena", "final", {"queue": "frail", **self.final}))
        end.append(Event(102.0, "arena", "ended", {"places": ["frail"]}))
        in_order = sorted(self.events, key=lambda event: event.t)
        return tell([Event(0.0, "arena", "begun", begun), *in_order, *end])


def clean():
    return History().published().done().used(2.3)


def twice():
    return History().published().done().done(9.0, B, "n2").used(9.3, who=B, nonce="n2")


def failed_four_times():
    history = History().published()
    for number in range(4):
        history.claimed(2.0 + number, nonce=f"n{number}").used(2.5 + number, "nack", nonce=f"n{number}")
    return history


def two_of_a_key():
    return History().published(key="a").published(1.5, "o", key="a")


def two_of_a_cost(cost):
    history = History().published(cost=cost).published(1.5, "o", cost=cost)
    return history.claimed(2.0).started(2.1).claimed(2.0, B, "n2", "o").started(2.1, B, "n2", "o")


#: Check -> a story that violates it.
VIOLATIONS = {
    "unexpected": History().started(2.0, name="stranger").story(),
    "duplicated": twice().story(),
    "after ack": clean().claimed(3.0, B, "n2").story(),
    "leased while held": History().published().claimed(2.0).claimed(3.0, B, "n2").story(),
    "overlapping": History().published().claimed(2.0).started(2.1).done(9.0, B, "n2").story(),
    "after cancel": History().published().cancelled(1.5).claimed(2.0).started(2.1).story(),
    "early": History().published(delay=3.0).done(3.5).story(),
    "stale accepted": clean().used(2.4, late=True).story(),
    "attempts": failed_four_times().story(),
    "invariants": clean().write(3.0, "arena", "look", queue="frail", alive=1, totals={}, broken=["x"]).story(),
    "over the limit": two_of_a_key().claimed(2.0).claimed(2.1, B, "n2", "o").story(),
    "over the rate": two_of_a_cost(31).story(),
    "out of order": two_of_a_key().claimed(2.0, B, "n2", "o").used(2.1, "acked", B, "n2", "o").claimed(3.0).story(),
    "skipped": clean().write(2.11, A, "start", id="m", nonce="n1", name="m", walk=1).story(),
    "not drained": clean().story(drained=False),
    "lost": History().published().claimed(2.0).story(),
    "leaks": (History(left={"lease": 2}).published().done().used(2.3)).story(),
    "conservation": (History(totals={"published": 2, "acked": 1}).published().done().used(2.3)).story(),
    "unstored": (History(results=0).published().done().used(2.3)).story(),
}


def found(story):
    return {count for count, violations in check(story).items() if violations}


def test_checker_finds_each_violation_and_none_in_a_clean_history():
    assert list(VIOLATIONS) == [name(count) for count in ALWAYS + AFTER_THE_DRAIN]
    assert [count for count, story in VIOLATIONS.items() if count not in found(story)] == []
    assert found(clean().story()) == set()
    assert "over the rate" not in found(two_of_a_cost(25).story())


def test_checker_accepts_a_second_run_whose_first_holder_recorded_the_reason():
    for reason in (
        twice().used(2.3, "nack"),
        twice().write(3.0, "arena", "died", of=A, code=-9),
        twice().write(4.5, A, "trouble", of="late renewal", since=3.5),
    ):
        assert found(reason.story()) == set()
    assert found(twice().write(4.5, "consumer-2.0", "trouble", of="late renewal", since=3.5).story()) == found(
        twice().story()
    )


def test_checker_accepts_the_loss_of_a_message_that_no_replica_confirmed():
    for durable, lost in ((None, set()), (True, {"lost"})):
        history = History(totals={}, results=0).published(durable=durable)
        history.write(1.2, "arena", "rewind", queues=["frail"], since=0.9, until=1.2)
        assert found(history.story()) == lost


def test_checker_expects_no_result_of_a_late_ack_after_a_failover():
    for results, expected in ((0, set()), (1, set()), (2, {"unstored"})):
        history = History(results=results).published().done().used(2.3).used(2.6, late=True)
        history.write(2.4, "arena", "rewind", queues=["frail"], since=2.0, until=2.5)
        assert found(history.story()) == expected


def test_scan_finds_broken_keys():
    sound = {
        "counts": {"held": "3 key-1\3800", "free": "3 key-2"},
        "words": {"held": "lane.1:2000"},
        "unack": ("held",),
        "lines": {"key-2": ("free",)},
        "places": frozenset({"key-1\0held"}),
        "served": frozenset({"key-2"}),
        "totals": {"published": 2},
        **dict.fromkeys(("pending", "ready", "retry", "garbage"), ()),
    }

    assert broken(Snapshot(**sound)) == []
    assert "without a place of their key" in str(broken(Snapshot(**sound | {"places": frozenset()})))
    assert "nobody will serve" in str(broken(Snapshot(**sound | {"served": frozenset()})))


def test_report_names_the_violations():
    story = VIOLATIONS["after ack"]

    page = report(story, check(story), 1)

    assert "# Chaos, seed 7: violated" in page
    assert "- m: n2 of consumer-1.0" in page
