"""Messages of a foreign publisher are handled unchanged, and do not affect messages beside them."""

import threading
import time
from collections import Counter

import pytest
from go_original import GoProgram
from tenacity import wait_exponential
from transition import run_transition
from waiting import eventually

from reliq import Layout, OutgoingMessage
from reliq.events import Acked
from reliq.keys import QUEUES_KEY
from reliq.lua.transitions import NOTHING_DUE, ClaimAnswer
from reliq.metrics import names
from reliq.metrics.process import ProcessMetrics
from reliq.worker.upkeep import Scheduler


def publish_as_go_does(client, queue, id: bytes, body: bytes) -> None:
    base = queue.keys.msg("").encode()
    client.set(base + id, body, px=60_000)
    client.hset(queue.keys.retries_left, id, "3")
    client.lpush(queue.keys.ready, id)


ENVELOPE_LIKE = b'RELIQ/1 {"d":1,"r":1,"e":1,"w":0}\nhello'


def test_an_id_of_other_bytes_and_a_bare_body_like_an_envelope_are_handled(make_queue, consumer, work_until, client):
    queue = make_queue("go", bytes, layout=Layout.hdt3213())
    bodies = []
    consumer.handler(queue)(bodies.append)
    publish_as_go_does(client, queue, b"\xff\xfe", b"strange")
    publish_as_go_does(client, queue, b"plain", ENVELOPE_LIKE)

    work_until(Acked, count=2)

    assert sorted(bodies) == [ENVELOPE_LIKE, b"strange"]
    assert client.exists(queue.keys.msg("").encode() + b"\xff\xfe") == 0
    assert queue.counts().unack == 0
    queue.publish(b"x")
    assert client.hkeys(QUEUES_KEY) == [b"hdt3213 go"]


def test_a_bare_body_like_an_envelope_is_never_written_to(make_queue, client):
    queue = make_queue("go", bytes, layout=Layout.hdt3213())
    place = queue.keys.msg("").encode() + b"a"
    publish_as_go_does(client, queue, b"a", ENVELOPE_LIKE)

    for settle in ("nack", "snooze"):
        with queue.receive(lease=30, wait=20) as [job]:
            getattr(job, settle)(delay=0)
        assert client.get(place) == ENVELOPE_LIKE
    assert queue.reschedule("a", delay=0) == "rescheduled"
    with queue.receive(wait=20) as [job]:
        job.reject()
    assert client.get(place) == ENVELOPE_LIKE
    run_transition(queue, "collect", ["a"], dead_letter_limit=10, letters_ms=10_000)
    assert queue.redrive(queue.dead_letters()) == 1
    assert client.get(place) == ENVELOPE_LIKE


def test_messages_that_go_held_when_it_stopped_run_side_by_side(make_queue, consumer, work_until, client):
    """Leases that expired in a Go program's buffer, and its nacks, do not count as deaths of a worker."""
    queue, slots = make_queue("go", bytes, layout=Layout.hdt3213()), 8
    go, now = GoProgram(client, queue.keys), client.time()[0]
    ids = [go.publish(due=now - 60) for _ in range(2 * slots)]
    go.promote(now)
    for _ in ids:
        go.claim(now - 60)
    for id in ids[slots:]:
        go.nack(id, now)
    all_slots = threading.Barrier(slots)
    consumer.handler(queue, lease=2)(lambda body: all_slots.wait(60) and None)

    work_until(Acked, count=2 * slots, concurrency=slots)

    assert queue.counts().totals.get("nacked", 0) == 0


def write_as_reliq_does(client, queue, id, *, header='"d":1,"r":0', count="0", place="ready", score=0.0, word=None):
    """Write a message with the rights of a publisher: an envelope, a retry count, a place, a state word."""
    client.set(queue.keys.msg(id), f"RELIQ/1 {{{header}}}\nevil".encode(), px=60_000)
    client.hset(queue.keys.retries_left, id, count)
    if word is not None:
        client.hset(queue.keys.lease, id, word)
    if place == "ready":
        client.lpush(queue.keys.ready, id)
    else:
        client.zadd(getattr(queue.keys, place), {id: score})


#: Numbers and retry counts that could end a thread, block the interpreter, or break the ack of another message.
EXTREMES = [
    ('"d":1' + "0" * 400 + ',"r":0', "0"),
    ('"d":-1' + "0" * 400 + ',"r":0', "0"),
    ('"d":1,"r":' + "9" * 4300, "-1"),
    ('"d":1,"r":1000000000000', "0"),
    ('"d":1,"r":3', "-1000000000000"),
    ('"d":1,"r":3', "-" + "9" * 4300),
    ('"d":1,"r":3', "9" * 4300),
    ('"d":9007199254740991,"r":1000,"e":9007199254740991,"w":9007199254740991', "0"),
    ('"d":1,"r":0,"e":-1,"w":-5', "0"),
    ('"d":1,"r":0', "no number"),
]


def test_impossible_numbers_in_foreign_messages_harm_no_neighbour(queue, consumer, start, recorder, client):
    """Each message reaches the observers and a failing handler in every slot."""
    worked = Counter()
    metrics = ProcessMetrics()
    consumer.observers.append(metrics)

    def handle(body, job):
        worked.update([job.id])
        if "evil" in body:
            raise ValueError("as it happens")

    consumer.handler(queue, backoff=wait_exponential(), lease=2)(handle)
    for number, (header, count) in enumerate(EXTREMES):
        write_as_reliq_does(client, queue, f"evil-{number}", header=header, count=count)
        queue.publish_many(OutgoingMessage(body="good", id=f"good-{number}-{one}") for one in range(20))

    engine = start(concurrency=2)

    eventually(lambda: client.hget(queue.keys.totals, "acked") == str(20 * len(EXTREMES)).encode(), "all are acked")
    good = {id: times for id, times in worked.items() if id.startswith("good")}
    assert set(good.values()) == {1}
    assert engine.dead_parts() == []
    [lag] = [row[-1] for family in metrics.families() for row in family.rows.values() if family.spec == names.LAG]
    assert 0 <= lag <= 20 * 7 * 86_400 * len(EXTREMES)


FAR_AHEAD = {
    "due far ahead": {"place": "pending", "score": 9.2e18},
    "due never": {"place": "pending", "score": float("inf")},
    "leased for ever": {"place": "unack", "score": float("inf")},
    "state word far ahead": {"word": "@99999999999999999"},
}


@pytest.mark.parametrize("kind", FAR_AHEAD)
def test_a_message_far_ahead_keeps_no_delayed_message_waiting(queue, acking, start, recorder, client, caplog, kind):
    write_as_reliq_does(client, queue, "evil", **FAR_AHEAD[kind])

    engine = start()
    for id in ("delayed", "once-more"):
        queue.publish("x", id=id, delay=0.1)
        eventually(lambda one=id: one in recorder.ids(Acked), f"{id} is acked")

    assert engine.dead_parts() == []
    assert "failed; retrying" not in caplog.text


def test_a_score_that_redis_cannot_answer_as_a_number_is_asked_for_rarely(queue, acking, caller, client):
    """Redis computes a wait from the score that arrives as a negative number."""
    write_as_reliq_does(client, queue, "evil", place="pending", score=float("inf"))
    write_as_reliq_does(client, queue, "due", place="pending", score=1.0)
    scheduler = Scheduler(caller, acking.handlers, lambda: None)
    scheduler.note(queue.keys, ClaimAnswer(0, NOTHING_DUE, 0, []), time.monotonic())

    assert scheduler.step() > 3000
    assert client.lrange(queue.keys.ready, 0, -1) == [b"due"]
