"""States of messages, filters and roles of Redis users, as operators name them in commands."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from reliq.errors import ConfigurationError
from reliq.message import DEATH_REASONS, DeadLetter, Header
from reliq.settings import check_is_one_of, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Place = Literal["pending", "ready", "waiting", "unack", "retry", "garbage", "dead", "ended"]
PLACES: tuple[Place, ...] = get_args(Place)
#: Messages in these states can be cancelled, or moved to another queue.
CANCELLABLE: tuple[Place, ...] = ("pending", "ready", "waiting", "retry", "unack")
#: Messages in these states can be deleted.
PURGEABLE: tuple[Place, ...] = (*CANCELLABLE, "garbage", "dead")

#: Each role has the rights that one kind of process or person needs.
Role = Literal["producer", "consumer", "operator", "viewer", "exporter"]
ROLES: tuple[Role, ...] = get_args(Role)

EndKind = Literal["dead", "expired", "cancelled", "purged", "acked"]
END_KINDS: tuple[EndKind, ...] = get_args(EndKind)

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhd])")

#: The fields of `Filter` that apply to messages that have not ended.
_OF_MESSAGES = {"headers", "match", "key"}
#: For each state of ended messages, the fields of `Filter` that apply to its messages.
_OF_ENDED = {
    "dead": _OF_MESSAGES | {"ids", "reason", "raised", "error", "older_than", "newer_than"},
    "ended": {"ids", "reason", "error", "older_than", "newer_than", "kind"},
}


def check_place(place: str, allowed: Sequence[Place] = PLACES) -> Place:
    """Return `place`, the name of a state; raise ConfigurationError if it is not in `allowed`."""
    check_is_one_of("state", place, allowed)
    return cast("Place", place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """
    A filter for the messages of a state; without arguments, it matches every message.

    Attributes:
        headers: names and values that a message's headers must contain.
        match: text that a message's body must contain, as UTF-8 or with JSON escapes.
        key: the message key; empty for all.
        ids: message ids; empty for all. This field and the fields below apply only to dead letters and ended messages.
        reason: one of `DEATH_REASONS`; empty for all.
        raised: class and source line of the exception, exactly as `DeadLetter.raised`; None for all, empty for dead
            letters without an exception.
        error: text that the last error must contain.
        older_than, newer_than: lowest and highest number of seconds since the message ended; None for no bound.
        kind: how the message ended: `dead`, `expired`, `cancelled`, `purged` or `acked`; empty for all messages that
            were not acked.

    Raises:
        ConfigurationError: the reason or kind is unknown, or an age is not allowed.
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
        """Whether any field is set; without a field, the filter matches every message."""
        return self != EVERYTHING

    def check(self, state: str) -> None:
        """Raise ConfigurationError if a field is set that does not apply to messages of `state`."""
        allowed = _OF_ENDED.get(state, _OF_MESSAGES)
        for name in self.__dataclass_fields__:
            if name not in allowed and getattr(self, name) != getattr(EVERYTHING, name):
                raise ConfigurationError(
                    f"a filter for {state} messages cannot have {name!r}, only {', '.join(sorted(allowed))}"
                )

    def chooses(self, header: Header, body: bytes) -> bool:
        """Return whether the filter matches a message with this header and body."""
        carries = self.headers.items() <= header.headers.items() and self.key in ("", header.key)
        # Search for the text as UTF-8, and with the escapes that some JSON encoders write.
        spellings = (self.match.encode("utf-8", "surrogatepass"), json.dumps(self.match)[1:-1].encode())
        return carries and any(spelling in body for spelling in spellings)

    def chooses_letter(self, letter: DeadLetter) -> bool:
        """Return whether the filter matches a dead letter. Ages are not compared; `span` selects by age."""
        return (
            self.chooses_end(letter.id, "dead", letter.reason, letter.error)
            and self.raised in (None, letter.raised)
            and self.chooses(letter.header, letter.payload)
        )

    def chooses_end(self, id: str, kind: str, reason: str, error: str) -> bool:
        """Return whether the filter matches an ended message. Ages are not compared; `span` selects by age."""
        return (
            (not self.ids or id in self.ids)
            and self.kind in ("", kind)
            and self.reason in ("", reason)
            and self.error in error
        )

    def span(self, now_ms: int) -> tuple[str, str]:
        """Return the range of stream ids of messages whose age matches `newer_than` and `older_than`."""
        first = "-" if self.newer_than is None else f"{max(0, now_ms - round(self.newer_than * 1000))}"
        last = "+" if self.older_than is None else f"{max(0, now_ms - round(self.older_than * 1000))}"
        return first, last


EVERYTHING = Filter()


def ignore(*_seen: Any) -> None:
    """Do nothing. This is the default callback of methods that report their progress."""


def duration(text: str) -> float:
    """
    Return the seconds of a duration that is written as a text, such as `10m`.

    Valid forms are `30s`, `10m`, `2h`, `1d`, `1h30m`, `250ms`, and a number of seconds without a unit. For other texts,
    raise ConfigurationError.
    """
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    raise ConfigurationError(f"a duration is written 30s, 10m, 2h, 1d or 1h30m, not {text[:40]!r}")


def headers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Convert texts of the form `NAME=VALUE` to a dict of headers; raise ConfigurationError for other texts."""
    headers = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"a header is written NAME=VALUE, such as tenant=acme, not {one[:40]!r}")
        headers[name] = value
    return headers
