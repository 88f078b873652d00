"""Fixtures of the script tests: a queue, functions that run calls, and views of the content of Redis."""

from itertools import count

import pytest
import redis
from held_clock import HOUR_MS, NOON
from sending import send

from reliq.keys import Keys
from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest


def pytest_configure(config):
    config.addinivalue_line("markers", "foreign_hands: a test that meddles with keys, so that the account cannot hold")


@pytest.fixture
def keys():
    return Keys("q")


@pytest.fixture
def reply(client):
    """Run a call; return Redis' raw reply."""
    return lambda call: send(client, call)


@pytest.fixture
def run(reply):
    return lambda call: call.read(reply(call))


@pytest.fixture
def limited(url, client):
    """Run a call as a user with access to these keys and to all commands except `command`."""

    def make(call, keys=("*",), without=None):
        rights = {"categories": ["+@all"], "commands": [f"-{without.lower()}"] if without else [], "keys": keys}
        client.acl_setuser("limited", enabled=True, nopass=True, reset=True, **rights)
        with redis.Redis.from_url(url, username="limited", password="any") as user:
            return user.execute_command(*call.command_in_full)

    yield make
    client.acl_deluser("limited")


@pytest.fixture
def publish(run, keys):
    """Publish messages with their ids as bodies, by the next call number of one lane."""
    numbers = count(1)

    def make(*ids, retries=3, ttl_ms=HOUR_MS, window_ms=None, clock=NOON, **options):
        rest = envelope_rest(retries, clock // 1000, window_ms)
        items = [(id, rest + id.encode()) for id in ids]
        options |= {"ttl_ms": ttl_ms, "retries": retries, "window_ms": window_ms, "clock": clock}
        return run(t.publish(keys, items, t.CallNumber("publisher", next(numbers)), **options))

    return make


@pytest.fixture
def claim_turn():
    numbers = count(1)
    return lambda: t.CallNumber("worker", next(numbers))


@pytest.fixture
def claim(run, keys, claim_turn):
    """Claim with the next call number of one lane; return the claimed messages."""

    def make(limit=100, lease_ms=30_000, clock=NOON, **options):
        return run(t.claim(keys, claim_turn(), limit=limit, lease_ms=lease_ms, clock=clock, **options)).claimed

    return make


@pytest.fixture
def where(client, keys):
    """Return the ids in every state; lists begin with the id that is claimed next."""

    def look():
        places = {
            "pending": client.zrange(keys.pending, 0, -1),
            "ready": client.lrange(keys.ready, 0, -1)[::-1],
            "unack": client.zrange(keys.unack, 0, -1),
            "retry": client.lrange(keys.retry, 0, -1)[::-1],
            "garbage": sorted(client.smembers(keys.garbage)),
            "dead": [letter[b"id"] for _, letter in client.xrange(keys.dead)],
        }
        return {place: [id.decode() for id in ids] for place, ids in places.items() if ids}

    return look


@pytest.fixture
def left(client, keys):
    """Return the retries left of a message as stored, or None."""
    return lambda name: (client.hget(keys.retries_left, name) or b"").decode() or None


@pytest.fixture
def due(client):
    """Return the time of a message in a sorted set, in ms, or None."""

    def look(key, id):
        score = client.zscore(key, id)
        return None if score is None else round(score * 1000)

    return look


@pytest.fixture
def total(run, keys):
    return lambda kind: run(t.counts(keys)).totals.get(kind, 0)


@pytest.fixture
def dump(client):
    """Return the DUMP of every Redis key."""

    def look():
        names = client.keys()
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.dump(name)
            return dict(zip([name.decode() for name in names], pipe.execute(), strict=True))

    return look


@pytest.fixture
def token(client, keys):
    """Pop the wake token as a blocked client does; return whether there was a token."""
    return lambda: client.rpop(keys.wake) is not None


@pytest.fixture(autouse=True)
def the_account_balances(request):
    """Published + redriven = all ends + alive after each test, except tests that play a foreign client."""
    foreign = request.node.get_closest_marker("foreign_hands")
    account = foreign is None and "run" in request.fixturenames
    run = account and request.getfixturevalue("run")
    keys = account and request.getfixturevalue("keys")
    yield
    if account:
        assert run(t.counts(keys)).missing == 0


@pytest.fixture
def bury(publish, claim, run, client, keys):
    """Publish messages and reject them: they become garbage."""

    def make(*ids, **options):
        publish(*ids, **options)
        for one in claim(limit=len(ids)):
            value = client.get(keys.msg(one.id))
            run(t.nack(keys, [(one, 0, "rejected 1 bad card", value)], clock=NOON))

    return make


@pytest.fixture
def collect(run, keys):
    """Turn garbage into dead letters."""

    def make(*ids, dead_letter_limit=10_000, letters_ms=10**12, clock=NOON):
        return run(t.collect(keys, ids, dead_letter_limit=dead_letter_limit, letters_ms=letters_ms, clock=clock))

    return make


@pytest.fixture
def die(bury, collect, client, keys):
    """Publish a message, reject and collect it; return the id of its dead letter."""

    def make(id, **options):
        bury(id, **options)
        assert collect(id) == ((id,), ())
        return client.xrevrange(keys.dead, count=1)[0][0].decode()

    return make


# ---- a queue with keys


@pytest.fixture
def publish_under(publish):
    """Publish messages under a key, or without one."""
    return lambda key, *ids, **options: publish(*ids, message_keys=[key] * len(ids), **options)


@pytest.fixture
def serve(claim):
    """Claim from a queue with keys; return the claimed messages by id."""
    return lambda limit=100, **options: {one.id: one for one in claim(limit, **options)}


@pytest.fixture
def limit(run, keys):
    """Set limits of the queue."""
    return lambda **fields: run(t.limit(keys, {name: str(value) for name, value in fields.items()}, clock=NOON))


@pytest.fixture
def ack(run, keys):
    return lambda *held, clock=NOON: run(t.ack(keys, [(one, None) for one in held], clock=clock))


@pytest.fixture
def nack(run, keys):
    """Nack messages; with `value` they become garbage."""
    return lambda *held, delay_ms=0, value=b"", note="failed 1 x", clock=NOON: run(
        t.nack(keys, [(one, delay_ms, note, value) for one in held], clock=clock)
    )


@pytest.fixture
def lines(client, keys):
    """Return the waiting ids of each key, in the order of their claims."""

    def look():
        prefix = keys.line("").encode()
        names = sorted(name for name in client.scan_iter() if name.startswith(prefix))
        return {
            name.removeprefix(prefix).decode(): [id.decode() for id in client.lrange(name, 0, -1)[::-1]]
            for name in names
        }

    return look
