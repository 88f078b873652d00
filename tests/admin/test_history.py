"""The last minutes of queues: noted by workers in Redis, read by whoever looks."""

import time
from types import SimpleNamespace

import pytest

from reliq import Queue, minutes
from reliq.admin import Admin
from reliq.errors import ConfigurationError
from reliq.minutes import MINUTE_MS, MINUTES_LIMIT, Totals
from reliq.worker.janitor import Janitor
from reliq.worker.minute_notes import MinuteNotes
from reliq.worker.served import Served


@pytest.fixture
def now_ms():
    """When the test began, in unix ms."""
    return int(time.time() * 1000)


@pytest.fixture
def desk(url):
    """The operator's view of the test's Redis."""
    desk = Admin(url)
    yield desk
    desk.close()


@pytest.fixture
def note(client, queue, now_ms):
    """Write a note as a worker did some minutes ago."""

    def make(ago, *numbers, due_ms=None, **options):
        for command in minutes.note(queue.keys, Totals(now_ms - round(ago * MINUTE_MS), *numbers, due_ms)):
            client.execute_command(*command.command)

    return make


@pytest.fixture
def notes(queue):
    """The notes of one process."""
    return MinuteNotes(queue._clients.blocking(), lambda: [queue.keys])


def ran(client, name):
    return client.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0)


def test_a_history_has_the_numbers_of_each_minute_the_oldest_first(desk, queue, note, now_ms):
    queue.publish({})
    note(3, 10, 1, 0, 0, 0, 5)
    note(2, 16, 3, 1, 0, 0, 7, due_ms=now_ms - 2 * MINUTE_MS - 4000)
    note(1, 16, 9, 1, 2, 2, 0)

    told = desk.history("q")

    rows = [(one.published, one.acked, one.failed, one.dead, one.waiting, one.oldest) for one in told]
    assert rows == [(6, 2, 1, 0, 7, 4.0), (0, 6, 0, 2, 0, None)]
    assert [round(one.at - now_ms / 1000) for one in told] == [-120, -60]


def test_minutes_that_nobody_noted_are_told_as_their_mean_and_a_restored_redis_as_none(desk, queue, note):
    queue.publish({})
    note(12, 0, 0, 0, 0, 0, 0)
    note(2, 100, 50, 0, 0, 0, 0)
    note(1, 7, 7, 0, 0, 0, 0)

    assert [(one.published, one.acked) for one in desk.history("q")] == [(10, 5), (0, 0)]


def test_a_history_has_as_many_minutes_as_asked_and_none_of_an_earlier_round(desk, queue, note):
    queue.publish({})
    for ago in (300, 170, 30, 20, 10):
        note(ago, 0, 0, 0, 0, 0, 0)

    assert (len(desk.history("q", minutes=25)), len(desk.history("q", minutes=180))) == (1, 3)
    with pytest.raises(ConfigurationError, match="minutes must be"):
        desk.history("q", minutes=181)


@pytest.mark.parametrize(
    "text", ["", "x", "1 2 3", "1 2 3 4 5 6 7 8 9", "-1 0 0 0 0 0 0 -", "9" * 18 + " 0 0 0 0 0 0 -"]
)
def test_a_note_that_something_else_wrote_is_passed_over(desk, queue, client, note, text):
    queue.publish({})
    note(2, 0, 0, 0, 0, 0, 0)
    note(1, 60, 0, 0, 0, 0, 0)
    client.hset(queue.keys.minutes, 77, text)

    assert [one.published for one in desk.history("q")] == [60]


def test_a_key_of_another_type_leaves_a_queue_without_history_and_with_all_else(desk, queue, notes, client, now_ms):
    queue.publish({})
    client.set(queue.keys.minutes, "x")

    notes.step(now_ms)

    assert (desk.history("q"), desk.overview(["q"]).queues[0].rates) == ([], None)
    assert client.get(queue.keys.minutes) == b"x"


