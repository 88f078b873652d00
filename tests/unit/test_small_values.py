"""Names, ids, keys, URLs and waits: values that need no Redis."""

import contextlib
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import redis
from hypothesis import example, given, strategies as st

from reliq.errors import ConfigurationError, PublishFailed, RedisUnavailableError, UndecodableError, WrongKeyTypeError
from reliq.events import Cancelled, notify
from reliq.keys import Keys, Layout, check_id, made_at, new_id
from reliq.lua.transitions import PARKED_LIMIT, CallSequences, Message
from reliq.redis import commands
from reliq.redis.client import AnyClient
from reliq.redis.connection import BLOCKING, NotSentError, run_blocking
from reliq.redis.url import check_url, masked, settings
from reliq.settings import DEFAULT_BACKOFF, seconds_after

SECRET = "s3cret"
A, B, C = ((Message(id, 1),) for id in "abc")


def test_bad_queue_name_is_refused_with_what_is_allowed():
    for name in ("", "a:b", "a{b", "a}b", "ä", "a b", "a" * 129, "a\n", 5, None, b"a"):
        with pytest.raises(ConfigurationError, match="queue name must be 1 to 128 of A-Z a-z 0-9 _ . -"):
            Keys(name)
    for name in ("", "a\n", "\x1b[2J", "\udcff", "\u202eq", "a" * 513, 5, None, b"a"):
        with pytest.raises(ConfigurationError, match="queue name must be 1 to 512 printable characters, not"):
            Keys(name, Layout.hdt3213())


def test_queue_in_the_go_layout_accepts_any_printable_name():
    for name in ("order:timeout", "orders/v2", "订单", "a b", "{x}", "a*", "a" * 512):
        for layout in (Layout.hdt3213(), Layout.hdt3213(hash_tag=True)):
            assert Keys(name, layout).name == name


