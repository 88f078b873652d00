"""Plain commands around the transitions: each is safe to repeat."""

from collections.abc import Sequence
from typing import Any

import msgspec

from reliq.call import Command, id_text
from reliq.foreign import moment
from reliq.keys import QUEUES_KEY, Keys, pattern
from reliq.message import Confirmed, Letter, Pause
from reliq.settings import BATCH_LIMIT, Durability, milliseconds
from reliq.wireformat import FailureNote, open_envelope

#: So much is read of a reason that something else than reliq wrote.
FOREIGN_REASON_LIMIT = 200
#: Keys that Redis looks at in one step of a walk through the key space: some 0.3 ms.
SCANNED_KEYS = 1000

_pause_decoder = msgspec.json.Decoder(Pause)


def bodies(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the values of messages; None where there is none."""
    return Command(("MGET", *map(keys.msg, ids)), lambda reply: [_value(one) for one in reply])


def wake_token(keys: Keys, for_seconds: float) -> Command[bool]:
    """Take the token that says there is something to claim, waiting for it; say whether it came."""
    return Command(("BLPOP", keys.wake, f"{for_seconds:.3f}"), lambda reply: reply is not None)


def garbage(keys: Keys, count: int) -> Command[list[str]]:
    """Return up to `count` ids that wait to be collected."""
    return Command(("SRANDMEMBER", keys.garbage, count), lambda reply: [id_text(one) for one in reply])


def claims(keys: Keys) -> Command[int]:
    """Return how many deliveries the queue has counted: a number that only grows."""
    return Command(("HGET", keys.totals, "claimed"), lambda reply: int(reply or 0))


def letters(keys: Keys, *, count: int, after: str = "") -> Command[list[Letter]]:
    """Return up to `count` dead letters, oldest first, those after the letter `after`."""
    start = f"({after}" if after else "-"
    return Command(
        ("XRANGE", keys.dead, start, "+", "COUNT", count), lambda reply: [_letter(row, keys.bare) for row in reply]
    )


def letters_between(
    keys: Keys, first: str, last: str, *, count: int, newest_first: bool = False
) -> Command[list[Letter]]:
    """Return up to `count` dead letters from the place `first` to `last` of their stream, both included."""
    command, places = ("XREVRANGE", (last, first)) if newest_first else ("XRANGE", (first, last))
    return Command(
        (command, keys.dead, *places, "COUNT", count), lambda reply: [_letter(row, keys.bare) for row in reply]
    )


def first_due(keys: Keys) -> Command[float | None]:
    """Read when the first message in pending is due, in unix seconds; None when there is none."""
    return Command(
        ("ZRANGE", keys.pending, 0, 0, "WITHSCORES"), lambda reply: next(iter(_scores(reply)), (b"", None))[1]
    )


def held(keys: Keys) -> Command[list[tuple[bytes, float]]]:
    """Read the ids in unack that end first, at most BATCH_LIMIT, with when their lease or their backoff is over."""
    return Command(("ZRANGE", keys.unack, 0, BATCH_LIMIT - 1, "WITHSCORES"), _scores)


def words(keys: Keys, ids: Sequence[bytes]) -> Command[list[bytes | None]]:
    """Read what is noted of each lease."""
    return Command(("HMGET", keys.lease, *ids), list)


def body_ids(keys: Keys, cursor: int) -> Command[tuple[int, list[str]]]:
    """Return the next cursor, 0 at the end, and the ids of the bodies in a piece of the key space."""
    prefix = keys.msg("")
    return Command(
        ("SCAN", cursor, "MATCH", pattern(keys.msg("")) + "*", "COUNT", SCANNED_KEYS),
        lambda reply: (int(reply[0]), [id_text(key).removeprefix(prefix) for key in reply[1]]),
    )


def retries_left(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the retry counts of messages; None of one that has none."""
    return Command(("HMGET", keys.counts, *ids), list)


def pause(keys: Keys, pause: Pause, for_ms: int | None) -> Command[None]:
    """Have the queue not claimed: for so many ms, or until it is resumed."""
    limit = () if for_ms is None else ("PX", for_ms)
    return Command(("SET", keys.paused, msgspec.json.encode(pause), *limit), lambda _reply: None)


def paused(keys: Keys) -> Command[Pause | None]:
    """Read who paused the queue, when and why; None when it is not paused."""
    return Command(("GET", keys.paused), lambda reply: None if reply is None else _pause(reply))


def register(entries: Sequence[str], now_seconds: int) -> Command[None]:
    """Note in the registry that these queues are in use, each by its `Keys.entry`."""
    pairs = [part for entry in entries for part in (entry, str(now_seconds))]
    return Command(("HSET", QUEUES_KEY, *pairs), lambda _reply: None)


def confirmation(durability: Durability) -> Command[Confirmed]:
    """Wait until what came before on the same connection is confirmed; say what was."""
    count, timeout_ms = durability.count, milliseconds(durability.timeout)
    if durability.kind == "replicas":
        return Command(("WAIT", count, timeout_ms), lambda reply: Confirmed(int(reply) >= count, int(reply)))

    def on_disk(reply: Any) -> Confirmed:
        local, replicas = int(reply[0]) > 0, int(reply[1])
        done = replicas >= count and (local or not durability.local)
        return Confirmed(done, replicas, local if durability.local else None)

    return Command(("WAITAOF", int(durability.local), count, timeout_ms), on_disk)


def server_facts(section: str) -> Command[dict[str, str]]:
    """Return a section of INFO."""
    return Command(("INFO", section), _facts)


def _facts(reply: bytes) -> dict[str, str]:
    rows = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in rows if colon}


def _scores(reply: Any) -> list[tuple[bytes, float]]:
    """Return members with their scores, as RESP 2 and RESP 3 tell them."""
    pairs = reply if reply and isinstance(reply[0], list | tuple) else zip(reply[::2], reply[1::2], strict=True)
    return [(member, float(score)) for member, score in pairs]


def _pause(value: bytes) -> Pause:
    """Return what `pause` wrote; of any other value the start of its text is the reason."""
    try:
        return _pause_decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Pause("", None, value.decode("utf-8", "replace")[:FOREIGN_REASON_LIMIT])


def _value(reply: Any) -> bytes | None:
    return reply if isinstance(reply, bytes) else None


def _letter(row: Any, bare: bool) -> Letter:
    name, pairs = row[0].decode(), row[1]
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))  # something else may have written others than ours
    header, payload = open_envelope(fields.get(b"value", b""), bare=bare)
    note = FailureNote.parse(fields.get(b"note"))
    attempts = note.attempt
    if attempts is None and header.retries is not None:
        attempts = header.retries + 1  # only a message with no retry left ends by its lease
    id, died = id_text(fields.get(b"id", b"")), moment(int(name.split("-")[0]) / 1000)
    return Letter(name, id, note.reason, note.error, attempts, died, header, payload)
