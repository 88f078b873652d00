"""Filters: which messages of a state an operator chooses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from reliq.errors import ConfigurationError
from reliq.message import DEATH_REASONS
from reliq.settings import check_is_one_of, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.message import DeadLetter, Header

EndKind = Literal["dead", "expired", "cancelled", "purged", "acked"]
END_KINDS: tuple[EndKind, ...] = get_args(EndKind)

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhd])")

#: The fields of a filter that choose among messages that have not ended.
_OF_MESSAGES = {"headers", "match", "key"}
#: State -> the fields that choose among its messages, where they are others.
_OF_ENDED = {
    "dead": _OF_MESSAGES | {"ids", "reason", "raised", "error", "older_than", "newer_than"},
    "ended": {"ids", "reason", "error", "older_than", "newer_than", "kind"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """
    A choice among the messages of a state; without arguments, all of them.

    Attributes:
        headers: names and values that a message's headers must have.
        match: text that its body must have, as it is or as JSON escapes it.
        key: its message key; empty for all.
        ids: message ids; empty for all. This field and the fields below choose dead letters and ended messages.
        reason: one of `DEATH_REASONS`; empty for all.
        raised: class and place of the exception, exactly as dead letters have it; empty for dead letters without an
            exception, None for all.
        error: text that the last error must have.
        older_than, newer_than: seconds since the end, or None.
        kind: how an ended message ended: `dead`, `expired`, `cancelled`, `purged` or `acked`; empty for all but `acked`.

    Raises:
        ConfigurationError: an unknown reason or kind, or an age that is not allowed.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    match: str = ""
    key: str = ""
    ids: frozenset[str] = frozenset()
    reason: str = ""
    raised: str | None = None
    error: str = ""
    older_than: float | None = None
    newer_than: float | None = None
    kind: EndKind | Literal[""] = ""

    def __post_init__(self) -> None:
        if self.reason:
            check_is_one_of("reason", self.reason, DEATH_REASONS)
        if self.kind:
            check_is_one_of("kind", self.kind, END_KINDS)
        for name in ("older_than", "newer_than"):
            if getattr(self, name) is not None:
                seconds(name, getattr(self, name))

    @property
    def is_set(self) -> bool:
        """Whether the filter leaves any message out."""
        return self != EVERYTHING

    def check(self, state: str) -> None:
        """Raise ConfigurationError for a field that does not choose among the messages of a state."""
        allowed = _OF_ENDED.get(state, _OF_MESSAGES)
        for name in self.__dataclass_fields__:
            if name not in allowed and getattr(self, name) != getattr(EVERYTHING, name):
                raise ConfigurationError(
                    f"a filter of {state} messages has no {name!r}; it has {', '.join(sorted(allowed))}"
                )

    def chooses(self, header: Header, body: bytes) -> bool:
        """Report whether the filter chooses a message of this header and body."""
        carries = self.headers.items() <= header.headers.items() and self.key in ("", header.key)
        return carries and any(needle in body for needle in _spellings(self.match))

    def chooses_letter(self, letter: DeadLetter) -> bool:
        """Report whether the filter chooses a dead letter; `span` chooses by age."""
        return (
            self.chooses_end(letter.id, "dead", letter.reason, letter.error)
            and self.raised in (None, letter.raised)
            and self.chooses(letter.header, letter.payload)
        )

    def chooses_end(self, id: str, kind: str, reason: str, error: str) -> bool:
        """Report whether the filter chooses an ended message; `span` chooses by age."""
        return (
            (not self.ids or id in self.ids)
            and self.kind in ("", kind)
            and self.reason in ("", reason)
            and self.error in error
        )

    def span(self, now_ms: int) -> tuple[str, str]:
        """Return the first and the last stream id that ends of the wanted age can have."""
        first = "-" if self.newer_than is None else f"{max(0, now_ms - round(self.newer_than * 1000))}"
        last = "+" if self.older_than is None else f"{max(0, now_ms - round(self.older_than * 1000))}"
        return first, last


EVERYTHING = Filter()


def ignore(*_seen: Any) -> None:
    """Do nothing with a step: its caller does not follow the progress."""


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
