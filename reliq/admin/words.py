"""The words that an operator chooses from: states of messages, and roles of Redis users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from reliq.settings import check_is_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Place = Literal["pending", "ready", "waiting", "unack", "retry", "garbage", "dead", "ended"]
PLACES: tuple[Place, ...] = get_args(Place)
#: Messages of these states can be cancelled, or moved to another queue.
CANCELLABLE: tuple[Place, ...] = ("pending", "ready", "waiting", "retry", "unack")
MOVABLE = CANCELLABLE
#: Messages of these states can be deleted.
PURGEABLE: tuple[Place, ...] = (*CANCELLABLE, "garbage", "dead")

#: Redis users, each with the rights of one kind of process.
Role = Literal["producer", "consumer", "operator", "viewer", "exporter"]
ROLES: tuple[Role, ...] = get_args(Role)


def check_place(place: str, allowed: Sequence[Place] = PLACES) -> Place:
    """Return the name of a state; raise ConfigurationError for any other word."""
    check_is_one_of("state", place, allowed)
    return cast("Place", place)
