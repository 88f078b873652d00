"""Readers of the replies of plain commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from reliq.call import id_text
from reliq.failure_note import FailureNote
from reliq.foreign import moment, whole_number
from reliq.message import Letter, Pause
from reliq.roster import Worker
from reliq.wireformat import open_envelope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.keys import Keys

#: Characters that are read of a pause's reason which something else than reliq wrote.
FOREIGN_REASON_LIMIT = 200

_pause_decoder = msgspec.json.Decoder(Pause)
_worker_decoder = msgspec.json.Decoder(Worker)


def read_nothing(_reply: object) -> None:
    """Read nothing from the reply."""


def read_bytes(reply: Any) -> bytes:
    """Return a reply as it is; raise ValueError for one that is none: `bytes` would make any number into zeros."""
    if not isinstance(reply, bytes):
        raise ValueError  # noqa: TRY004  as of any reply that is none
    return reply


def read_text(reply: bytes | None) -> str:
    """Return a text; empty for nothing."""
    return "" if reply is None else reply.decode("utf-8", "replace")


def read_id(reply: bytes | None) -> str:
    """Return an id; empty for nothing."""
    return id_text(reply) if reply else ""


def read_ids(reply: Sequence[bytes]) -> list[str]:
    """Return ids."""
    return [id_text(one) for one in reply]


def read_scores(reply: Any) -> list[tuple[str, float]]:
    """Return ids with their scores, as RESP 2 and RESP 3 tell them."""
    return [(id, moment(score)) for id, score in read_raw_scores(reply)]


def read_raw_scores(reply: Any) -> list[tuple[str, float]]:
    """Return ids with their scores as Redis has them: any numbers."""
    pairs = reply if reply and isinstance(reply[0], list | tuple) else zip(reply[::2], reply[1::2], strict=True)
    return [(id_text(member), float(score)) for member, score in pairs]


def read_facts(reply: bytes) -> dict[str, str]:
    """Return the fields of INFO."""
    rows = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: told for name, colon, told in rows if colon}


def read_pause(reply: bytes) -> Pause:
    """Return a pause; of a value that something else wrote the start of its text is the reason."""
    try:
        return _pause_decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Pause("", None, reply.decode("utf-8", "replace")[:FOREIGN_REASON_LIMIT])


def read_worker(reply: bytes | None) -> Worker | None:
    """Return a worker's record; None for one that is gone or that something else wrote."""
    if reply is None:
        return None
    try:
        return _worker_decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_letter(row: Any, keys: Keys) -> Letter:
    """Return the dead letter in an entry of the stream `dead` of a shard."""
    name, pairs = row[0].decode(), row[1]
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))  # something else may have written others than ours
    header, payload = open_envelope(fields.get(b"value", b""), bare=keys.bare)
    note = FailureNote.parse(fields.get(b"note"))
    attempts = note.attempt
    if attempts is None and header.retries is not None:
        attempts = header.retries + 1  # only a message with no retry left ends by its lease
    # One that came from another shard says when it died: its name here says when it came.
    death = fields.get(b"died", row[0]).split(b"-")[0]
    id, died = id_text(fields.get(b"id", b"")), moment((whole_number(death) or 0) / 1000)
    return Letter(name, id, note.reason, note.error, attempts, died, header, payload, note.raised, keys.shard)
