"""Workers record the recent history of each queue in Redis; commands and pages read it."""

import time
from types import SimpleNamespace

import pytest
from transition import PATIENT_SECONDS

from reliq import Queue
from reliq.errors import ConfigurationError
from reliq.keys import Keys
from reliq.redis import commands
from reliq.redis.commands import MINUTE_MS, MINUTES_LIMIT, Totals
from reliq.redis.shards import ShardMap
from reliq.worker.claims import ServedQueues
from reliq.worker.upkeep import HistoryRollup, Janitor


@pytest.fixture
def now_ms():
    """Return the start of the test in unix ms."""
    return int(time.time() * 1000)


@pytest.fixture
def note(client, queue, now_ms):
    """Write the record of a worker from some minutes ago."""

    def make(ago, *numbers, due_ms=None, **options):
        for command in commands.note(queue.keys, Totals(now_ms - round(ago * MINUTE_MS), *numbers, due_ms)):
            client.execute_command(*command.command)

    return make


@pytest.fixture
def notes(queue):
    """Return the records of one process."""
    return HistoryRollup(queue._clients.blocking(PATIENT_SECONDS), lambda: [queue.keys])


def ran(client, name):
    return client.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0)


def test_history_has_the_numbers_of_each_minute_oldest_first(admin, queue, note, now_ms):
    queue.publish({})
    note(3, 10, 1, 0, 0, 0, 5)
    note(2, 16, 3, 1, 0, 0, 7, due_ms=now_ms - 2 * MINUTE_MS - 4000)
    note(1, 16, 9, 1, 2, 2, 0)

    told = admin.history("q")

    rows = [(one.published, one.acked, one.failed, one.dead, one.waiting, one.oldest) for one in told]
    assert rows == [(6, 2, 1, 0, 7, 4.0), (0, 6, 0, 2, 0, None)]
    assert [round(one.at - now_ms / 1000) for one in told] == [-120, -60]


def test_history_fills_gaps_with_the_mean_and_obeys_its_length(admin, queue, note):
    queue.publish({})
    note(12, 0, 0, 0, 0, 0, 0)
    note(2, 100, 50, 0, 0, 0, 0)
    note(1, 7, 7, 0, 0, 0, 0)  # written by a Redis restored from a backup
    assert [(one.published, one.acked) for one in admin.history("q")] == [(10, 5), (0, 0)]

    for ago in (300, 170, 30, 20, 10):
        note(ago, 0, 0, 0, 0, 0, 0)
    assert len(admin.history("q", minutes=180)) == 6
    with pytest.raises(ConfigurationError, match="minutes must be"):
        admin.history("q", minutes=181)


