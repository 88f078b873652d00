"""Compare the scripts with a model: after any calls in any order, Redis holds the model's state."""

from collections import Counter
from math import inf

import pytest
import redis
from expiring_keys import WINDOW_MS
from foreign_moves import ForeignMoves
from held_clock import NOON
from held_server import held_clock, skip_unless_held
from hypothesis import HealthCheck, seed, settings, strategies as st
from hypothesis.stateful import get_state_machine_test, invariant, rule
from ports import free_port
from queue_machine import IDS, LEASE_MS, a_few, delays, limits, some_ids, tombstones
from required import fail_in_ci
from waiting import eventually

from reliq.keys import CLUSTER_SLOTS
from reliq.lua import transitions as t
from reliq.testing.server import EmbeddedRedis
from reliq.wire_format import open_envelope

pytestmark = pytest.mark.slow

#: Number of examples, and steps in each.
QUICK, LONG = (240, 50), (4000, 50)
#: The same on a Cluster node, which refuses scripts that touch a key of a slot that they do not declare.
QUICK_IN_A_CLUSTER, LONG_IN_A_CLUSTER = (60, 50), (1000, 50)
#: Hypothesis remembers every example of a run: several short runs need less memory than a long run.
EXAMPLES_OF_A_ROUND = 20
#: For shrinking a failure, or for the long run; the quick run takes a few seconds.
TIMEOUT_SECONDS = 1800

FAILURES = ["nack", "cancel", "release", "renew", "expire", "reject", "collect", "redrive", "redrive and cancel"]
VERBS = {
    "ack": {"kind": "acked"},
    "nack": {"delay_ms": 0, "reject": False},
    "extend": {"lease_ms": 1},
    "release": {},
    "snooze": {"delay_ms": 1},
}


