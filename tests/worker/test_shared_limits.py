"""Limits shared by queues: all windows keep rate and burst, over queues and processes; idle queues book nothing."""

import re
import signal
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from overheard import Overheard
from waiting import eventually
from worker_process import AT_ONCE, Worker, environment_for

from reliq import ConfigurationError, Layout, Limit, Queue
from reliq.events import Acked, Released
from reliq.keys import limit_key
from reliq.lua import script
from reliq.lua.transitions import Booking, ClaimAnswer, book
from reliq.worker.bookings import VOID_SECONDS, Bookings
from reliq.worker.claims import Capacity, QueueClaims

API = Limit("api", rate="20/s", burst=3)
JOBS = """
import os, redis
from reliq import Consumer, Limit, Queue

API = Limit("api", rate="20/s", burst=3)
record, consumer = redis.Redis.from_url(os.environ["RELIQ_URL"]), Consumer()

def serve(queue):
    @consumer.handler(queue, lease=60)
    def handle(body, job):
        claimed = record.zscore(queue.keys.unack, job.id) - 60
        record.rpush("starts", f"{claimed:.3f} {job.id}")

for name in ("chats", "docs"):
    serve(Queue(name, limits=[API]))
"""


def excess(times, limit):
    """Return by how many starts the fullest window is above burst + 20/s x window; times are unix seconds."""
    level, before, most = 0.0, 0.0, 0.0
    for at in sorted(times):
        level = max(0.0, level - (at - before) * 20) + 1
        before, most = at, max(most, level)
    return most - limit.starts


@contextmanager
def overhearing(url):
    """Yield a function that returns the bookings since it began, and the claims."""
    with closing(Overheard(url)) as overheard:

        def heard():
            lines = [line["command"] for line in overheard.all() if line["client_type"] != "lua"]
            return [[one for one in lines if script(name).sha in one] for name in ("book", "claim")]

        yield heard


def test_four_processes_with_two_queues_keep_every_window_through_a_kill(url, client, tmp_path):
    """One process is killed and replaced; starts are claims, by the clock of Redis."""
    tmp_path.joinpath("jobs.py").write_text(JOBS)
    queues, ids = [Queue(name, url=url, limits=[API]) for name in ("chats", "docs")], set()
    for queue in queues:
        ids |= {queue.publish({}).id for _ in range(70)}

    with closing(
        Worker("jobs:consumer", tmp_path, environment_for(tmp_path, url), "--processes", "4", change=AT_ONCE)
    ) as worker:
        eventually(lambda: client.llen("starts") > 40, "work goes on")
        worker.children()[0].kill()
        eventually(lambda: sum(queue.counts().alive for queue in queues) == 0, "all messages are handled")
        assert worker.stop(signal.SIGTERM) == 0

    rows = [row.decode().split() for row in client.lrange("starts", 0, -1)]
    assert {id for _, id in rows} == ids
    starts = [float(at) for at, _ in rows]
    assert excess(starts, API) <= 20 * VOID_SECONDS + 1  # on a stalled machine; usually a claim is at most 0.1 s late


def test_idle_and_paused_queues_book_no_starts(make_queue, workers, url):
    idle, paused = make_queue("idle", limits=[API]), make_queue("paused", limits=[API])
    paused.publish_many(["x"] * 9)
    paused.pause()
    workers(2, idle, paused)

    with overhearing(url) as heard:
        eventually(lambda: len(heard()[1]) >= 8, "each process polls both queues twice")
        assert heard()[0] == []


def test_a_claim_that_finds_nothing_is_followed_by_a_poll(make_queue, consumer):
    """The queue may have been paused since the booking."""
    queue, room = make_queue(limits=[API]), Capacity(slots=8, ahead=9)
    consumer.handler(queue)(lambda body: None)
    claims = QueueClaims(consumer.handlers[0])

    def ask(answer=None):
        call = claims.claim(room, "me")
        if isinstance(answer, Booking):
            claims.bookings.answered(answer, time.monotonic())
        elif answer:
            claims.answered(answer)
        return call.script.name, call.args[1 if call.script.name == "book" else 4]

    assert ask(ClaimAnswer(-1, -1, 5, [])) == ("claim", 0)
    assert ask(Booking(0, 3, 77, 0, "")) == ("book", 5)
    assert ask(ClaimAnswer(-1, -1, 5, [])) == ("claim", 3)
    assert [call.args[1] for call in claims.bookings.unused()] == [-3]
    assert ask(ClaimAnswer(-1, -1, 0, [])) == ("claim", 0)


