"""The roles of a Redis user: which scripts each runs, and which plain commands it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from reliq import commands, minutes, shardmap
from reliq.admin import queries, queue_queries, server
from reliq.admin.fsck.ids import CHECK
from reliq.lua import script
from reliq.rights import USES

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.lua import Script, Use

Role = Literal["producer", "consumer", "operator", "exporter"]
ROLES: tuple[Role, ...] = get_args(Role)

_TRANSITIONS: dict[Role, tuple[str, ...]] = {
    "producer": ("publish",),
    "consumer": (
        *("ack", "claim", "collect", "counts", "extend", "nack"),
        *("promote", "reclaim", "release", "snooze", "tidy"),
    ),
    "operator": ("cancel", "counts", "forget", "publish", "purge", "redrive", "reschedule"),
    "exporter": ("counts",),
}
SCRIPTS: dict[Role, tuple[Script, ...]] = {role: tuple(map(script, names)) for role, names in _TRANSITIONS.items()}
SCRIPTS["operator"] += (CHECK,)

_TO_PUBLISH = (commands.register, shardmap.shard_map)
_TO_LOOK = (
    *(commands.body_start, commands.state_words, commands.retries_left, commands.scores, commands.first_score),
    *(commands.held_sample, commands.end_of, commands.due_count),
    *(commands.registry_size, commands.registry_page, commands.server_facts, commands.server_ms),
    shardmap.shard_map,
)
COMMANDS: dict[Role, tuple[Callable[..., Any], ...]] = {
    "producer": _TO_PUBLISH,
    "consumer": (
        *(commands.bodies, commands.state_words, commands.retries_left, commands.first_score, commands.held),
        *(commands.garbage, commands.claims),
        *(commands.wake_token, commands.wake_token_at_once, commands.first_wake_token, commands.push_wake_token),
        *(commands.poke, commands.drop_watch),
        *(commands.register, commands.write_worker, commands.remove_worker),
        *(*_TO_LOOK, minutes.noted, minutes.note),
    ),
    "operator": (
        *(*_TO_PUBLISH, *_TO_LOOK),
        *(commands.letters, commands.letters_between, commands.claims),
        *(commands.pause, commands.paused, commands.unpause, commands.push_wake_token),
        *(commands.worker_ids, commands.worker_records),
        *(made for made in USES if made.__module__ in (queries.__name__, queue_queries.__name__)),
        *(server.keys_scanned, server.type_of_key, minutes.noted),
    ),
    "exporter": _TO_LOOK,
}


def uses_of(role: Role) -> set[Use]:
    """Return every command that a role runs, in scripts or alone, with the name of its key."""
    alone = {use for made in COMMANDS[role] for use in USES[made]}
    return alone | {use for one in SCRIPTS[role] for use in one.uses}