class QueueMachine(ForeignMoves):
    """The moves, the effects of time, eviction and a foreign consumer, and typical sequences."""

    # ---- time and expiry in Redis -------------------------------------------

    @rule(us=st.sampled_from([1, 999, 1000, 500_000, LEASE_MS * 1000, LEASE_MS * 1000 + 1, -3_000_000]))
    def tick(self, us):
        self.pass_time(us)

    @rule(ids=some_ids)
    def bodies_are_evicted(self, ids):
        self.client.delete(*map(self.keys.msg, ids))
        for id in ids:
            self.model.bodies.pop(id, None)

    @rule(ids=some_ids)
    def markers_expire(self, ids):
        self.client.delete(*map(self.keys.dedup, ids))
        for id in ids:
            self.model.markers.pop(id, None)

    @rule()
    def a_client_takes_the_token(self):
        self.client.rpop(self.keys.wake)
        self.model.token = False

    @rule()
    def the_script_cache_is_lost(self):
        self.client.script_flush()

    # ---- typical sequences --------------------------------------------------

    @rule(
        ids=some_ids,
        cancelled=some_ids,
        how=st.sampled_from(["none", "cancel", "reschedule", "its supervisor ends the leases"]),
        limit=limits,
        spare=st.booleans(),
        direct=a_few,
    )
    def a_worker_is_killed(self, ids, cancelled, how, limit, spare, direct):
        self.publish(ids, delay_ms=0, left=2, replace=True)
        held = self.claim(4)
        if how.startswith("its"):
            self.settle("extend", held, lease_ms=0)
        if how == "cancel":
            self.cancel(cancelled)
        self.pass_time(LEASE_MS * 1000)
        self.a_client_takes_the_token()
        self.reclaim(limit, spare)
        if how == "reschedule":
            self.reschedule(cancelled, 500)
        self.claim(4, direct=direct)

    @rule(ids=some_ids, times=st.integers(2, 6), left=st.sampled_from([1, 3, 9]), again=st.booleans())
    def a_message_survives_no_delivery(self, ids, times, left, again):
        self.publish(ids, delay_ms=0, left=left, replace=True)
        for _ in range(times):
            self.claim(4, suspects=t.Suspects(8, 0, 8))
            if again and self.last_claim:
                self.repeat_the_last_claim()
            self.pass_time(LEASE_MS * 1000)
            self.reclaim(500)
            self.pass_time(LEASE_MS * 1000)
            self.reclaim(500)

    @rule(id=st.sampled_from(IDS), how=st.sampled_from(FAILURES), left=st.sampled_from([0, 2]), late=st.booleans())
    def a_handler_fails(self, id, how, left, late):
        self.publish([id], delay_ms=0, left=left, replace=True)
        held = self.claim(2)
        if late:
            self.cancel([id])
        self.a_client_takes_the_token()
        if how == "release":
            self.settle("release", held)
        elif how == "renew":
            self.settle("extend", held, lease_ms=2 * LEASE_MS)
        elif how == "expire":
            self.settle("ack", held, kind="expired")
        else:
            self.settle("nack", held, delay_ms=0, reject=how not in ("nack", "cancel"))
        if how == "nack":
            self.reclaim(500)
        if how == "cancel":
            self.cancel([id])
        if how in ("collect", "redrive", "redrive and cancel"):
            self.collect([one.id for one in held] or [id])
        if how.startswith("redrive") and self.model.letters:
            self.redrive([0, 1], 0, 2)
        if how == "redrive and cancel":
            self.cancel([id], tombstone_ms=1)

    @rule(ids=some_ids, limit=limits)
    def messages_come_due(self, ids, limit):
        self.publish(ids, delay_ms=500, left=2, replace=True)
        self.pass_time(500_000)
        self.a_client_takes_the_token()
        self.promote(limit)

    @rule(id=st.sampled_from(IDS))
    def a_message_is_called_off_too_late(self, id):
        self.publish([id], delay_ms=0, left=1, replace=True)
        self.settle("ack", self.claim(4), kind="acked")
        self.cancel([id])
        self.publish([id], delay_ms=0, left=1, replace=False)

    @rule(id=st.sampled_from(IDS), delay_ms=delays, tombstone_ms=tombstones, replace=st.booleans())
    def a_cancelled_message_is_published_again(self, id, delay_ms, tombstone_ms, replace):
        self.publish([id], delay_ms=0, left=1, replace=True)
        self.cancel([id], tombstone_ms)
        self.publish([id], delay_ms=delay_ms, left=2, replace=replace)

    @rule(
        id=st.sampled_from(IDS), how=st.sampled_from(["reclaim", "release", "go"]), verb=st.sampled_from(sorted(VERBS))
    )
    def a_late_worker_settles_what_someone_else_runs(self, id, how, verb):
        self.publish([id], delay_ms=0, left=2, replace=True)
        late = self.claim(4)
        if how == "release":
            self.settle("release", late)
        self.pass_time(2 * LEASE_MS * 1000)
        if how == "go":
            self.go_reclaims()
            self.go_pops(self.model.retry, self.keys.retry)
        else:
            self.reclaim(500)
            self.claim(4)
        self.settle(verb, late, **VERBS[verb])

    @rule(id=st.sampled_from(IDS), redriven=st.booleans(), verb=st.sampled_from(sorted(VERBS)))
    def a_foreign_consumer_ends_what_we_hold_and_its_id_comes_back(self, id, redriven, verb):
        self.a_handler_fails(id, "collect", 0, late=False)
        self.publish([id], delay_ms=0, left=2, replace=True)
        late = self.claim(500)
        if id in self.model.unack:
            self.go_ends(id)
        if redriven and self.model.letters:
            self.redrive([0, 1], 0, 2)
        else:
            self.publish([id], delay_ms=0, left=2, replace=True)
        self.go_pops(self.model.ready, self.keys.ready)
        self.settle(verb, late, **VERBS[verb])

    # ---- invariants ---------------------------------------------------------

    @invariant()
    def redis_holds_what_the_model_holds(self):
        keys, model = self.keys, self.model
        with self.client.pipeline() as pipe:
            for key in (keys.pending, keys.unack):
                pipe.zrange(key, 0, -1, withscores=True)
            for key in (keys.ready, keys.retry):
                pipe.lrange(key, 0, -1)
            pipe.smembers(keys.garbage)
            for key in (keys.retries_left, keys.lease, keys.windows, keys.totals):
                pipe.hgetall(key)
            pipe.mget(map(keys.msg, IDS)).mget(map(keys.dedup, IDS)).xrange(keys.dead).llen(keys.wake)
            pipe.xrange(keys.ends).xrange(keys.history).hkeys(keys.errors)
            *state, ends, history, failed = pipe.execute()
        pending, unack, ready, retry, garbage, counts, words, windows, totals, bodies, markers, dead, tokens = state

        assert scores(pending) == model.pending
        assert scores(unack) == model.unack
        assert texts(ready)[::-1] == model.ready
        assert texts(retry)[::-1] == model.retry
        assert {*texts(garbage)} == model.garbage
        assert {id: int(left) for id, left in named(counts).items()} == model.counts
        assert named(words) == model.words
        assert named(windows) == dict.fromkeys(model.windows, str(WINDOW_MS))
        assert Counter({kind: int(number) for kind, number in named(totals).items()}) == model.totals
        assert opened(bodies) == {id: (body.text, body.due) for id, body in model.bodies.items()}
        assert {id: why.decode() for id, why in zip(IDS, markers, strict=True) if why} == {
            id: why for id, (why, _) in model.markers.items()
        }
        assert [(letter[b"id"].decode(), payload(letter[b"value"])) for _, letter in dead] == [*model.letters.values()]
        assert tokens == model.token
        assert ends_of(ends) == model.ends
        assert ends_of(history) == model.history
        assert model.stolen or {*texts(failed)} <= {*model.alive}

    @invariant()
    def keys_expire_when_the_model_says(self):
        if self.held:
            now = self.model.key_time
            until = {self.keys.msg(id): body.until for id, body in self.model.bodies.items()}
            until |= {self.keys.dedup(id): when for id, (_, when) in self.model.markers.items()}
            until |= {self.keys.lane(lane): self.model.lanes.get(lane) for lane in "pw"}
            with self.client.pipeline() as pipe:
                for key in until:
                    pipe.pttl(key)
                left = pipe.execute()
            assert left == [-2 if when is None else -1 if when == inf else when - now for when in until.values()]

    @invariant()
    def every_message_is_in_one_place_and_accounted_for(self):
        counts = self.run(t.counts(self.keys))

        assert counts.missing == self.model.stolen
        assert counts.alive == len(set(self.model.alive)) == len(self.model.alive)


