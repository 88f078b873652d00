"""A queue shrinks: all messages of the removed shards move to the others, also after kills and with another shrink."""

import time
from collections import Counter

import pytest
from cutting import cut_after
from transition import PATIENT_SECONDS

from reliq import Admin, OutgoingMessage, Queue
from reliq.keys import Keys, home
from reliq.lua import transitions as t
from reliq.lua.transitions import CallNumber
from reliq.redis.session import Session
from reliq.redis.shards import ShardMap

FOUR = ShardMap(1, 4, 4, "steady")
NUMBER = 24
#: Ids that belong to shard 3 of four, and to shard 1 of two.
OF_SHARD_3 = [id for number in range(99) if home(id := f"a-{number}", 4) == 3][:4]


class KilledError(BaseException):
    """The process has been killed."""


@pytest.fixture
def admin(url):
    return Admin(url)


@pytest.fixture
def queue(url, client):
    client.set(Keys("q").map, FOUR.text)
    return Queue("q", str, url=url, retries=5)


def moves_of(queue):
    """Return the raw transitions of each shard."""
    return queue._clients.blocking(PATIENT_SECONDS).run


def fill(queue, client):
    """Fill all states of four shards; return how often each id will be delivered, and the dead letters."""
    run = moves_of(queue)
    queue.publish_many([OutgoingMessage(body=f"later {n}", id=f"later-{n}", delay=3600, ttl=60) for n in range(NUMBER)])
    queue.publish_many([OutgoingMessage(body="generated", delay=3600) for _ in range(8)], chunk=1)
    queue.publish_many([OutgoingMessage(body=f"x {n}", id=f"x-{n}") for n in range(NUMBER)])
    for shard in range(4):
        keys = Keys("q", shard=shard)
        held = run(t.claim(keys, CallNumber("w", 1), limit=500, lease_ms=1)).claimed
        nacked, dead, suspect = held[::3], held[1::3], held[2::3]
        run(t.nack(keys, [(one, 3_600_000, "failed 1 why", b"") for one in nacked]))
        values = [client.get(keys.msg(one.id)) for one in dead]
        run(t.nack(keys, [(one, 0, "rejected 1 bad", v) for one, v in zip(dead, values, strict=True)]))
        run(t.collect(keys, [one.id for one in dead], dead_letter_limit=100, letters_ms=10**12))
        assert len(run(t.reclaim(keys, clock=(time.time_ns() // 1000) + 10**6)).overdue) == len(suspect)
    queue.publish_many([OutgoingMessage(body=f"y {n}", id=f"y-{n}") for n in range(NUMBER)])
    queue.publish_many([OutgoingMessage(body="z", id=f"z-{n}") for n in range(4)])
    for n in range(4):
        queue.cancel(f"z-{n}")


def held_by(client, number=4):
    """Return the content of the shards: id -> body, count, state word, failures and window; and the dead letters."""
    found, letters = Counter(), Counter()
    for shard in range(number):
        keys = Keys("q", shard=shard)
        for id, left in client.hgetall(keys.retries_left).items():
            word = client.hget(keys.lease, id)
            if word != b"!":
                text = id.decode()
                due = client.zscore(keys.pending, id) or client.zscore(keys.unack, id)
                rest = client.hget(keys.errors, id), client.hget(keys.windows, id), client.get(keys.msg(text))
                found[text, left, word, due, *rest] += 1
        for _, letter in client.xrange(keys.dead):
            letters[letter[b"id"], letter[b"value"], letter[b"note"]] += 1
    return found, letters


def is_in_two(client):
    """Nothing is left in the shards 2 and 3."""
    assert client.get(Keys("q").map) == ShardMap(2, 2, 2, "steady", most=4).text
    for shard in (2, 3):
        keys = Keys("q", shard=shard)
        places = (keys.pending, keys.ready, keys.retry, keys.unack, keys.retries_left, keys.lease)
        assert not client.exists(*places, keys.garbage, keys.errors)
        assert client.xlen(keys.dead) == 0
        assert client.hlen(keys.leaving) <= 1
    for shard in (0, 1):
        assert all(home(id.decode(), 2) == shard for id in client.hgetall(Keys("q", shard=shard).retries_left))


def test_messages_and_dead_letters_of_shards_that_go_are_in_the_others_as_they_were(admin, queue, client):
    fill(queue, client)
    before, deaths = held_by(client), {one.id: one.when for one in admin.messages("q", "dead")}
    admin.resize("q", 2)

    assert not admin.finish_resize("q")

    assert held_by(client) == before
    assert sum(before[0].values()) == NUMBER + 8 + 2 * NUMBER // 3 + NUMBER
    is_in_two(client)
    assert admin.account("q").missing == 0
    assert not admin.check("q").faults
    assert {one.id: one.when for one in admin.messages("q", "dead")} == deaths
    assert admin.redrive("q").done == len(deaths)


def test_a_message_in_flight_keeps_a_shrink_from_being_finished_until_its_end(admin, queue, client, url):
    id = OF_SHARD_3[0]
    queue.publish("x", id=id, dedup=600)
    keys, run = Keys("q", shard=3), moves_of(queue)
    [held] = run(t.claim(keys, CallNumber("w", 1), limit=1, lease_ms=60_000)).claimed
    admin.resize("q", 2)

    assert admin.finish_resize("q") == 1
    run(t.ack(keys, [(held, 600_000)]))

    assert not admin.finish_resize("q")
    assert not Queue("q", str, url=url).publish("x", id=id)


def test_a_message_cancelled_on_its_way_is_cancelled_where_it_arrives(admin, queue, client, monkeypatch):
    id = OF_SHARD_3[0]
    queue.publish("x", id=id, delay=3600)
    admin.resize("q", 2)
    arrive, told = t.arrive, []

    def cancelled_meanwhile(*args, **options):
        told.append(queue.cancel(id))
        return arrive(*args, **options)

    monkeypatch.setattr(t, "arrive", cancelled_meanwhile)
    assert not admin.finish_resize("q")

    assert told == ["running"]
    assert (queue.counts().alive, queue.counts().missing) == (0, 0)


def test_a_message_whose_id_lives_where_it_belongs_stays_where_it_was(admin, queue, client):
    id = OF_SHARD_3[0]
    queue.publish("x", id=id, delay=3600)
    admin.resize("q", 2)
    there, options = Keys("q", shard=1), {"ttl_ms": 10**6, "retries": 1, "window_ms": 1, "fence": "2 2 1"}
    # A publisher of an earlier version does not check the fence.
    moves_of(queue)(t.publish(there, [(id, b"other")], CallNumber("p", 1), **options))
    before = held_by(client)

    assert admin.finish_resize("q") == 1

    assert held_by(client) == before


def test_a_message_without_a_body_ends_as_expired(admin, queue, client):
    id = OF_SHARD_3[0]
    queue.publish("x", id=id, delay=3600)
    keys = Keys("q", shard=3)
    client.delete(keys.msg(id))
    admin.resize("q", 2)

    assert admin.finish_resize("q") == 1
    moves_of(queue)(t.collect(keys, [id], dead_letter_limit=9, letters_ms=10**12))

    assert not admin.finish_resize("q")
    assert client.hget(keys.totals, "expired") == b"1"


class Steps:
    """Counts the Redis calls of operators, and runs a function before one of them."""

    def __init__(self, monkeypatch):
        self.made, self._at, self._do = 0, -1, None
        for name in ("run", "run_all"):
            monkeypatch.setattr(Session, name, self._counted(getattr(Session, name)))

    def before(self, at, do):
        self.made, self._at, self._do = 0, at, do

    def _counted(self, make):
        def counted(session, *args):
            self.made += 1
            if self.made == self._at:
                self._do()
            return make(session, *args)

        return counted


def small(queue, client):
    """Put one message or dead letter of each kind into a shard that will be removed."""
    client.flushdb()
    client.set(Keys("q").map, FOUR.text)
    ids = OF_SHARD_3
    run, keys = moves_of(queue), Keys("q", shard=3)
    queue.publish("dead", id=ids[0])
    [held] = run(t.claim(keys, CallNumber("w", 1), limit=1, lease_ms=60_000)).claimed
    run(t.nack(keys, [(held, 0, "rejected 1 bad", client.get(keys.msg(ids[0])))]))
    run(t.collect(keys, [ids[0]], dead_letter_limit=100, letters_ms=10**12))
    queue.publish("nacked", id=ids[1])
    [held] = run(t.claim(keys, CallNumber("w", 2), limit=1, lease_ms=60_000)).claimed
    run(t.nack(keys, [(held, 3_600_000, "failed 1 why", b"")]))
    queue.publish("later", id=ids[2], delay=3600)
    queue.publish("ready", id=ids[3])
    return held_by(client)


def test_a_shrink_killed_before_any_of_its_calls_goes_on_and_loses_nothing(admin, queue, client, monkeypatch):
    def die():
        raise KilledError

    steps, killed = Steps(monkeypatch), 0
    while True:
        before = small(queue, client)
        steps.before(killed + 1, die)
        try:
            admin.resize("q", 2)
            admin.finish_resize("q")
            break
        except KilledError:
            killed += 1
        steps.before(-1, None)
        admin.resize("q", 2)
        assert not admin.finish_resize("q")
        assert held_by(client) == before
        is_in_two(client)
        assert not admin.check("q").faults
    assert killed > 40


def test_a_second_shrink_between_any_two_calls_of_the_first_doubles_nothing(admin, queue, client, monkeypatch, url):
    """A complete second shrink runs between two calls of the first; all moved messages are then processed."""
    steps = Steps(monkeypatch)
    small(queue, client)
    admin.resize("q", 2)
    steps.before(-1, None)
    admin.finish_resize("q")
    for at in range(1, steps.made + 1):
        small(queue, client)
        admin.resize("q", 2)
        done = []

        def whole():
            steps.before(-1, None)
            Admin(url).finish_resize("q")
            is_in_two(client)
            done.extend(held_by(client)[0])  # noqa: B023
            for shard in (0, 1):
                keys = Keys("q", shard=shard)
                places = (keys.pending, keys.ready, keys.unack, keys.retries_left, keys.lease, keys.errors, keys.dead)
                client.delete(*places, *client.scan_iter(f"{keys.msg('')}*"))

        steps.before(at, whole)
        try:
            admin.finish_resize("q")
        except ValueError as error:
            assert "somebody else" in str(error)
        assert len(done) in (0, 3)
        if done:
            found, letters = held_by(client)
            assert not found, at
            assert not letters, at


@pytest.mark.parametrize("script", ["depart", "arrive", "leave"])
def test_a_script_that_is_cut_off_between_two_writes_loses_nothing(admin, queue, client, monkeypatch, script):
    build, writes = getattr(t, script), 0
    is_whole = False
    while not is_whole:
        before, writes = small(queue, client), writes + 1
        admin.resize("q", 2)

        def cut(*args, writes=writes, **options):
            nonlocal is_whole
            call = build(*args, **options)
            monkeypatch.setattr(t, script, build)
            is_whole = not cut_after(client, call, writes)
            raise KilledError

        monkeypatch.setattr(t, script, cut)
        with pytest.raises(KilledError):
            admin.finish_resize("q")
        admin.check("q", repair=True)
        admin.finish_resize("q")
        admin.check("q", repair=True)
        found, letters = held_by(client)
        assert {row[0] for row in before[0]} <= {row[0] for row in found}, writes
        assert set(before[1]) <= set(letters), writes
        assert all(count <= 2 for count in Counter(row[0] for row in found).values())
    assert writes > 3
