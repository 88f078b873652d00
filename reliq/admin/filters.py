"""Filters: which messages, and which dead letters, an operator chooses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reliq.errors import ConfigurationError
from reliq.message import DEATH_REASONS
from reliq.settings import check_is_one_of, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.message import Header, Letter

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """
    A choice of messages by what they carry; without arguments, all of them.

    Attributes:
        headers: names and values that a message's headers must have.
        match: text that its body must have, as it is or as JSON escapes it.
        key: that it must have; empty for all.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    match: str = ""
    key: str = ""

    @property
    def is_set(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.headers or self.match or self.key)

    def tester(self) -> Callable[[Header, bytes], bool]:
        """Return a function that says whether the filter chooses a message, given its header and body."""
        wanted = self.headers.items()
        needles = _spellings(self.match)

        def test(header: Header, payload: bytes) -> bool:
            carries = wanted <= header.headers.items() and any(needle in payload for needle in needles)
            return carries and self.key in ("", header.key)

        return test

    def of_letters(self) -> LetterFilter:
        """Return the filter that chooses dead letters by what they carry alone."""
        return LetterFilter(headers=self.headers, match=self.match, key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter(Filter):
    """
    A choice of dead letters by what they carry and how they died; without arguments, all of them.

    Attributes:
        ids: of messages; empty for all.
        reason: one of `DEATH_REASONS`; empty for all.
        raised: class and place of the exception, exactly as letters have it; empty for letters that have none, None
            for all.
        error: text that the last error must have.
        older_than, newer_than: seconds since the death, or None.

    Raises:
        ConfigurationError: a reason that is none, or an age that is not allowed.
    """

    ids: frozenset[str] = frozenset()
    reason: str = ""
    raised: str | None = None
    error: str = ""
    older_than: float | None = None
    newer_than: float | None = None

    def __post_init__(self) -> None:
        if self.reason:
            check_is_one_of("reason", self.reason, DEATH_REASONS)
        for name in ("older_than", "newer_than"):
            if getattr(self, name) is not None:
                seconds(name, getattr(self, name))

    @property
    def is_set(self) -> bool:
        """Whether it leaves anything out."""
        said = (self.headers, self.match, self.key, self.ids, self.reason, self.error)
        return any(said) or (self.raised, self.older_than, self.newer_than) != (None, None, None)

    def of_letters(self) -> LetterFilter:
        """Return the filter itself."""
        return self

    def letter_tester(self) -> Callable[[Letter], bool]:
        """Return a function that says whether the filter chooses a letter; it does not look at its age (see `span`)."""
        carries = self.tester()

        def test(letter: Letter) -> bool:
            return (
                (not self.ids or letter.id in self.ids)
                and (not self.reason or letter.reason == self.reason)
                and self.raised in (None, letter.raised)
                and self.error in letter.error
                and carries(letter.header, letter.payload)
            )

        return test

    def span(self, now_ms: int) -> tuple[str, str]:
        """Return the first and the last id that letters of the wanted age can have."""
        first = "-" if self.newer_than is None else f"{max(0, now_ms - round(self.newer_than * 1000))}"
        last = "+" if self.older_than is None else f"{max(0, now_ms - round(self.older_than * 1000))}"
        return first, last


EVERYTHING = Filter()
EVERY_LETTER = LetterFilter()


def ignore(*_seen: Any) -> None:
    """Do nothing with a step: its caller does not ask how far it is."""


def duration(text: str) -> float:
    """Return `30s`, `10m`, `2h`, `1d`, `1h30m`, `250ms` or plain seconds as seconds; else raise ConfigurationError."""
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    raise ConfigurationError(f"a duration is written 30s, 10m, 2h, 1d or 1h30m, not {text[:40]!r}")


def headers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Return `NAME=VALUE` texts as headers; raise ConfigurationError for another form."""
    headers = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"a header is written NAME=VALUE, such as tenant=acme, not {one[:40]!r}")
        headers[name] = value
    return headers


def _spellings(text: str) -> tuple[bytes, ...]:
    """Return the bytes that `text` may be in a body: UTF-8, or escaped as some writers of JSON do."""
    return tuple({text.encode("utf-8", "surrogatepass"), json.dumps(text)[1:-1].encode()})
