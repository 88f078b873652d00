"""For any reply of Redis and any data of a foreign publisher, parsers return a result or raise a reliq error."""

import re

import pytest
import redis
from hypothesis import example, given, settings, strategies as st

from reliq.admin import calls
from reliq.admin.check import check_ids
from reliq.errors import ConfigurationError, ProtocolError
from reliq.keys import Keys, Layout
from reliq.limits import Limit
from reliq.lua import script_names, transitions as moves
from reliq.lua.transitions import CallNumber, Tick
from reliq.message import Claimed, Pause
from reliq.redis import commands
from reliq.redis.commands import Call
from reliq.redis.shards import shard_map
from reliq.redis.url import check_url, masked
from reliq.schedules import next_ticks, page
from reliq.settings import Durability
from reliq.wire_format import MAGIC, open_envelope

SEEDED = settings(max_examples=300, deadline=None, derandomize=True, database=None)

KEYS, BARE = Keys("q"), Keys("q", Layout.hdt3213())
DAILY = Tick("daily", "every 60", 60, 0)
ONE, TURN = Claimed("a", "lane.1:30000", 3), CallNumber("lane", 1)
LEFT = moves.MigrationBatch(1, {"a": b""}, letters=False)

#: One request of every kind, by the function that parses its reply.
REQUESTS = [
    moves.publish(KEYS, [("a", b"x")], TURN, ttl_ms=1000, retries=1),
    moves.book(Limit("api", rate="1/s"), 1),
    moves.bodies(KEYS, ["a"], max_body=1000),
    moves.promote(KEYS),
    moves.claim(KEYS, TURN, limit=5, lease_ms=30_000),
    moves.claim(KEYS, TURN, limit=5, lease_ms=30_000),
    moves.reclaim(KEYS),
    moves.ack(KEYS, [(ONE, None)]),
    moves.ack(KEYS, [(ONE, None)], results=["0 1 null"], keep_ms=1000),
    moves.status(KEYS, "a"),
    moves.nack(KEYS, [(ONE, 0, "failed 1 x", b"")]),
    moves.extend(KEYS, [ONE], lease_ms=30_000),
    moves.checkpoint(KEYS, [(ONE, 1, '"1 0 7"')]),
    moves.release(KEYS, [ONE]),
    moves.snooze(KEYS, [(ONE, 0)]),
    moves.succeed(KEYS, [ONE], kind="acked"),
    moves.replace(KEYS, [("a", b"x")], TURN, mode="replace", ttl_ms=1000, retries=1),
    moves.cancel(KEYS, ["a"]),
    moves.reschedule(KEYS, ["a"]),
    moves.collect(KEYS, ["a"], dead_letter_limit=1, letters_ms=1),
    moves.redrive(KEYS, [("1-0", "a", 1)], ttl_ms=1),
    moves.purge(KEYS, ["a"], state="ready"),
    moves.forget(KEYS, letters=True),
    moves.counts(KEYS),
    moves.tidy(KEYS),
    moves.register(KEYS, [("daily", "every 60")]),
    moves.tick(KEYS, DAILY, ttl_ms=1000, retries=1),
    moves.plan(KEYS, "delete", "daily"),
    moves.plan_due(KEYS, limit=5),
    moves.plan_tick(KEYS, [moves.PlanTick("a", "daily", "a1", "60", 120)]),
    page(KEYS, 0, ""),
    next_ticks(KEYS, ["a"]),
    moves.ask(KEYS, ["a"], fence="1 2 1"),
    moves.remap(KEYS, b"", b"{}"),
    moves.depart(KEYS, ["a"], state="ready"),
    moves.arrive(KEYS, LEFT, ["a"], origin=1),
    moves.leave(KEYS, LEFT),
    moves.limit(KEYS, {"per_key": "1"}),
    moves.key_queues(KEYS),
    moves.held_up(KEYS, most=1, of=["a"]),
    moves.sleep(KEYS, "a", for_ms=1),
    shard_map(KEYS),
    check_ids(KEYS, ["a"]),
    commands.bodies(KEYS, ["a"]),
    commands.wake_token("poke", [KEYS], 1),
    commands.garbage(KEYS, 1),
    commands.letters_between(KEYS, "-", "+", count=1),
    commands.claims(KEYS),
    commands.pause(KEYS, Pause("me@here", 1.0, "why"), None),
    calls.paused(KEYS),
    commands.register(["q"], 1),
    calls.worker_ids(),
    *calls.worker_records(["a"]),
    commands.server_facts("server"),
    commands.confirmation(Durability.replicas(1)),
    commands.confirmation(Durability.aof()),
]