LAYOUTS = {
    "reliq": (Layout.RELIQ, "{reliq:q}:msg:1", "{reliq:q}:pending"),
    "hdt3213": (Layout.hdt3213(), "dp:q:msg:1", "dp:q:pending"),
    "hdt3213:tag": (Layout.hdt3213(hash_tag=True), "{dp:q}:msg:1", "{dp:q}:pending"),
    "hdt3213:prefix=a:b": (Layout.hdt3213(prefix="a:b"), "dp:q:msg:1", "a:b:q:pending"),
    "hdt3213:tag,prefix=a=b": (Layout.hdt3213(hash_tag=True, prefix="a=b"), "{dp:q}:msg:1", "{a=b:q}:pending"),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout_is_parsed_from_its_own_text_and_spells_every_redis_key(text):
    layout, body, pending = LAYOUTS[text]
    keys = Keys("q", layout)

    assert (Layout.parse(text), str(layout)) == (layout, text)
    assert (keys.msg("1"), keys.pending, Keys.registered(keys.entry).pending) == (body, pending, pending)
    assert keys.ready == pending.replace("pending", "ready")
    assert layout.bare is (layout is not Layout.RELIQ)
    assert Layout.parse("hdt3213:no-tag") == Layout.parse("hdt3213:prefix=dp,no-tag") == Layout.hdt3213()


BAD_LAYOUTS = (
    *("", "RELIQ", "reliq:tag", "hdt", "hdt3213:", "hdt3213:tag,", "hdt3213:tag,tag", "hdt3213:tag,no-tag"),
    *("hdt3213:prefix", "hdt3213:prefix=", "hdt3213:prefix=a b", "hdt3213:prefix=a,prefix=b", "hdt3213:prefix=\x1b"),
)


def test_bad_layout_is_refused_and_a_registry_entry_without_a_queue_name_skipped():
    for text in BAD_LAYOUTS:
        with pytest.raises(ConfigurationError, match="layout"):
            Layout.parse(text)
    for fields in ({"prefix": "mine"}, {"hash_tag": False}, {"prefix": "", "bare": True}):
        with pytest.raises(ConfigurationError, match="layout"):
            Layout(**fields)
    assert [Keys.registered(entry) for entry in ("a b", "a:b", "", "hdt3213 ", "reliq a:b")] == [None] * 5


def test_redis_keys_of_a_queue_share_a_slot_and_no_two_are_the_same():
    others = {"name", "layout", "shard", "bare"}
    every = {}
    for keys in (Keys("q"), Keys("q-more")):
        plain = [value for name, value in vars(keys).items() if not name.startswith("_") and name not in others]
        every[keys.name] = [*plain, keys.msg("1"), keys.dedup("1"), keys.lane("1")]
        assert {key.partition("}")[0] for key in every[keys.name]} == {f"{{reliq:{keys.name}"}

    assert len({*every["q"], *every["q-more"]}) == len(every["q"]) + len(every["q-more"])


def test_bad_id_is_refused_with_what_is_allowed():
    for id in ("", "a b", "a" * 129, "ä", "a\n", "a{"):
        with pytest.raises(ConfigurationError, match="id must be 1 to 128 of A-Z a-z 0-9 _ . : -"):
            check_id(id)
    for id in (5, None, b"a"):
        with pytest.raises(ConfigurationError, match=f"id must be a str or a UUID, not {type(id).__name__}"):
            check_id(id)


def test_generated_ids_are_unique_and_in_order_of_time():
    ids = [new_id() for _ in range(20_000)]

    assert len(set(ids)) == len(ids)
    assert {len(id) for id in ids} == {22}
    assert [id[:8] for id in ids] == sorted(id[:8] for id in ids)
    assert all(check_id(id) for id in ids[:1000])
    assert 1_700_000_000_000 < made_at(ids[0]) <= made_at(ids[-1]) < 5_000_000_000_000
    assert [id for id in ("order-42", "", "x" * 21, "x" * 23, "-" * 22) if made_at(id) is not None] == []


#: The child is forked by a program with one thread: with more threads, a fork by C may leave it without the GIL.
FORKED = """
import ctypes, os
from reliq.keys import new_id, token
before = [new_id() for _ in range(1000)] + [token()]
child = {fork}()
if child:
    os.waitpid(child, 0)
print(*before * (child > 0), *(new_id() for _ in range(1000)), *(token() for _ in range(200)), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"], ids=["Python", "C, as uWSGI"])
def test_forked_child_makes_other_ids_and_tokens(fork):
    made = subprocess.check_output([sys.executable, "-c", FORKED.format(fork=fork)], text=True, timeout=100)

    theirs, ours = ({id[-14:] for id in line.split()} for line in made.splitlines())
    assert (len(theirs), len(ours)) == (1200, 2201)
    assert ours & theirs == set()


def test_forked_child_publishes_in_lanes_of_its_own():
    lanes = CallSequences()
    turn = lanes.take(A)
    lanes.park(turn, A)

    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, lanes.take(A).lane.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)

    with os.fdopen(reading, "rb") as answer:
        assert answer.read().decode() not in ("", turn.lane)
    assert lanes.take(A) == turn


def test_lane_serves_a_call_at_a_time_and_counts():
    lanes = CallSequences()
    first = lanes.take(A)
    other = lanes.take(B)
    lanes.give_back(first)
    third = lanes.take(C)
    assert first.lane != other.lane
    assert (third.lane, third.number) == (first.lane, first.number + 1)

    lanes.park(other, B)
    assert lanes.take(C).lane != other.lane
    assert lanes.take(B) == other, "a publish that gave up gets its number again"


@pytest.mark.parametrize("other", [A, B, (Message("a", 2), *B), (*B, *A)], ids=["first", "second", "body", "order"])
def test_other_publish_of_an_id_ends_a_publish_that_gave_up(other):
    lanes = CallSequences()
    turn = lanes.take(A + B)
    lanes.park(turn, A + B)

    assert lanes.take(other).lane != turn.lane
    assert not lanes.parked
    assert lanes.take(A + B) != turn


def test_publishes_that_gave_up_are_forgotten_by_number_and_age(monkeypatch):
    lanes = CallSequences()
    for n in range(PARKED_LIMIT + 5):
        turn = lanes.take((Message(f"{n}", 1),))
        lanes.park(turn, (Message(f"{n}", 1),))
    assert len(lanes.parked) == len(lanes._by_id) == PARKED_LIMIT

    monkeypatch.setattr("reliq.lua.transitions.PARKED_SECONDS", 0)  # before Redis forgets them
    assert lanes.take((Message(f"{n}", 1),)).lane != turn.lane


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{SECRET}@host:6379/0", "redis://:***@host:6379/0"),
        (f"rediss://me:{SECRET}@host/1?ssl_password={SECRET}", "rediss://me:***@host/1"),
        (f"unix:///run/redis.sock?password={SECRET}", "unix:///run/redis.sock"),
        (f"redis://host:{SECRET}", "a URL that does not parse"),
        (f"redis://me:p@ss{SECRET}@[::1]:6379/0", "redis://me:***@[::1]:6379/0"),
        (f"redis+sentinel://:{SECRET}@a:1,b/shop/0?sentinel_password={SECRET}", "redis+sentinel://:***@a:1,b/shop/0"),
        (f"redis+cluster://me:{SECRET}@a:1,[::1]:2/0?ssl_password={SECRET}", "redis+cluster://me:***@a:1,[::1]:2/0"),
    ],
    ids=str,
)
def test_url_is_shown_without_its_password(url, shown):
    assert masked(url) == shown


BAD_URLS = {
    "": "must begin with",
    f"me:{SECRET}@host:6379": "must begin with",
    "redis://": "needs a host",
    "unix://": "needs the socket's path",
    "redis://host:port": "does not parse",
    f"redis://me:{SECRET}/more@host:6379": "does not parse",
    "redis://[::1": "does not parse",
    f"redis://me:1234/{SECRET}@host": "must end in a database number",
    "redis://host/0?dbb=1": "has an unknown option",
    "redis://a,b/0": "needs a host",
    "redis://host/0?sentinel_password=x": "has an unknown option",
    "redis+sentinel://host:1": "needs sentinels and their name for the primary",
    f"redis+sentinel://:{SECRET}@a:1,b:2/sh op/0": "needs sentinels and their name for the primary",
    f"redis+sentinel://:{SECRET}@a:1,/shop": "does not parse",
    "redis+cluster://": "needs nodes, such as",
    "redis+cluster://a:1,b:2/1": "must not name a database other than /0",
    f"rediss://:{SECRET}@h?ssl_cert_reqs=none": "would accept any certificate",
    f"rediss://:{SECRET}@h?ssl_check_hostname=False": "would accept any certificate",
    f"rediss://:{SECRET}@h?ssl_cert_reqs=none&insecure=no": "would accept any certificate",
    f"rediss://h?ssl_cert_reqs={SECRET}": "ssl_cert_reqs must be required, or none with insecure=true",
    f"rediss://h?ssl_min_version={SECRET}": "ssl_min_version must be 1.2 or 1.3",
}


@pytest.mark.parametrize("url", BAD_URLS, ids=repr)
def test_bad_url_is_refused_without_its_password(url):
    with pytest.raises(ConfigurationError, match=f"^Redis URL .*{BAD_URLS[url]}") as caught:
        check_url(url)

    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@given(st.lists(st.sampled_from("?#/@:&=%[]., 1"), min_size=1), st.sampled_from(["", "sentinel", "db", "ssl_"]))
def test_unencoded_password_is_never_shown(marks, start):
    password = start.join(f"{mark}{SECRET}" for mark in marks)
    for scheme in ("redis", "rediss", "redis+sentinel", "redis+cluster"):
        try:
            check_url(f"{scheme}://me:{password}@host:6379/0")
        except ConfigurationError as error:
            assert SECRET not in str(error)


@given(st.text())
def test_any_text_is_a_url_or_refused(text):
    try:
        check_url(text)
    except ConfigurationError as error:
        assert str(error).startswith("Redis URL ")


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("redis://h", "redis://h/?"),
        ("rediss://u:p@[::1]:6/0?insecure=yes", "rediss://u:p@[::1]:6/0?"),
        ("unix:///a/b.sock?db=2", "unix:///a/b.sock?db=2"),
        ("rediss://h?ssl_min_version=1.3&ssl_ca_certs=%2Fa", "rediss://h/?ssl_min_version=772&ssl_ca_certs=%2Fa"),
        ("redis+sentinel://u:p%2F@a:1,b/shop/2?protocol=2&sentinel_password=x", "redis://u:p%2F@sentinel/2?protocol=2"),
        ("rediss+sentinel://[::1]:5,a/my-shop", "rediss://sentinel/?"),
        ("redis+cluster://u:p%2F@a:1,b/0?protocol=2", "redis://u:p%2F@cluster/0?protocol=2"),
    ],
)
def test_url_is_passed_to_redis_py_with_the_options_it_knows(url, plain):
    assert check_url(url).plain == plain


@given(st.text(min_size=1).filter(lambda text: not set("%/?#@:") & set(text)))
@example("[")
@example("a]b[c")
@example("\N{ACCOUNT OF}")
@example("tab\tbed")
def test_password_reaches_redis_py_with_any_character_that_needs_no_encoding(password):
    assert settings(f"redis://me:{password}@host:6379/0")["password"] == password


def test_host_of_any_characters_is_passed_to_redis_py():
    assert settings(f"redis://me:{SECRET}@h\N{ACCOUNT OF}st")["host"] == "h\N{ACCOUNT OF}st"


def test_url_has_its_sentinels_service_credentials_and_nodes():
    url = check_url(f"redis+sentinel://u:p@a:1,b,[::1]:3/shop/2?sentinel_username=me&sentinel_password={SECRET}")

    assert url.sentinels == (("a", 1), ("b", 26379), ("::1", 3))
    assert url.service == "shop"
    assert url.sentinel_rights == {"username": "me", "password": SECRET}
    assert SECRET not in repr(url)
    assert check_url("redis+cluster://u:p@a:1,b,[::1]:3/0").nodes == (("a", 1), ("b", 6379), ("::1", 3))
    assert check_url("redis://a:1/0").nodes == ()


@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("redis://:p@shop.example/0", True),
        ("redis://shop.example/0?password=p", True),
        ("redis+sentinel://:p@127.0.0.1,shop.example/shop", True),
        ("redis+cluster://:p@127.0.0.1,shop.example", True),
        ("rediss://:p@shop.example/0", False),
        *((f"redis://:p@{host}/0", False) for host in ("localhost", "127.0.0.1", "127.1.2.3", "[::1]")),
    ],
)
def test_password_without_tls_is_reported_as_exposed(url, exposed):
    assert check_url(url).is_exposed is exposed


def test_default_backoff_is_spread_and_doubles_up_to_an_hour():
    for attempt in range(1, 13):
        least = min(2 ** (attempt - 1), 1800)
        spread = min(2 * 2 ** (attempt - 1), 1800)
        waits = [seconds_after(DEFAULT_BACKOFF, attempt) for _ in range(400)]

        assert least <= min(waits) < least + spread / 10
        assert least + spread * 0.9 < max(waits) <= least + spread
    assert seconds_after(lambda _state: -5, 1) == 0
    assert seconds_after(DEFAULT_BACKOFF, 10_000) <= 3601


def test_retries_remember_that_an_earlier_try_may_have_run():
    class Transport:
        errors = iter([redis.TimeoutError("silence"), *[NotSentError("away")] * 99])
        driver = BLOCKING

        async def exchange(self, _commands):
            raise next(self.errors)

    with pytest.raises(RedisUnavailableError) as raised:
        run_blocking(AnyClient(Transport()).run(commands.server_ms(), for_seconds=0.01))

    assert (str(raised.value), raised.value.maybe_ran) == ("away", True)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances on each sleep; `tries` simulates retries at an unreachable server, of some time each."""

    class Clock:
        now = 100.0

        def sleep(self, seconds):
            self.now += seconds

        def tries(self, each, back_at=1e9):
            """Return the start of each attempt, in seconds since the first, up to the first success."""
            began = []

            async def sleep(seconds):
                self.sleep(seconds)

            async def exchange(_commands):
                began.append(self.now - start)
                self.now += each
                if began[-1] < back_at:
                    raise NotSentError("away")
                return [[b"1", b"0"]]

            start = self.now
            transport = SimpleNamespace(
                driver=SimpleNamespace(sleep=sleep, complete=BLOCKING.complete), exchange=exchange
            )
            with contextlib.suppress(RedisUnavailableError):
                run_blocking(AnyClient(transport).run(commands.server_ms(), for_seconds=2.0))
            return began

    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


def test_retries_use_the_whole_time_and_a_call_that_hangs_is_tried_once_more(clock):
    for each in (0.0001, 0.01) * 50:
        began = clock.tries(each)
        assert 1.98 - each <= began[-1] <= 2.0 - each + 0.001
        assert len(began) < 16
    for tenths in range(20):
        assert clock.tries(0.001, back_at=tenths / 10)[-1] >= tenths / 10
    for each in (0.9, 5.0):
        assert clock.tries(each) == pytest.approx([0, each])


def test_errors_can_be_pickled():
    failed = PublishFailed("q", (("a", 1), ("b", 2)), "unknown", "Redis is away", confirmed=7)
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), again.ids, again.outcome, again.confirmed) == (str(failed), (("a", 1), ("b", 2)), "unknown", 7)
    assert "failed, it may have been written: Redis is away; publish the same again with" in str(again)

    undecodable = pickle.loads(pickle.dumps(UndecodableError("body is not int", "q", "a")))
    assert (undecodable.why, undecodable.queue, undecodable.id) == ("body is not int", "q", "a")
    assert pickle.loads(pickle.dumps(WrongKeyTypeError("{reliq:q}:ready"))).key == "{reliq:q}:ready"


def test_observer_that_raises_does_not_stop_the_others():
    seen = []

    def broken(_event):
        raise RuntimeError

    notify([broken, seen.append], [Cancelled("q", ("a",)), Cancelled("q", ("b",))])

    assert [event.ids for event in seen] == [("a",), ("b",)]
