"""Parse state words, failure notes and server versions."""

import pytest

from reliq.errors import ConfigurationError
from reliq.redis.connection import ServerVersion
from reliq.wire_format import (
    Backoff,
    Delayed,
    FailureNote,
    Held,
    StateWord,
    Suspect,
    Unset,
    claim_nonce,
    envelope_due,
    lane_of,
    receipt_nonce,
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, Unset()),
        ("", Unset()),
        ("!", Unset(cancelled=True)),
        ("purged!", Unset(cancelled=True)),
        ("nacked", Backoff()),
        ("suspect", Suspect(deaths=1)),
        ("suspect12", Suspect(deaths=12)),
        ("w7.15:30000", Held(False, 0, "w7.15:30000", "w7", 30000)),
        (b"w7.15:30000!", Held(True, 0, "w7.15:30000", "w7", 30000)),
        ("3~w7.15:30000", Held(False, 3, "3~w7.15:30000", "w7", 30000)),
        ("@1800000000000", Delayed(due_ms=1_800_000_000_000)),
        ("@1800000000000?", Delayed(deaths=1, due_ms=1_800_000_000_000)),
        ("suspectx", StateWord()),
        ("\udcff~.:", StateWord()),
        (b"\xff~.:!", StateWord(cancelled=True)),
        ("w7.15:" + "9" * 5000, StateWord()),
        ("@" + "9" * 5000, StateWord()),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_state_word_is_read_as_written(text, word):
    assert StateWord.parse(text) == word
    assert word.waits == isinstance(word, Backoff | Suspect)


def test_nonce_of_a_receipt_contains_lane_and_deaths():
    for deaths in (0, 1, 99):
        nonce = receipt_nonce(claim_nonce("w7", 15, 30_000), deaths)

        assert StateWord.parse(nonce) == Held(False, deaths, nonce, "w7", 30_000)
        assert (lane_of(nonce), lane_of("nacked"), lane_of("")) == ("w7", "", "")


def test_failure_note_is_read_with_missing_parts():
    for text, note, summary in (
        ("failed 2 ValueError: no", FailureNote("failed", 2, "ValueError: no"), "failed: ValueError: no"),
        ("lease - ", FailureNote("lease", None, ""), "lease"),
        ("foreign", FailureNote("foreign"), "foreign"),
        (b"\xff x y", FailureNote("�", None, "y"), "�: y"),
        (None, FailureNote(), ""),
    ):
        assert FailureNote.parse(text) == note
        assert note.summary == summary


def test_start_of_a_value_contains_its_due_time():
    starts = {b'RELIQ/1 {"d":1800000000000,"r":3}': 1_800_000_000_000, b'RELIQ/1 {"d":5}': 5}
    starts |= {b'RELIQ/1 {"d":' + b"9" * 19: None, b"body": None, b"": None}

    assert {start: envelope_due(start) for start in starts} == starts


def test_server_before_6_2_is_refused_and_a_hidden_version_accepted():
    for text in ("6.2", "6.2.14", "8.0.0-rc1", "", "unknown"):
        ServerVersion.check({"redis_version": text})
    with pytest.raises(ConfigurationError, match=r"^Redis must be 6.2 or newer, not 6.0.20$"):
        ServerVersion.check({"redis_version": "6.0.20"})

    valkey = {"redis_version": "7.2.4", "valkey_version": "9.0.1"}
    assert ServerVersion.read(valkey, "valkey").numbers == (9, 0, 1)
    assert [ServerVersion.read(valkey).is_before(version) for version in ((7, 2), (8, 0))] == [False, True]


def test_dragonfly_is_refused_by_name():
    said = r"^Dragonfly \(df-v1.40.1\) is not supported; use Redis 6.2 or newer, or Valkey$"
    with pytest.raises(ConfigurationError, match=said):
        ServerVersion.check({"redis_version": "7.4.0", "dragonfly_version": "df-v1.40.1"})


def test_ten_failure_notes_are_read_newest_first():
    newest = FailureNote("failed", 3, "ValueError: no", "ValueError at jobs.py:31", "db1:7", 12, 1_800_000_000_000)
    value = "\x1e".join([str(newest), *(str(FailureNote("lease", None, f"{n}")) for n in range(20))])

    found = FailureNote.parse_all(value)

    assert (FailureNote.parse(value), len(found), found[1].text) == (newest, 10, "0")
    assert (newest.error, newest.summary) == ("ValueError: no (at jobs.py:31)", f"failed: {newest.error}")


def test_failure_note_is_parsed_from_its_own_text():
    for note in (FailureNote("failed", 1, "a b"), FailureNote("lease", None, "")):
        assert FailureNote.parse(str(note)) == note
    separators = FailureNote("failed", 1, "a\x1eb\x1fc\x1dd", "E at\x1e x.py:1")
    assert FailureNote.parse_all(str(separators)) == [FailureNote("failed", 1, "a b c d", "E at  x.py:1")]