def test_queues_without_shared_limits_book_no_starts(make_queue, workers, recorder, url):
    queue = make_queue(rate="1000/s")
    queue.publish_many(["x"] * 99)
    with overhearing(url) as heard:
        workers(2, queue)
        recorder.wait_for(Acked, 99)
        assert heard()[0] == []


def test_under_load_a_start_takes_at_most_one_and_a_half_bookings(make_queue, workers, recorder, url):
    limit = Limit("api", rate="100/s", burst=5)
    queues = [make_queue(name, limits=[limit]) for name in ("chats", "docs")]
    for queue in queues:
        queue.publish_many(["x"] * 100)

    with overhearing(url) as heard:
        workers(3, *queues)
        recorder.wait_for(Acked, 200)
        assert len(heard()[0]) <= 300


def test_a_queue_that_waits_for_its_start_keeps_no_other_from_work(make_queue, workers, recorder, url):
    slow, quick = make_queue("slow", limits=[Limit("slow", rate="1/h")]), make_queue("quick")
    slow.publish_many(["x"] * 50)
    quick.publish_many(["x"] * 500)

    workers(1, slow, quick)

    recorder.wait_for(Acked, 500, queue="quick")
    recorder.wait_for(Acked, 1, queue="slow")
    assert len(recorder.ids(Acked)) == 501


def test_a_stop_ends_the_wait_and_gives_the_start_back(make_queue, consumer, start, recorder, client):
    limit = Limit("api", rate="15/m")
    queue = make_queue(limits=[limit])
    consumer.handler(queue)(lambda body: None)
    queue.publish("x")
    start()
    recorder.wait_for(Acked)
    first = int(client.hget(limit_key("api"), "full"))
    queue.publish_many(["x"] * 2)
    eventually(lambda: int(client.hget(limit_key("api"), "full")) > first, "the next start is booked")

    consumer.stop(grace=0)

    assert int(client.hget(limit_key("api"), "full")) == first
    assert queue.counts().ready == 2


def test_a_message_under_several_limits_starts_though_one_is_booked_again(make_queue, workers, recorder, client):
    """The second limit is busy, so the start that was booked at the first is given back and booked for later."""
    limits = [Limit("wide", rate="10/s"), Limit("narrow", rate="1/s", burst=2)]
    for _ in range(3):
        client.execute_command(*book(limits[1], 1).command_in_full)
    queue = make_queue(limits=limits)
    workers(2, queue)
    queue.publish("x")

    recorder.wait_for(Acked)
    assert int(client.hget(limit_key("narrow"), "full")) < time.time() * 1e6 + 3e6  # no other start was booked there


@pytest.mark.parametrize("kind", ["plain", "own rate", "shards"])
def test_several_limits_hold_together_in_any_queue(kind, make_queue, workers, recorder, client, spread):
    limits = [Limit("wide", rate="50/s", burst=5), Limit("narrow", rate="20/s", burst=2)]
    queue = make_queue(limits=limits, **({"rate": "1000/s"} if kind == "own rate" else {}))
    if kind == "shards":
        spread(queue, 4)
    queue.publish_many(["x"] * 20)

    workers(2, queue)

    recorder.wait_for(Acked, 20)
    assert {client.hget(limit_key(limit.name), "rate") for limit in limits} == {b"50/s", b"20/s"}


def test_a_batch_takes_as_many_messages_as_starts_are_booked(make_queue, consumer, start, recorder):
    queue, sizes = make_queue(limits=[Limit("api", rate="1/h", burst=7)]), []
    consumer.handler(queue, batch=5, linger=0.01)(lambda bodies: sizes.append(len(bodies)))
    queue.publish_many(["x"] * 20)

    start()

    recorder.wait_for(Acked, 7)
    assert sum(sizes) == 7


def test_messages_of_a_late_claim_are_released_and_do_not_start(make_queue, workers, recorder, monkeypatch):
    monkeypatch.setattr("reliq.worker.fetcher.VOID_SECONDS", -1)
    queue = make_queue(limits=[Limit("api", rate="1000/s", burst=9)])
    queue.publish("x")

    workers(1, queue)

    recorder.wait_for(Released)
    assert recorder.ids(Acked) == []
    monkeypatch.undo()
    recorder.wait_for(Acked)


