"""Where a message of a queue can be, and what its keys are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from reliq.settings import check_is_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.keys import Keys

Place = Literal["pending", "ready", "waiting", "unack", "retry", "garbage", "dead"]
PLACES: tuple[Place, ...] = get_args(Place)
#: States whose messages may be cancelled, and may go to another queue.
CANCELLABLE: tuple[Place, ...] = ("pending", "ready", "waiting", "retry", "unack")
MOVABLE = CANCELLABLE

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
    "map": "string",
    "epoch": "string",
}

#: A message that is being moved to another queue is due this many ms later than it was: 126 years.
MOVING_MS = 4 * 10**12
#: Ids that are read in one step.
STEP_IDS = 250


@dataclass(frozen=True, slots=True)
class LinePlace:
    """The line of one key: a list as ready is. All lines of a queue together are the place `waiting`."""

    key: str


Spot = Place | LinePlace


def is_list(spot: Spot) -> bool:
    """Say whether messages lie there in the order of their claims."""
    return isinstance(spot, LinePlace) or spot in ("ready", "retry")


def place_of(spot: Spot) -> Place:
    """Return the place that a person calls it."""
    return "waiting" if isinstance(spot, LinePlace) else spot


def redis_key(keys: Keys, spot: Spot) -> str:
    """Return the Redis key that has its messages; `waiting` has one for each line."""
    return keys.line(spot.key) if isinstance(spot, LinePlace) else str(getattr(keys, spot))


def check_place(place: str, allowed: Sequence[Place] = PLACES) -> Place:
    """Return the name of a place; raise ConfigurationError for another. Users call it a state."""
    check_is_one_of("state", place, allowed)
    return cast("Place", place)
