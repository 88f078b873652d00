"""Data that something else than reliq may have written: text is shown harmlessly, numbers are read within bounds."""

import re

#: The last second of the year 9999: a date cannot say more.
LAST_SECOND = 253_402_300_799

_UNUSUAL = re.compile(r"[^\x20-\x7e]")
_WHOLE = re.compile(r"-?[0-9]{1,19}")


def printable(text: str) -> str:
    """Return `text` in one line, every character escaped that a terminal obeys, hides, or shows elsewhere."""
    return text if text.isprintable() else _UNUSUAL.sub(_shown, text)


def whole_number(text: str | bytes) -> int | None:
    """Return the number that `text` is, of at most 19 digits; None for any other text."""
    digits = text if isinstance(text, str) else text.decode("ascii", "replace")
    return int(digits) if _WHOLE.fullmatch(digits) else None


def moment(seconds: float) -> float:
    """Return unix seconds that have a date, to the ms: what lies before 1970 or after 9999 is the nearest that does."""
    return round(min(max(float(seconds), 0.0), float(LAST_SECOND)), 3)


def _shown(one: re.Match[str]) -> str:
    return one[0] if one[0].isprintable() else one[0].encode("unicode_escape").decode()
