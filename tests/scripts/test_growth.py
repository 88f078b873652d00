"""
Every order of steps while a queue grows: each chosen id is accepted once.

The producers run the code of the package (`Sender`); each step is one call in a real Redis. Any step
may be the last of its actor: the next step of a paused or killed producer comes late or never. A state is the
content of Redis and the position of each actor. From each state the test takes the next step of each actor.
"""

import re
import types
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from held_clock import NOON

from reliq.admin import calls
from reliq.keys import Keys, home
from reliq.lua import transitions as t
from reliq.publish import CallTerms, PreparedMessage, Sender
from reliq.redis.commands import retries_left
from reliq.redis.connection import BLOCKING
from reliq.redis.shards import UNSHARDED, ShardMap, shard_map
from reliq.settings import Durability
from reliq.wire_format import envelope_rest

GROWN = ShardMap(1, 2, 1, "growing")
SHRUNK_FROM, SHRUNK = ShardMap(1, 2, 2, "steady"), ShardMap(2, 1, 2, "shrinking")
WINDOW_SECONDS = 600
#: An id that belongs to shard 1 of two.
ID = next(id for number in count() if home(id := f"order-{number}", 2) == 1)
TERMS = CallTerms(None, 0, 3_600_000, 3, WINDOW_SECONDS * 1000, False)
#: All producers publish the same body, so that equal states have equal bytes.
ORDER = PreparedMessage(ID, envelope_rest(3, 1, WINDOW_SECONDS * 1000) + b"{}", TERMS)


class Known:
    """A producer's view of the shards; each has its own `map`, as each process has."""

    def __init__(self, map):
        self.map, self.first = map, Keys("q")

    def keys(self, shard):
        return self.first.of_shard(shard)

    def turn(self):
        return 0

    async def refresh(self, driver):
        """The map of a new producer is as good as read."""

    async def read(self, driver, *, for_seconds):
        self.map = await step(shard_map(self.first))


class Producer(Sender):
    """A sender that may be killed: Python then closes its coroutine, which is no failed call."""

    def _failed(self, *_call):
        return False


@types.coroutine
def step(call):
    return (yield call)


def producer(name, map, accepted, *, asks=True, fenced=True):
    """Publish the id once, starting with the producer's current map; each yield is one call to Redis."""
    known, receipts = Known(map), {}

    async def run(call, **_options):
        if call.script.name == "ask" and not asks:
            return ["free"]
        return await step(clocked(call if fenced or call.script.name == "ask" else unfenced(call)))

    client = SimpleNamespace(run=run)
    clients = SimpleNamespace(driven=lambda driver: client, blocking=lambda: SimpleNamespace(driven=client))
    number = lambda messages: t.CallNumber(name, known.map.epoch + 1)  # noqa: E731
    lanes = SimpleNamespace(parked=(), take=number, give_back=lambda number: None)
    sender = Producer(None, known, lanes, clients)
    sending = sender._by_shard(BLOCKING, [ORDER], receipts, Durability.NONE, is_stale=False)
    yield from sending.__await__()
    accepted.append(receipts[0].status)
    assert accepted[-1] in ("published", "duplicate")


def resharder(before, after):
    """Write the next map, raise the epoch of each shard, and finish when the old home is empty."""
    yield t.remap(Keys("q"), before.text if before.epoch else b"", after.text, clock=NOON)
    for shard in range(after.served):
        yield t.ask(Keys("q", shard=shard), [], fence=after.fence, closing=shard >= after.n, clock=NOON)
    old = Keys("q", shard=home(ID, before.n))
    if (yield retries_left(old, [ID])) == [None] and not (yield calls.marker(old, ID)):
        yield t.remap(Keys("q"), after.text, replace(after, was=after.n, state="steady").text, clock=NOON)


class Work:
    """End the message in a shard; its id stays taken for its window."""

    def __init__(self, shard):
        self.command = ("WORK", "", shard)
        self._keys, self._numbers = Keys("q", shard=shard), count(1)

    def do(self, run):
        turn = t.CallNumber("w", next(self._numbers))
        held = run(t.claim(self._keys, turn, limit=1, lease_ms=60_000, clock=NOON)).claimed
        run(t.ack(self._keys, [(one, WINDOW_SECONDS * 1000) for one in held], clock=NOON))
        return bool(held)


def worker(shard):
    """Claim until there was a message."""
    work = Work(shard)
    while not (yield work):
        pass


def clocked(call):
    return replace(call, args=[NOON, *list(call.args)[1:]])


def unfenced(call):
    """Return the call without its fence, as an earlier version made it."""
    args, at = list(call.args), call.script.args.index("known")
    return replace(call, args=[*args[:at], "", *args[at + 1 :]])


@pytest.fixture
def walk(client, run, dump):
    """Take the steps of a path, a list of actors; return the state, the actors with a next step, and the answers."""

    def step(actor, call):
        try:
            return actor.send(call.do(run) if isinstance(call, Work) else run(call))
        except StopIteration:
            return None

    def make(path, before, actors):
        client.flushall()
        if before.epoch:
            client.set(Keys("q").map, before.text)
        accepted = []
        all_actors = actors(accepted)
        calls = [next(actor, None) for actor in all_actors]
        for at in path:
            calls[at] = step(all_actors[at], calls[at])
        # The content of Redis without lanes and counters, and the next step of each actor.
        held = {key: value for key, value in dump().items() if not re.search(":(totals|wake|watch|ends|lane:.*)$", key)}
        next_calls = [call and (str(call.command[:2]), tuple(map(str, call.command[3:]))) for call in calls]
        return (
            repr((sorted(held.items()), next_calls, accepted)),
            [at for at, call in enumerate(calls) if call],
            accepted,
        )

    return make


@pytest.fixture
def explore(walk):
    """Walk every path; return the number of states, and of states in which the id was accepted twice."""

    def make(actors, before, *, first=False):
        seen, twice, todo = set(), 0, [()]
        while todo and not (first and twice):
            path = todo.pop()
            state, ready, accepted = walk(path, before, actors)
            if state not in seen:
                seen.add(state)
                twice += accepted.count("published") > 1
                todo += [(*path, at) for at in ready]
        return len(seen), twice

    return make


def actors(before, after, *, many=False, **mutant):
    """Start a producer with the old map, producers that read the map, the resharder, and a worker of each shard."""
    return lambda accepted: [
        producer("stale", before, accepted, **mutant),
        *(beginning(name, accepted, mutant) for name in (("one", "other") if many else ("one",))),
        resharder(before, after),
        *map(worker, range(after.served)),
    ]


def beginning(name, accepted, mutant):
    """A producer that first reads the map, at any time."""
    known = yield shard_map(Keys("q"))
    yield from producer(name, known, accepted, **mutant)


CHANGES = {"a growth": (UNSHARDED, GROWN), "a shrink": (SHRUNK_FROM, SHRUNK), "a growth undone": (GROWN, SHRUNK)}
changes = pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)


@changes
@pytest.mark.timeout(120)
def test_a_chosen_id_is_accepted_once_in_every_order_of_calls(before, after, explore, request):
    states, twice = explore(actors(before, after, many=request.config.getoption("--long")), before)

    assert twice == 0
    assert states > 200


@changes
@pytest.mark.parametrize("mutant", [{"asks": False}, {"fenced": False}], ids=["no ask", "no fence"])
@pytest.mark.timeout(120)
def test_without_ask_or_fence_some_order_accepts_it_twice(before, after, mutant, explore):
    _, twice = explore(actors(before, after, **mutant), before, first=True)

    assert twice > 0
