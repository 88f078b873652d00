"""Finds queues that no registry names, by a walk over the key space in short steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.call import Command, id_text
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout, is_name

if TYPE_CHECKING:
    from reliq.client.client import Client

#: Keys in one step; it keeps Redis busy for less than a millisecond.
STEP_KEYS = 1000
#: How the keys end by which a queue is known, with their types: that of the retries left, which every queue has that
#: holds a message, whoever wrote it; and that of the dead letters, which a drained queue may have alone.
ENDS = {":retry:cnt": "hash", ":dead": "stream"}
#: It matches both, and little else.
_PATTERN = "*:[dr]e[at][dr]*"


def scanned(client: Client, for_seconds: float) -> list[Keys]:
    """
    Return every queue that holds a message or a dead letter, in whatever layout, by name.

    Redis walks over all its keys, a step at a time, so that others are served meanwhile.
    """
    found: dict[str, Keys] = {}
    cursor = "0"
    while True:
        step: Command[tuple[str, list[str]]] = Command(("SCAN", cursor, "MATCH", _PATTERN, "COUNT", STEP_KEYS), _scan)
        cursor, keys = client.run(step, for_seconds=for_seconds)
        for base in _bases(client, keys, for_seconds) - found.keys():
            if (queue := _queue(client, base, for_seconds)) is not None:
                found[base] = queue
        if cursor == "0":
            break
    return sorted(found.values(), key=lambda keys: (keys.name, keys.layout.prefix))


def _scan(reply: Any) -> tuple[str, list[str]]:
    cursor, keys = reply
    return cursor.decode(), [id_text(key) for key in keys]


def _bases(client: Client, keys: list[str], for_seconds: float) -> set[str]:
    """Return what stands before the end of each of `keys` by which a queue is known."""
    ending = [(key, end) for key in keys for end in ENDS if key.endswith(end)]
    types = client.run_all([Command(("TYPE", key), bytes.decode) for key, _ in ending], for_seconds=for_seconds)
    return {key.removesuffix(end) for (key, end), kind in zip(ending, types, strict=True) if kind == ENDS[end]}


def _queue(client: Client, base: str, for_seconds: float) -> Keys | None:
    """Return the queue whose keys begin with `base`; None when no queue can be called so."""
    tagged = base.startswith("{") and base.endswith("}")
    parts = (base[1:-1] if tagged else base).split(":")
    if tagged and parts[0] == Layout.RELIQ.prefix:
        name = ":".join(parts[1:])
        return Keys(name) if is_name(name) else None
    splits = [1] if parts[0] == "dp" else range(1, len(parts))
    candidates = [
        keys for at in splits if (keys := _keys(":".join(parts[at:]), ":".join(parts[:at]), tagged=tagged)) is not None
    ]
    return _with_bodies(client, candidates, for_seconds) if len(candidates) > 1 else next(iter(candidates), None)


def _keys(name: str, prefix: str, *, tagged: bool) -> Keys | None:
    try:
        return Keys(name, Layout.hdt3213(hash_tag=tagged, prefix=prefix))
    except ConfigurationError:
        return None


def _with_bodies(client: Client, candidates: list[Keys], for_seconds: float) -> Keys:
    """Return the one whose message has a body, else the first: prefix and name may both have colons."""
    keys = candidates[0]
    ids = client.run(
        Command(("HRANDFIELD", keys.counts, 1), lambda reply: list(map(id_text, reply))), for_seconds=for_seconds
    )
    asked = [Command(("EXISTS", keys.msg(id)), bool) for keys in candidates for id in ids]
    bodies = client.run_all(asked, for_seconds=for_seconds) if asked else []
    return next((keys for keys, has in zip(candidates, bodies, strict=False) if has is True), keys)