def texts(replies):
    return [one.decode() for one in replies]


def named(reply):
    return {name.decode(): value.decode() for name, value in reply.items()}


def ends_of(reply):
    return [(end[b"id"].decode(), end[b"kind"].decode()) for _, end in reply]


def scores(reply):
    return {id.decode(): round(score * 1000) for id, score in reply}


def payload(value):
    return open_envelope(value)[1].decode()


def opened(values):
    """Return the payload and the due time of each body in Redis."""
    found = {id: open_envelope(value) for id, value in zip(IDS, values, strict=True) if value is not None}
    return {id: (body.decode(), header.due) for id, (header, body) in found.items()}


@pytest.fixture
def held(tmp_path, server_path):
    """A held clock, or None on a machine without a C compiler."""
    skip_unless_held(server_path)
    held = held_clock(tmp_path, NOON)
    if held is None:
        fail_in_ci("without a C compiler no key of the model expires (Debian: apt-get install gcc libc6-dev)")
    return held


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_redis_holds_what_the_model_holds(request, server_path, held):
    examples, steps = LONG if request.config.getoption("--long") else QUICK
    server = EmbeddedRedis(server=held.server(server_path) if held else server_path)
    with server, redis.Redis(unix_socket_path=str(server.socket)) as client:
        check_model(QueueMachine, client, held, examples=examples, steps=steps)


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_a_node_of_a_cluster_holds_what_the_model_holds(request, server_path, held):
    examples, steps = LONG_IN_A_CLUSTER if request.config.getoption("--long") else QUICK_IN_A_CLUSTER
    options = {"cluster-enabled": "yes"}
    server = EmbeddedRedis(server=held.server(server_path) if held else server_path, options=options, port=free_port())
    with server, redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(CLUSTER_SLOTS))
        if held:
            held.set(NOON + 10_000_000)  # a new node accepts no writes for two seconds
        eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"), "the node serves")
        check_model(QueueMachine, client, held, examples=examples, steps=steps)


def check_model(machine, client, held, *, examples, steps, **options):
    """Run a machine until Redis differs from the model or all examples are done; CI uses a fixed seed."""
    one = type("Machine", (machine,), {"client": client, "held": held})
    healthy = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    rules = settings(**healthy, max_examples=EXAMPLES_OF_A_ROUND, stateful_step_count=steps, **options)
    for number in range(examples // EXAMPLES_OF_A_ROUND):
        round_of_moves = get_state_machine_test(one, settings=rules)
        (seed(number)(round_of_moves) if rules.derandomize else round_of_moves)()
