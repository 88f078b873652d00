"""Where a message of a queue can be, and what its keys are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

Place = Literal["pending", "ready", "unack", "retry", "garbage", "dead"]
PLACES: tuple[Place, ...] = get_args(Place)

#: The keys that a queue has one of, with their types.
TYPES = {
    "pending": "zset",
    "ready": "list",
    "unack": "zset",
    "retry": "list",
    "garbage": "set",
    "retries_left": "hash",
    "lease": "hash",
    "errors": "hash",
    "windows": "hash",
    "leaving": "hash",
    "arrived": "hash",
    "dead": "stream",
    "totals": "hash",
    "minutes": "hash",
    "cron": "hash",
    "wake": "list",
    "token": "string",
    "watch": "string",
    "paused": "string",
}

#: A message that is being moved to another queue is due this many ms later than it was: 126 years.
MOVING_MS = 4 * 10**12
#: Ids that are read in one step.
STEP_IDS = 250


def check_place(place: str, allowed: Sequence[Place] = PLACES) -> Place:
    """Return the name of a place; raise ConfigurationError for another. Users call it a state."""
    for one in allowed:
        if one == place:
            return one
    raise ConfigurationError(f"state must be one of {', '.join(allowed)}, not {str(place)[:40]!r}")
