"""The roles of a Redis user: which scripts each runs, and which plain commands it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from reliq import commands, crons, minutes, shardmap, stacks
from reliq.admin import key_queries, queries, queue_queries, server
from reliq.admin.fsck.ids import CHECK, CHECK_KEYS
from reliq.lua import script
from reliq.rights import USES

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.lua import Script, Use

Role = Literal["producer", "consumer", "operator", "viewer", "exporter"]
ROLES: tuple[Role, ...] = get_args(Role)

#: Commands that change nothing.
ONLY_READ = frozenset(
    {
        *("EXISTS", "GET", "GETRANGE", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HRANDFIELD", "HSCAN"),
        *("LINDEX", "LLEN", "LPOS", "LRANGE", "MGET", "PTTL", "SCARD", "SISMEMBER", "SMISMEMBER", "SRANDMEMBER"),
        *("SSCAN", "STRLEN", "TTL", "TYPE", "XLEN", "XRANGE", "XREVRANGE", "ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE"),
        *("ZRANDMEMBER", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE", "ZSCAN", "ZSCORE"),
    }
)

#: A change of the number of shards goes on by these.
_TO_RESHARD = ("arrive", "ask", "cancel", "depart", "leave", "remap")
_TRANSITIONS: dict[Role, tuple[str, ...]] = {
    "producer": ("publish", "ask"),
    "consumer": (
        *(*_TO_RESHARD, "ack", "bodies", "claim", "collect", "counts", "extend", "held_up", "limit", "lines", "nack"),
        *("promote", "reclaim", "register", "release", "snooze", "tick", "tidy"),
    ),
    "operator": (
        *(
            "counts",
            "forget",
            "held_up",
            "limit",
            "lines",
            "publish",
            "purge",
            "redrive",
            "reschedule",
            "sleep",
            "tick",
        ),
        *_TO_RESHARD,
    ),
    "viewer": ("counts", "lines"),
    "exporter": ("counts", "held_up", "lines"),
}
SCRIPTS: dict[Role, tuple[Script, ...]] = {
    role: tuple({script(name, keyed=keyed): None for keyed in (False, True) for name in names})
    for role, names in _TRANSITIONS.items()
}
SCRIPTS["operator"] += (CHECK, CHECK_KEYS)
SCRIPTS["viewer"] += (CHECK, CHECK_KEYS)


def _reads(use: Use) -> bool:
    """Say whether a command changes nothing; what a role makes without a key never does."""
    command, key = use
    return command in ONLY_READ or not key


_TO_PUBLISH = (commands.register, shardmap.shard_map, shardmap.fence, shardmap.declaration)
_TO_LOOK = (
    *(commands.body_start, commands.state_words, commands.retries_left, commands.scores, commands.first_score),
    *(commands.held_sample, commands.end_of, commands.due_count),
    *(commands.registry_size, commands.registry_page, commands.server_facts, commands.server_ms),
    *(shardmap.shard_map, shardmap.fence, shardmap.declaration, crons.cron_states),
)
COMMANDS: dict[Role, tuple[Callable[..., Any], ...]] = {
    "producer": _TO_PUBLISH,
    "consumer": (
        *(commands.bodies, commands.state_words, commands.retries_left, commands.first_score, commands.held),
        *(commands.garbage, commands.claims),
        *(commands.wake_token, commands.wake_token_at_once, commands.first_wake_token, commands.push_wake_token),
        *(commands.poke, commands.drop_watch),
        *(commands.register, commands.write_worker, commands.remove_worker, commands.workers_alive),
        *(*_TO_LOOK, minutes.noted, minutes.note, stacks.take_request, stacks.write_report),
        *(shardmap.map_text, commands.letters_between, server.keys_scanned, queries.ids_scanned, queries.ids_at),
        *(queries.leaving, queries.marker, queries.marker_ms, queries.take_id, queries.free_id, queries.at_a_replica),
    ),
    "operator": (
        *(*_TO_PUBLISH, *_TO_LOOK),
        *(commands.delete_letters, commands.letters_between, commands.claims),
        *(commands.worker_ids, commands.worker_records),
        shardmap.map_text,
        *(commands.pause, commands.paused, commands.resume_queue),
        *(made for made in USES if made.__module__ in (queries.__name__, queue_queries.__name__, key_queries.__name__)),
        *(server.keys_scanned, server.type_of_key, minutes.noted, stacks.request, stacks.look),
        *(crons.pause_cron, crons.resume_cron, crons.ask_run, crons.asked_run, crons.withdraw_run, crons.forget_cron),
    ),
    "exporter": _TO_LOOK,
}
COMMANDS["viewer"] = tuple(made for made in COMMANDS["operator"] if all(map(_reads, USES[made])))


def uses_of(role: Role) -> set[Use]:
    """Return every command that a role runs, in scripts or alone, with the name of its key."""
    alone = {use for made in COMMANDS[role] for use in USES[made]}
    in_scripts = {use for one in SCRIPTS[role] for use in one.uses}
    # The script `check` looks, and mends only for an operator who says so.
    return alone | (set(filter(_reads, in_scripts)) if role == "viewer" else in_scripts)