def test_a_booking_that_is_late_is_given_back(monkeypatch):
    """Late is more than 0.1 s after the booked time, or after a slow answer 25 ms and its time."""
    now = [100.0]
    monkeypatch.setattr("reliq.worker.bookings.time", SimpleNamespace(monotonic=lambda: now[0]))
    bookings = Bookings([API], "q#0")

    def starts_at(moment, sent_at):
        now[0] = 100.0
        bookings.book(3, 3)
        bookings.answered(Booking(2_000_000, 2, 77, 0, ""), sent_at)
        now[0] = moment
        return bookings.starts()

    assert (bookings.starts(), starts_at(102.09, 100.0), bookings.unused()) == (0, 2, [])
    bookings.end(2)
    assert starts_at(102.11, 100.0) == 0
    assert [call.args[1:4] for call in bookings.unused()] == [(-2, 0, 77)]
    assert (starts_at(102.32, 99.7), bookings.end(1), starts_at(102.33, 99.7)) == (2, None, 0)
    assert [call.args[1] for call in bookings.unused()] == [-1, -2]


def test_limits_of_a_slow_redis_can_be_booked_together(monkeypatch):
    """Each of three bookings takes 150 ms."""
    now = [100.0]
    monkeypatch.setattr("reliq.worker.bookings.time", SimpleNamespace(monotonic=lambda: now[0]))
    bookings = Bookings([API, Limit("wide", rate="9/s"), Limit("narrow", rate="5/s")], "q#0")
    for _ in range(3):
        bookings.book(1, 1)
        now[0] += 0.15
        bookings.answered(Booking(0, 1, 77, 0, ""), now[0] - 0.15)

    assert (bookings.starts(), bookings.unused()) == (1, [])


def test_a_limit_that_redis_refuses_starts_nothing_until_it_answers(make_queue, workers, recorder, client, caplog):
    queue = make_queue(limits=[API])
    workers(1, queue)
    client.set(limit_key("api"), "of another program")
    queue.publish("x")

    eventually(lambda: "queue q: the fetcher failed (attempt 2)" in caplog.text, "the log reports it")
    assert limit_key("api") in caplog.text
    assert recorder.ids(Acked) == []
    client.delete(limit_key("api"))
    recorder.wait_for(Acked)


def test_a_worker_with_another_declaration_warns_once_and_decides(make_queue, workers, client, caplog):
    workers(1, make_queue(limits=[API]), make_queue("other", limits=[API]))
    assert "limit api" not in caplog.text

    workers(1, make_queue(limits=[Limit("api", rate="5/m")]))

    assert caplog.text.count("limit api: rate=5/m, burst=1 replace rate=20/s, burst=3 in Redis") == 1
    assert client.hget(limit_key("api"), "rate") == b"5/m"


def test_wrong_limits_are_refused_by_name(make_queue):
    wrong = [
        (lambda: Limit("a b", rate="1/s"), "limit's name must be 1 to 128 of A-Z a-z 0-9 _ . -, not 'a b'"),
        (lambda: Limit("a", rate=5), "limit 'a': rate must be a number of messages for each second, minute or hour"),
        (lambda: Limit("a", rate=[]), "limit 'a': rate must be given, such as '500/m', not []"),
        (lambda: Limit("a", rate=["9/m", "8/m"]), "limit 'a': rate takes one rate of starts and one rate by cost"),
        (lambda: Limit("a", rate="5/s", burst=0), "burst must be 1 to 1000000, not 0"),
        (lambda: make_queue(limits=API), "limits must be a list such as"),
        (lambda: make_queue(limits=["api"]), "limits must be a list such as"),
        (lambda: make_queue(limits=[API, API]), "limits must have different names, not api, api"),
        (lambda: make_queue(limits=[API], layout=Layout.hdt3213()), "hdt3213 layout cannot have limits"),
    ]
    for make, message in wrong:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            make()


def test_receive_refuses_a_queue_with_shared_limits(make_queue):
    with pytest.raises(ConfigurationError, match="queue 'q' has shared limits, which `receive` does not enforce"):
        make_queue(limits=[API]).receive().__enter__()