atoms = st.none() | st.integers() | st.binary(max_size=40) | st.booleans()
atoms |= st.integers(-(10**6), 10**6).map(lambda number: str(number).encode())
atoms |= st.sampled_from(b" published 1700000000000-0 id value note suspect \xff 1,2:x".split(b" "))
replies = atoms | st.lists(atoms, max_size=12) | st.lists(atoms | st.lists(atoms, max_size=7), max_size=7)


#: Requests with replies of other kinds.
MALFORMED = [
    (moves.ack(KEYS, [(ONE, None)]), [1]),
    (moves.ack(KEYS, [(ONE, None)]), [b"b"]),
    (moves.ack(KEYS, [(ONE, None)]), [[b"b"]]),
    (moves.ack(KEYS, [(ONE, None)]), [[b"a", 1]]),
    (moves.status(KEYS, "a"), [b"acked", b"", b"", b"1-0 0 1"]),
    (moves.status(KEYS, "a"), [b"stuck", b"", b"", b""]),
    (moves.extend(KEYS, [ONE], lease_ms=30_000), [[b""], []]),
    (moves.checkpoint(KEYS, [(ONE, 1, '"1 0 7"')]), [[b""], []]),
    (moves.cancel(KEYS, ["a"]), []),
    (moves.cancel(KEYS, ["a"]), [b"cancelled", b"cancelled"]),
    (moves.cancel(KEYS, ["a"]), [b"redriven"]),
    (moves.publish(KEYS, [("a", b"x")], TURN, ttl_ms=1000, retries=1), b"1 1:gone"),
    (moves.publish(KEYS, [("a", b"x")], TURN, ttl_ms=1000, retries=1), b"stale"),
    (commands.confirmation(Durability.replicas(1)), b""),
    (commands.confirmation(Durability.aof()), [1]),
]


def test_malformed_reply_raises_protocol_error():
    for request, reply in MALFORMED:
        with pytest.raises(ProtocolError):
            request.read(reply)


def test_every_script_has_a_request_here():
    assert {request.script.name for request in REQUESTS if isinstance(request, Call)} == {*script_names(), "check"}


@SEEDED
@given(replies)
def test_reader_of_any_reply_answers_or_raises_protocol_error(reply):
    for request in REQUESTS:
        try:
            list(request.events(request.read(reply)))
        except ProtocolError as error:
            assert re.search("got an unexpected reply|the total .*run `reliq check`", str(error), re.DOTALL)


envelopes = st.binary(max_size=200).map(lambda rest: MAGIC + rest)
envelopes |= st.builds(
    lambda due, left, rest: MAGIC + f'{{"d":{due},"r":{left}}}\n'.encode() + rest,
    *(st.integers() | st.floats() | st.text(max_size=5), st.integers() | st.floats(), st.binary(max_size=50)),
)


@SEEDED
@given(st.binary(max_size=300) | envelopes, st.booleans())
@example(MAGIC + b"[" * 100_000 + b"\n", False)
@example(MAGIC + b'{"d":' + b"[" * 16_000 + b"\n", False)
@example(MAGIC + b'{"d":1' + b"0" * 16_000 + b',"r":1}\nx', False)
@example(MAGIC + b'{"d":1e308,"r":1}\nx', False)
@example(MAGIC + b'{"d":1,"r":1,"h":{"' + b"a" * 16_000 + b'":"b"}}\nx', False)
@example(MAGIC + b"x" * 2_000_000, False)
def test_any_value_opens_as_header_and_body_or_as_a_body(value, bare):
    header, body = open_envelope(value, bare=bare)

    assert value.endswith(body)
    assert header.due is None or isinstance(header.due, int)
    if bare or not value.startswith(MAGIC):
        assert body == value


schemes = st.sampled_from(["redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "http", ""])
texts = st.text(max_size=12) | st.text("@:/?#[]%,&=.0aé℀\udc80", max_size=12)


@SEEDED
@given(st.builds("{}://{}@{}:{}/{}?{}={}".format, schemes, *[texts] * 6) | texts)
def test_any_url_is_parsed_by_redis_py_or_refused(text):
    try:
        url = check_url(text)
        redis.connection.parse_url(url.plain)
    except ConfigurationError as error:
        assert str(error).startswith("Redis URL ")
    except ValueError as error:
        assert str(error).startswith("Invalid value for")  # an error about an option that pools pass on by name
    masked(text)


@SEEDED
@given(st.text("abcé%@:", min_size=8, max_size=20), st.sampled_from(["redis", "rediss", "redis+sentinel"]))
def test_password_in_a_url_is_never_shown(secret, scheme):
    text = f"{scheme}://me:{secret}@host:6379/shop/0"

    assert secret not in masked(text)
    try:
        check_url(text)
    except ConfigurationError as error:
        assert secret not in str(error)
