"""Finds queues that no registry names, by a walk over the key space in short steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reliq.call import Command
from reliq.keys import Keys, Layout, is_name

if TYPE_CHECKING:
    from reliq.doors.blocking import BlockingDoor

#: Keys in one step; it keeps Redis busy for less than a millisecond.
STEP_KEYS = 1000
#: Every queue that holds a message that has not ended has this key, whoever wrote it.
_RETRIES_LEFT = ":retry:cnt"
_PLACE = re.compile(r"(?P<tag>\{)?(?P<prefix>[^{}]+):(?P<name>[^{}:]+)(?(tag)\})")


def scanned(door: BlockingDoor, for_seconds: float) -> list[Keys]:
    """
    Return every queue that holds a message which has not ended, in whatever layout, by name.

    Redis walks over all its keys, a step at a time, so that others are served meanwhile.
    """
    found: set[str] = set()
    cursor = "0"
    while True:
        step: Command[tuple[str, list[str]]] = Command(
            ("SCAN", cursor, "MATCH", f"*{_RETRIES_LEFT}", "COUNT", STEP_KEYS), _scan
        )
        cursor, keys = door.run(step, for_seconds=for_seconds)
        found.update(keys)
        if cursor == "0":
            break
    queues = [queue for key in sorted(found) if (queue := _queue(key)) is not None]
    return sorted(queues, key=lambda keys: (keys.name, keys.layout.prefix))


def _scan(reply: Any) -> tuple[str, list[str]]:
    cursor, keys = reply
    return cursor.decode(), [key.decode("utf-8", "replace") for key in keys]


def _queue(key: str) -> Keys | None:
    """Return the queue whose retry counts are in `key`, None when no queue of ours could be called so."""
    place = _PLACE.fullmatch(key.removesuffix(_RETRIES_LEFT))
    if place is None or not is_name(place["name"]):
        return None
    if place["tag"] and place["prefix"] == Layout.RELIQ.prefix:
        return Keys(place["name"])
    return Keys(place["name"], Layout.hdt3213(hash_tag=bool(place["tag"]), prefix=place["prefix"]))