def test_the_histories_of_all_queues_come_in_one_round_trip(desk, queue, url, note, client):
    queue.publish({})
    Queue("other", url=url).publish({})
    note(2, 0, 0, 0, 0, 0, 0)
    note(1, 5, 0, 0, 0, 0, 0)

    client.config_resetstat()
    told = desk.histories(["q", "other"])

    assert ({name: len(rows) for name, rows in told.items()}, ran(client, "hmget")) == ({"q": 1, "other": 0}, 2)
    assert desk.histories().keys() == {"q", "other"}


def test_one_process_of_many_notes_a_minute_and_each_asks_once(queue, client, notes, now_ms):
    queue.publish({})
    other = MinuteNotes(queue._clients.blocking(), lambda: [queue.keys])

    for _ in range(3):
        notes.step(now_ms)
        other.step(now_ms)

    assert client.hlen(queue.keys.minutes) == 1
    assert ran(client, "hmget") == 4  # the notes twice, the totals of the one look, and whether the publish meets keys
    assert client.info("commandstats")["cmdstat_hset"]["calls"] == 3  # the publish, the registry, the note
    assert 0 < client.pttl(queue.keys.minutes) <= MINUTES_LIMIT * MINUTE_MS


def test_a_ring_has_as_many_fields_as_minutes_are_kept(queue, client, notes, now_ms):
    queue.publish({})
    for minute in range(0, 4 * MINUTES_LIMIT, 3):
        notes.step(now_ms + minute * MINUTE_MS)

    assert client.hlen(queue.keys.minutes) <= MINUTES_LIMIT


def test_a_note_says_what_waits_and_since_when(desk, queue, notes, client):
    now_ms = int(client.time()[0] * 1000)
    notes.step(now_ms - 61_000)
    queue.publish({}, id="m")
    queue.publish({}, delay=600)

    notes.step(now_ms + 30_000)

    [told] = client.hmget(queue.keys.minutes, (now_ms + 30_000) // MINUTE_MS % MINUTES_LIMIT)
    at_ms, arrived, acked, *_, waiting, due_ms = told.decode().split()
    assert (int(at_ms), arrived, acked, waiting) == (now_ms + 30_000, "2", "0", "1")
    assert now_ms - 5000 < int(due_ms) < now_ms + 60_000


def test_a_janitor_notes_the_minute_of_its_queues(queue, client, url):
    queue.publish({})
    janitor = Janitor(
        queue._clients.blocking(),
        Served([SimpleNamespace(queue=one) for one in (queue, Queue("other", url=url))]),
        print,
    )

    janitor.step()

    assert (client.hlen(queue.keys.minutes), client.exists("{reliq:other}:minutes")) == (1, 1)


def test_an_overview_has_rates_since_the_last_note_and_keeps_nothing_of_its_own(desk, queue, note):
    queue.publish_many([{}] * 61)
    assert desk.overview(["q"]).queues[0].rates is None
    note(2, 0, 0, 0, 0, 0, 0)
    note(1, 1, 0, 0, 0, 0, 0)
    note(0, 61, 0, 0, 0, 0, 0)

    first, second = (desk.overview(["q"]).queues[0].rates for _ in range(2))

    assert first.arrived == pytest.approx(1, rel=0.3)
    assert second.arrived == pytest.approx(first.arrived, rel=0.3)
    assert 60 <= first.over_seconds < 120


def test_a_queue_that_is_forgotten_has_no_history(desk, queue, client, notes, now_ms):
    queue.publish({}, id="m", delay=60)
    queue.cancel("m")
    notes.step(now_ms)
    client.hdel("reliq:queues", "q")

    desk.forget("q")

    assert client.keys("*q}:minutes") == []


def test_the_first_look_of_a_watcher_has_the_minutes_before_it(desk, queue, note):
    queue.publish({})
    note(3, 0, 0, 0, 0, 0, 0)
    note(2, 120, 60, 0, 0, 0, 0)
    note(1, 180, 180, 0, 0, 0, 0)
    watcher = desk.watch(["q"])

    first, second = watcher.look().trends["q"], watcher.look().trends["q"]

    assert (first.arrived, first.acked) == ((2, 1), (1, 2))
    assert (second.arrived[:2], len(second.arrived)) == ((2, 1), 3)
