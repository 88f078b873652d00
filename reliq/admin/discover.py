"""Finds queues that no registry names, by a walk over the key space in short steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reliq.admin import queries, server
from reliq.admin.workers import workers_alive
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.keys import QUEUES_KEY, Keys, Layout, is_name
from reliq.snapshot.snapshot import Chosen, registered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.session import Session

#: Keys in one step; it keeps Redis busy for less than a millisecond.
STEP_KEYS = 1000
#: A queue is known by keys with these ends, of these types: every queue that holds a message has its retries left,
#: whoever wrote it; a drained queue may have its dead letters alone.
KEY_ENDINGS = {":retry:cnt": "hash", ":dead": "stream"}
#: The pattern matches both ends, and little else.
_PATTERN = "*:[dr]e[at][dr]*"


def chosen(session: Session, named: Sequence[Keys], *, scan: bool = False) -> Chosen:
    """Return the queues named; without names those of the registry, and with `scan` those of a scan, by name."""
    if named:
        return Chosen(named)
    try:
        known = registered(session.client, lambda: _served(session))
    except RedisUnavailableError as error:
        why = f"the Redis of the queue registry, {QUEUES_KEY}, is away ({error}); name the queues to show"
        raise RedisUnavailableError(why) if session.client.has_many else error from None
    found = {keys.totals: keys for keys in known.queues}
    if scan:
        found |= {keys.totals: keys for keys in scanned(session)}
    return Chosen(sorted(found.values(), key=lambda keys: keys.name), known.left_out)


def _served(session: Session) -> list[Keys]:
    """Return the queues that workers serve."""
    return [Keys(name) for name in {name for one in workers_alive(session) for name in one.queues} if is_name(name)]


def scanned(session: Session) -> list[Keys]:
    """
    Return every queue that holds a message or a dead letter, in whatever layout, by name.

    Each server walks over all its keys, a step at a time, so that others are served meanwhile.
    """
    found: dict[str, Keys] = {}
    for server_session in session.each().values():
        for keys in server_session.scan(partial(server.keys_scanned, _PATTERN, count=STEP_KEYS)):
            for base in _bases(session, keys) - found.keys():
                if (queue := _queue(session, base)) is not None:
                    found[base] = queue
    queues = {keys.totals: keys for keys in found.values()}  # shards of one queue are found by several keys
    return sorted(queues.values(), key=lambda keys: (keys.name, keys.layout.prefix))


def _bases(session: Session, keys: list[str]) -> set[str]:
    """Return the beginnings of those of `keys` by whose ends a queue is known."""
    ending = [(key, end) for key in keys for end in KEY_ENDINGS if key.endswith(end)]
    types = session.try_all([server.type_of_key(key) for key, _ in ending])
    return {key.removesuffix(end) for (key, end), kind in zip(ending, types, strict=True) if kind == KEY_ENDINGS[end]}


def _queue(session: Session, base: str) -> Keys | None:
    """Return the queue whose keys begin with `base`; None when no queue can be called so."""
    tagged = base.startswith("{") and base.endswith("}")
    parts = (base[1:-1] if tagged else base).split(":")
    if tagged and parts[0] == Layout.RELIQ.prefix:
        name = ":".join(parts[1:]).partition("#")[0]  # behind it stands which shard
        return Keys(name) if is_name(name) else None
    splits = [1] if parts[0] == "dp" else range(1, len(parts))
    candidates = [
        keys for at in splits if (keys := _keys(":".join(parts[at:]), ":".join(parts[:at]), tagged=tagged)) is not None
    ]
    return _with_bodies(session, candidates) if len(candidates) > 1 else next(iter(candidates), None)


def _keys(name: str, prefix: str, *, tagged: bool) -> Keys | None:
    try:
        return Keys(name, Layout.hdt3213(hash_tag=tagged, prefix=prefix))
    except ConfigurationError:
        return None


def _with_bodies(session: Session, candidates: list[Keys]) -> Keys:
    """Return the one whose message has a body, else the first: prefix and name may both have colons."""
    keys = candidates[0]
    ids = session.run(queries.any_id(keys))
    asked = [queries.has_value(keys, id) for keys in candidates for id in ids]
    bodies = session.try_all(asked)
    return next((keys for keys, has in zip(candidates, bodies, strict=False) if has is True), keys)
