"""The limits of a queue with keys are written."""

from collections.abc import Mapping

from reliq.call import Call
from reliq.keys import Keys
from reliq.lua import script
from reliq.transitions.protocol import clock_arg


def limit(keys: Keys, fields: Mapping[str, str], *, declared: str = "", clock: int | None = None) -> Call[bool]:
    """
    Write limits, and have the keys served again that may be by them; say whether they were written.

    Args:
        fields: as `reliq.limits` names them; an empty value removes one.
        declared: the text of a declaration: its fields take the place of all others, unless the declaration that was
            written last is the same. Empty: the fields alone are written.
    """
    one = script("limit")
    return Call(
        one,
        one.lead(keys),
        (clock_arg(clock), declared, *(part for field in fields.items() for part in field)),
        bool,
    )
