"""The limits of a queue as they are now, and their change while it is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq import transitions
from reliq.admin import queue_queries
from reliq.errors import ConfigurationError
from reliq.limits import Limits
from reliq.publish.route import check_one_shard
from reliq.text import typed
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reliq.admin.session import QueueSession
    from reliq.queue import Queue

#: The limits that may be cleared, each with the fields of the hash `limits` that say it; a burst goes with its rate.
FIELDS = {
    "ordered": ("ordered", "per_key"),
    "per_key": ("per_key",),
    "rate": ("rate_us", "burst"),
    "burst": ("burst",),
    "key_rate": ("key_rate_us", "key_burst"),
    "key_burst": ("key_burst",),
    "concurrency": ("concurrency",),
}
#: A weight is cleared by `weight:KEY`, all of them by `key_weights`.
WEIGHT, WEIGHTS = "weight:", "key_weights"
#: Fields that scripts write for themselves.
_OWN = frozenset({"on", "declared", "weighted", "walk"})


def limits_of(queue: QueueSession) -> Limits:
    """Return the limits of a queue; raise ConfigurationError for a value there that is none."""
    stored = queue.run(queue_queries.limit_fields(queue.keys))
    return _read(queue, stored)


def set_limits(
    queue: QueueSession, publisher: Queue[bytes], changes: Mapping[str, Any], clear: Sequence[str]
) -> Limits:
    """
    Clear limits, change others, and return what holds then.

    Raises:
        ConfigurationError: a limit is not allowed, or the queue cannot have any: it has the Go layout or several shards.
    """
    if queue.keys.bare:
        raise ConfigurationError(f"queue {queue.name!r} has the Go layout: its programs know no limits")
    given = {name: value for name, value in changes.items() if value is not None}
    weights = given.pop(WEIGHTS, {})
    stored = queue.run(queue_queries.limit_fields(queue.keys))
    now = _read(queue, _without(stored, [*clear, *given, *(WEIGHT + key for key in weights)]))
    kept = {name: getattr(now, name) for name in (*FIELDS, WEIGHTS)}
    after = Limits(**{**kept, **given, WEIGHTS: {**now.key_weights, **weights}})
    publisher.known_shards.read(for_seconds=PUBLISH_SECONDS)
    check_one_shard(publisher.known_shards)
    wanted = after.fields()
    if fields := _changed(stored, wanted):
        queue.run(transitions.limit(queue.keys, fields))
    return Limits.read(wanted)


def _read(queue: QueueSession, stored: Mapping[str, str]) -> Limits:
    try:
        return Limits.read(stored)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}; `{typed('limits', queue.name, options=['--clear', 'NAME'])}` removes it"
        ) from None


def _without(stored: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the stored fields without those of the limits named; raise ConfigurationError for one that is none."""
    gone = set[str]()
    for name in names:
        if name in FIELDS:
            gone |= {*FIELDS[name]}
        elif name == WEIGHTS or name.startswith(WEIGHT):
            gone |= {field for field in stored if field == name or (name == WEIGHTS and field.startswith(WEIGHT))}
        else:
            raise ConfigurationError(
                f"what is cleared must be one of {', '.join(FIELDS)}, {WEIGHTS} or weight:KEY, not {name[:80]!r}"
            )
    return {field: value for field, value in stored.items() if field not in gone}


def _changed(stored: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the fields to write; an empty one goes."""
    new = {field: value for field, value in wanted.items() if stored.get(field) != value and field not in _OWN}
    return new | dict.fromkeys(stored.keys() - wanted.keys() - _OWN, "")
