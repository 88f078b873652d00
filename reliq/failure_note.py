"""
The notes that Redis keeps of why a message failed; no other module spells or reads one.

A message has one value of them (hash `errors`, field `note` of dead letters and of ends): the newest failure first, and
at most nine before it, apart by RS. Each is `REASON ATTEMPT TEXT`, with `-` for an attempt that nobody knows; then US
RAISED US BY US TOOK_MS, and GS AT_MS, which the script adds. Notes of earlier versions end with their text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reliq.foreign import whole_number

#: They part the failures of a message, the time from the rest of one, and the fields of that.
RS, GS, US = "\x1e", "\x1d", "\x1f"
#: Failures of one message that are read.
FAILURES_LIMIT = 10

_SEPARATORS = re.compile(r"[\x1d-\x1f]")


@dataclass(frozen=True, slots=True)
class FailureNote:
    """
    One failure of a message.

    Attributes:
        reason: one of `DEATH_REASONS`; empty when nothing is known.
        attempt: the delivery that failed, 1 for the first; None when nobody knows.
        text: what the exception or the handler said; it may hold a piece of a body.
        raised: class and place of the exception, and of its causes, which hold none; empty when nothing was raised.
        by: the process that ran the handler, as host:pid; empty when nobody says.
        took_ms: for how many ms the handler ran; None when nobody says.
        at_ms: when it failed, in unix ms by Redis' clock; None when nobody says.
    """

    reason: str = ""
    attempt: int | None = None
    text: str = ""
    raised: str = ""
    by: str = ""
    took_ms: int | None = None
    at_ms: int | None = None

    @classmethod
    def parse(cls, value: str | bytes | None) -> FailureNote:
        """Return the newest failure of a value; of one that something else wrote, as far as it has the parts."""
        return next(iter(cls.parse_all(value)), cls())

    @classmethod
    def parse_all(cls, value: str | bytes | None) -> list[FailureNote]:
        """Return the failures of a value, the newest first."""
        told = value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
        return [cls._one(note) for note in told.split(RS, FAILURES_LIMIT)[:FAILURES_LIMIT] if note]

    @classmethod
    def _one(cls, note: str) -> FailureNote:
        told, _, at = note.partition(GS)
        first, raised, by, took = [*told.split(US, 3), "", "", ""][:4]
        reason, attempt, text = [*first.split(" ", 2), "", ""][:3]
        return cls(reason, whole_number(attempt), text, raised, by, whole_number(took), whole_number(at))

    def __str__(self) -> str:
        attempt, took = ("-" if number is None else str(number) for number in (self.attempt, self.took_ms))
        texts = (_SEPARATORS.sub(" ", text) for text in (self.text, self.raised, self.by))
        told = f"{self.reason} {attempt} " + US.join((*texts, took.strip("-")))
        return told.rstrip(US) + ("" if self.at_ms is None else f"{GS}{self.at_ms}")

    @property
    def error(self) -> str:
        """The text, and the places of an exception and its causes."""
        places = self.raised.partition(" ")[2]
        return f"{self.text} ({places})" if places else self.text

    @property
    def summary(self) -> str:
        """Reason and error for a person."""
        return f"{self.reason}: {self.error}" if self.error else self.reason