def test_history_skips_notes_that_something_else_wrote(admin, queue, client, note, notes, now_ms):
    queue.publish({})
    note(2, 0, 0, 0, 0, 0, 0)
    note(1, 60, 0, 0, 0, 0, 0)
    half_an_hour_ago = (now_ms // MINUTE_MS - 30) % MINUTES_LIMIT
    for text in ("", "1 2 3", "1 2 3 4 5 6 7 8 9", "-1 0 0 0 0 0 0 -", "9" * 18 + " 0 0 0 0 0 0 -"):
        client.hset(queue.keys.minutes, half_an_hour_ago, text)
        assert [one.published for one in admin.history("q")] == [60]

    client.delete(queue.keys.minutes)
    client.set(queue.keys.minutes, "x")
    notes.step(now_ms)
    assert (admin.history("q"), admin.queues(["q"]).queues[0].rates) == ([], None)
    assert client.get(queue.keys.minutes) == b"x"


def test_histories_of_all_queues_are_read_in_one_round_trip(admin, queue, url, note, client):
    queue.publish({})
    Queue("other", url=url).publish({})
    note(2, 0, 0, 0, 0, 0, 0)
    note(1, 5, 0, 0, 0, 0, 0)

    client.config_resetstat()
    told = admin.histories(["q", "other"])

    assert ({name: len(rows) for name, rows in told.items()}, ran(client, "hmget")) == ({"q": 1, "other": 0}, 2)
    assert admin.histories().keys() == {"q", "other"}


def test_one_process_of_many_notes_a_minute(queue, client, notes, now_ms):
    queue.publish({})
    other = HistoryRollup(queue._clients.blocking(PATIENT_SECONDS), lambda: [queue.keys])

    for _ in range(3):
        notes.step(now_ms)
        other.step(now_ms)

    assert client.hlen(queue.keys.minutes) == 1
    assert ran(client, "hmget") == 3  # the records twice, the totals once
    assert client.info("commandstats")["cmdstat_hset"]["calls"] == 3  # the publish, the registry, the record
    assert 0 < client.pttl(queue.keys.minutes) <= MINUTES_LIMIT * MINUTE_MS
    for minute in range(0, 4 * MINUTES_LIMIT, 3):
        notes.step(now_ms + minute * MINUTE_MS)
    assert client.hlen(queue.keys.minutes) <= MINUTES_LIMIT


def test_note_has_the_backlog_and_its_oldest_due_time(admin, queue, notes, client):
    now_ms = int(client.time()[0] * 1000)
    notes.step(now_ms - 61_000)
    queue.publish({}, id="m")
    queue.publish({}, delay=600)

    notes.step(now_ms + 30_000)

    [told] = client.hmget(queue.keys.minutes, (now_ms + 30_000) // MINUTE_MS % MINUTES_LIMIT)
    at_ms, arrived, acked, *_, waiting, due_ms = told.decode().split()
    assert (int(at_ms), arrived, acked, waiting) == (now_ms + 30_000, "2", "0", "1")
    assert now_ms - 5000 < int(due_ms) < now_ms + 60_000


def test_janitor_notes_the_minute_of_its_queues(queue, client, url):
    queue.publish({})
    queues = [SimpleNamespace(queue=one) for one in (queue, Queue("other", url=url))]

    Janitor(queue._clients.blocking(PATIENT_SECONDS), ServedQueues(queues), print).step()

    assert (client.hlen(queue.keys.minutes), client.exists("{reliq:other}:minutes")) == (1, 1)


def test_each_shard_has_a_note_of_its_own_messages(queue, client, now_ms):
    shards = [Keys("q", shard=number) for number in range(3)]
    client.set(shards[0].map, ShardMap(1, 3, 3).text)
    queue.publish_many([{}] * 12)
    notes = HistoryRollup(queue._clients.blocking(PATIENT_SECONDS), lambda: shards)

    for minute in range(2):
        notes.step(now_ms + minute * MINUTE_MS)

    rows = [client.hvals(keys.minutes) for keys in shards]
    assert [len(one) for one in rows] == [2, 2, 2]
    assert [int(one[-1].split()[1]) for one in rows] == [client.llen(keys.ready) for keys in shards]


def test_overview_has_the_rates_since_the_last_note(admin, queue, note):
    queue.publish_many([{}] * 61)
    assert admin.queues(["q"]).queues[0].rates is None
    note(2, 0, 0, 0, 0, 0, 0)
    note(1, 1, 0, 0, 0, 0, 0)
    note(0, 61, 0, 0, 0, 0, 0)

    first, second = (admin.queues(["q"]).queues[0].rates for _ in range(2))

    assert first.arrived == pytest.approx(1, rel=0.3)
    assert second.arrived == pytest.approx(first.arrived, rel=0.3)
    assert 60 <= first.over_seconds < 120


def test_first_look_of_a_watch_has_the_rates_of_the_last_minute(admin, queue, note):
    queue.publish_many([{}] * 60)
    note(1, 0, 0, 0, 0, 0, 0)
    watcher = admin.watch(["q"])

    first, second = (watcher.look().overview.queues[0].rates for _ in range(2))

    assert first.arrived == pytest.approx(1, rel=0.3)
    assert (second.arrived, second.over_seconds < 60) == (0, True)
