"""The header line before a body."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given, strategies as st
from tenacity import wait_exponential

from reliq.errors import ConfigurationError
from reliq.message import BARE, PRIORITY_LINES, Claimed, Delivery
from reliq.settings import DEFAULT_BACKOFF, LONGEST_SECONDS, seconds_after
from reliq.wire_format import (
    ENVELOPE_START,
    HEADERS_LIMIT,
    MAGIC,
    check_key,
    count_text,
    encoded_headers,
    envelope_rest,
    open_envelope,
    read_count,
)

DUE = 1_800_000_000_123
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def sealed(body, **parts):
    """Return a value as the publish script stores it."""
    return f"{ENVELOPE_START}{DUE}".encode() + envelope_rest(**parts) + body


@given(st.binary(), st.integers(0, 1000))
def test_envelope_returns_its_body_and_header(body, retries):
    header, payload = open_envelope(sealed(body, retries=retries))

    assert payload == body
    assert (header.due, header.retries, header.window_ms, header.headers) == (DUE, retries, None, {})


@given(st.dictionaries(NAMES, TEXTS, max_size=8), st.integers(0, 10**10))
def test_envelope_returns_headers_and_window(headers, window):
    header, payload = open_envelope(sealed(b"x", retries=3, enqueued=5, window_ms=window, headers=headers))

    assert payload == b"x"
    assert (header.headers, header.window_ms, header.enqueued) == (headers, window, 5)


@pytest.mark.parametrize("body", [b"RELIQ/1 ", b'RELIQ/1 {"d":1,"r":2}\nbody', b"\n", b""], ids=repr)
def test_body_that_looks_like_an_envelope_is_returned_whole(body):
    assert open_envelope(sealed(body, retries=1))[1] == body


@given(
    st.binary()
    | st.binary().map(lambda rest: b"RELIQ/1 " + rest)
    | st.binary().map(lambda rest: b'RELIQ/1 {"d":' + rest)
)
def test_any_bytes_are_an_envelope_or_a_bare_body(value):
    header, payload = open_envelope(value)

    assert payload == value if header is BARE else value.endswith(payload)


FOREIGN = {
    "no retries": b'RELIQ/1 {"d":1}\nx',
    "text as due": b'RELIQ/1 {"d":"1","r":1}\nx',
    "no line end": b'RELIQ/1 {"d":1,"r":1}',
    "array": b"RELIQ/1 [" + b"[" * 10_000 + b"\nx",
    "number as header": b'RELIQ/1 {"d":1,"r":1,"h":{"a":1}}\nx',
    "20 KB": b'RELIQ/1 {"d":1,"r":1,"x":"' + b"x" * 20_000 + b'"}\nx',
    "version 2": b'RELIQ/2 {"d":1,"r":1}\nx',
    "1001 retries": b'RELIQ/1 {"d":1,"r":1001}\nx',
    "empty key": b'RELIQ/1 {"d":1,"r":3,"k":""}\nx',
    "key with a control character": b'RELIQ/1 {"d":1,"r":3,"k":"a\\u0000b"}\nx',
    "key of 129 bytes": b'RELIQ/1 {"d":1,"r":3,"k":"%s"}\nx' % (b"x" * 129),
    "priority that does not exist": b'RELIQ/1 {"d":1,"r":3,"k":"\\u0001medium"}\nx',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_first_line_is_part_of_a_bare_body(name):
    assert open_envelope(FOREIGN[name]) == (BARE, FOREIGN[name])
    assert open_envelope(b'RELIQ/1 {"d":1,"r":1000,"unknown":[1]}\nx')[1] == b"x"


@pytest.mark.parametrize("name", ["d", "r", "e", "w"])
def test_envelope_with_a_bad_number_is_a_bare_body(name):
    for number in ("-1", "9007199254740992", "1" + "0" * 400, "-1" + "0" * 4300, "1.5", "1e300", "true", "null"):
        numbers = {"d": "5", "r": "3", "e": "5", "w": "7"} | {name: number}
        value = MAGIC + "{{{}}}\n".format(",".join(f'"{key}":{text}' for key, text in numbers.items())).encode() + b"x"

        header, payload = open_envelope(value)

        if number == "null" and name in "ew":
            assert payload == b"x"
        else:
            assert (header, payload) == (BARE, value), number


def test_attempt_is_within_the_most_retries_whatever_count_redis_has():
    header = open_envelope(b'RELIQ/1 {"d":1,"r":3}\nx')[0]
    attempts = {3: 1, 0: 4, 5: 1, -997: 1001, -(10**12): 1001, -(2**63): 1001}

    assert {left: Delivery(Claimed("m", "n", left), b"", header, b"").attempt for left in attempts} == attempts


def test_backoff_is_computed_for_at_most_attempt_1001_and_stays_storable():
    for attempt in (1, 1001, 10**12, 10**400):
        for backoff in (DEFAULT_BACKOFF, wait_exponential()):
            asked = []
            spied = lambda state, asked=asked, backoff=backoff: asked.append(state.attempt_number) or backoff(state)  # noqa: E731

            assert 0 <= seconds_after(spied, attempt) <= LONGEST_SECONDS
            assert asked == [min(attempt, 1001)]
    for wait in (math.inf, 1e300, -1.0, math.nan):
        assert 0 <= seconds_after(lambda _state, wait=wait: wait, 1) <= LONGEST_SECONDS


def test_bad_headers_are_refused_by_name():
    for said, bad in {
        "a header's name must be 1 to 64": [{"": "x"}, {"a b": "x"}, {"a" * 65: "x"}, {1: "x"}],
        "header 'a' must be a str, not int": [{"a": 1}],
        "header 'a' must be a str, not NoneType": [{"a": None}],
        "headers must be text that UTF-8 can hold": [{"a": "\udc80"}],
        "headers must be at most 8192 bytes": [{"a": "x" * HEADERS_LIMIT}],
        "headers must be a mapping": [[("a", "x")]],
    }.items():
        for headers in bad:
            with pytest.raises(ConfigurationError, match=said):
                encoded_headers(headers)


@pytest.mark.parametrize("text", ["\x00", "\N{SNOWMAN}", "\N{PILE OF POO}", '"', "x"], ids=ascii)
def test_largest_allowed_headers_are_returned(text):
    for size in range(HEADERS_LIMIT // len(text.encode()), 0, -1):
        with contextlib.suppress(ConfigurationError):
            encoded_headers({"a": text * size})
            break

    header, payload = open_envelope(sealed(b"x", retries=1, window_ms=5, enqueued=5, headers={"a": text * size}))

    assert (header.headers, payload) == ({"a": text * size}, b"x")


KEYS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=32)


@given(KEYS, st.integers(0, 1000))
def test_key_is_read_from_envelope_and_count(key, left):
    header, payload = open_envelope(sealed(b"x", retries=3, line=key))

    assert (header.key, header.priority, payload) == (key, "normal", b"x")
    assert read_count(count_text(left, key).encode()) == (left, key)
    assert (count_text(12), read_count(b"12"), read_count(None)) == ("12", (12, ""), (None, ""))


@pytest.mark.parametrize("priority", ["high", "low"])
def test_priority_is_not_a_key(priority):
    header, _ = open_envelope(sealed(b"x", retries=3, line=PRIORITY_LINES[priority]))

    assert (header.key, header.priority) == (None, priority)
    with pytest.raises(ConfigurationError, match="without control characters"):
        check_key(PRIORITY_LINES[priority])


def test_bad_key_is_refused_with_what_is_allowed():
    for key, wanted in {
        7: "must be a str, not int: give str",
        "": "1 to 128 bytes",
        "é" * 65: "of 130 bytes",
        "a\nb": r"not 'a\\nb'",
        "\ud800": "UTF-8",
    }.items():
        with pytest.raises(ConfigurationError, match=wanted):
            check_key(key)


@pytest.mark.parametrize(("text", "cost"), [("9" * 5000, 1), ("9" * 19, 10**9), ("0", 1), ("-7", 1), ("3\x034", 1)])
def test_a_cost_that_reliq_did_not_write_is_limited(text, cost):
    line = msgspec.json.encode(f"tenant\x03{text}")

    header, _ = open_envelope(b'RELIQ/1 {"d":1,"r":3,"k":%b}\nx' % line)

    assert (header.key, header.cost) == ("tenant", cost)
    assert read_count(f"3 tenant\x03{text}".encode()) == (3, "tenant")
