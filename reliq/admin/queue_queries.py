"""The plain commands by which operators look at a queue as a whole, and at its keys."""

from __future__ import annotations

from reliq.admin.places import TYPES
from reliq.call import Command, id_text
from reliq.keys import QUEUES_KEY, Keys
from reliq.replies import read_text
from reliq.rights import runs


@runs(
    " ".join(f"{name}:EXISTS" for name in ("pending", "ready", "unack", "retry", "garbage", "retries_left", "dead"))
    + " totals:EXISTS ends:EXISTS paused:EXISTS cron:EXISTS"
)
def key_count(keys: Keys) -> Command[int]:
    """Count the keys of a queue that only a queue has which was used."""
    places = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.retries_left)
    return Command(("EXISTS", *places, keys.dead, keys.totals, keys.ends, keys.paused, keys.cron), int)


@runs("retries_left:EXISTS totals:EXISTS")
def is_used(keys: Keys) -> Command[bool]:
    """Say whether a queue has messages, or a total."""
    return Command(("EXISTS", keys.retries_left, keys.totals), bool)


@runs("totals:HGETALL")
def raw_totals(keys: Keys) -> Command[list[bytes]]:
    """Read the account of a queue, names and numbers by turns, as Redis has them."""
    return Command(("HGETALL", keys.totals), list)


@runs("paused:PTTL")
def pause_ms(keys: Keys) -> Command[int]:
    """Return for how many ms more a queue is paused; below 0 when it waits for its resume, or is not paused."""
    return Command(("PTTL", keys.paused), int)


@runs("limits:HGETALL")
def limit_fields(keys: Keys) -> Command[dict[str, str]]:
    """Read the limits of a queue as Redis has them; empty for a queue without keys."""
    return Command(
        ("HGETALL", keys.limits),
        lambda reply: {id_text(name): id_text(value) for name, value in zip(reply[::2], reply[1::2], strict=True)},
    )


@runs(" ".join(f"{name}:TYPE" for name in TYPES))
def type_of(keys: Keys, name: str) -> Command[str]:
    """Return the type of the key `name` of a queue, one of `TYPES`."""
    return Command(("TYPE", getattr(keys, name)), bytes.decode)


@runs(" ".join(f"{name}:RENAMENX" for name in (*TYPES, "aside")))
def put_aside(keys: Keys, name: str, stamp: int) -> Command[bool]:
    """Give the key `name` of a queue another name, of which `stamp` is a part; say whether that name was free."""
    return Command(("RENAMENX", getattr(keys, name), keys.aside(name, stamp)), bool)


@runs("QUEUES_KEY:HEXISTS")
def is_registered(keys: Keys) -> Command[bool]:
    """Say whether the registry names a queue."""
    return Command(("HEXISTS", QUEUES_KEY, keys.entry), bool)


@runs("QUEUES_KEY:HGET")
def registered_at(keys: Keys) -> Command[bytes]:
    """Read the unix seconds at which a process last named a queue in the registry; empty when none did."""
    return Command(("HGET", QUEUES_KEY, keys.entry), lambda reply: reply or b"")


@runs("QUEUES_KEY:HDEL")
def unregister(keys: Keys) -> Command[int]:
    """Take a queue out of the registry."""
    return Command(("HDEL", QUEUES_KEY, keys.entry), int)


# ---- a move to another queue


@runs("moving:SET")
def note_move(keys: Keys, to: str, *, only_first: bool) -> Command[bool]:
    """Note to which queue messages are being moved; say whether it was noted: `only_first` keeps an earlier note."""
    condition = ("NX",) if only_first else ()
    return Command(("SET", keys.moving, to, *condition), lambda reply: reply is not None)


@runs("moving:GET")
def noted_move(keys: Keys) -> Command[str]:
    """Read to which queue messages are being moved; empty when none are."""
    return Command(("GET", keys.moving), read_text)


@runs("moving:DEL")
def drop_move(keys: Keys) -> Command[int]:
    """Note that no messages are being moved."""
    return Command(("DEL", keys.moving), int)
