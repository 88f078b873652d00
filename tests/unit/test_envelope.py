"""The line before a body."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliq.codec import ENVELOPE_START, HEADERS_LIMIT, encoded_headers, envelope_rest, open_envelope
from reliq.errors import ConfigurationError
from reliq.message import BARE

DUE = 1_800_000_000_123
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def sealed(body, **parts):
    """A value as the publish script stores it."""
    return f"{ENVELOPE_START}{DUE}".encode() + envelope_rest(**parts) + body


@given(st.binary(), st.integers(0, 1000))
def test_an_envelope_gives_back_its_body_and_what_it_says(body, retries):
    header, payload = open_envelope(sealed(body, retries=retries))

    assert payload == body
    assert (header.due, header.retries, header.window_ms, header.headers) == (DUE, retries, None, {})


@given(st.dictionaries(NAMES, TEXTS, max_size=8), st.integers(0, 10**10))
def test_headers_and_the_window_come_back(headers, window):
    header, payload = open_envelope(sealed(b"x", retries=3, enqueued=5, window_ms=window, headers=headers))

    assert payload == b"x"
    assert (header.headers, header.window_ms, header.enqueued) == (headers, window, 5)


def test_by_default_the_line_is_at_most_36_bytes():
    assert len(sealed(b"", retries=999)) <= 36


@pytest.mark.parametrize("body", [b"RELIQ/1 ", b'RELIQ/1 {"d":1,"r":2}\nbody', b"\n", b""])
def test_a_body_that_looks_like_an_envelope_comes_back_whole(body):
    assert open_envelope(sealed(body, retries=1))[1] == body


@given(
    st.binary()
    | st.binary().map(lambda rest: b"RELIQ/1 " + rest)
    | st.binary().map(lambda rest: b'RELIQ/1 {"d":' + rest)
)
def test_any_bytes_are_an_envelope_or_a_bare_body(value):
    header, payload = open_envelope(value)

    assert payload == value if header is BARE else value.endswith(payload)


@pytest.mark.parametrize(
    "value",
    [
        b'RELIQ/1 {"d":1}\nx',
        b'RELIQ/1 {"d":"1","r":1}\nx',
        b'RELIQ/1 {"d":1,"r":1}',
        b"RELIQ/1 [" + b"[" * 10_000 + b"\nx",
        b'RELIQ/1 {"d":1,"r":1,"h":{"a":1}}\nx',
        b'RELIQ/1 {"d":1,"r":1,"x":"' + b"x" * 20_000 + b'"}\nx',
        b'RELIQ/2 {"d":1,"r":1}\nx',
    ],
    ids=range(7),
)
def test_a_first_line_that_is_not_ours_is_part_of_a_bare_body(value):
    assert open_envelope(value) == (BARE, value)


def test_a_newer_envelope_with_more_fields_is_read():
    assert open_envelope(b'RELIQ/1 {"d":1,"r":2,"z":[1]}\nx')[1] == b"x"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"": "x"}, "a header's name must be 1 to 64"),
        ({"a b": "x"}, "a header's name must be 1 to 64"),
        ({"a" * 65: "x"}, "a header's name must be 1 to 64"),
        ({1: "x"}, "a header's name must be 1 to 64"),
        ({"a": 1}, "header 'a' must be a str, not int"),
        ({"a": None}, "header 'a' must be a str, not NoneType"),
        ({"a": "\udc80"}, "headers must be text that UTF-8 can hold"),
        ({"a": "x" * HEADERS_LIMIT}, "headers must be at most 8192 bytes"),
        ([("a", "x")], "headers must be a mapping"),
    ],
    ids=range(9),
)
def test_headers_that_are_not_allowed_are_refused_by_name(headers, said):
    with pytest.raises(ConfigurationError, match=said):
        encoded_headers(headers)


@pytest.mark.parametrize("text", ["\x00", "\N{SNOWMAN}", "\N{PILE OF POO}", '"', "x"])
def test_the_largest_headers_that_are_allowed_come_back(text):
    longest = next(
        size for size in range(HEADERS_LIMIT, 0, -1) if len(text.encode()) * size <= HEADERS_LIMIT and fits(text * size)
    )

    header, payload = open_envelope(sealed(b"x", retries=1, window_ms=5, enqueued=5, headers={"a": text * longest}))

    assert (header.headers, payload) == ({"a": text * longest}, b"x")


def fits(text):
    try:
        encoded_headers({"a": text})
    except ConfigurationError:
        return False
    return True
