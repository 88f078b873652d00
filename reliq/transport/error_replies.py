"""Error replies by what they mean: another server, another moment, or a refusal for good."""

import re
from collections.abc import Iterable
from typing import Any

import redis
from redis import exceptions

#: This server refuses, and another one behind the same address may not.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: The server refuses now, and may not in a moment.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}

#: redis-py cuts the first word off some replies; their class stands for it.
_CODES: dict[type[Exception], str] = {
    exceptions.ReadOnlyError: "READONLY",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.AskError: "ASK",
    exceptions.MovedError: "MOVED",
}
#: Redis before 7.0 wraps the refusal of a command inside a script in a text like this.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*: -([A-Z]+) ")


def code(error: Exception) -> str:
    """Return the first word of an error reply, its code; a proxy may write ERR before it."""
    if known := _CODES.get(type(error)):
        return known
    text = str(error)
    wrapped = _IN_SCRIPT.match(text)
    return wrapped[1] if wrapped else text.removeprefix("ERR ").partition(" ")[0]


def is_elsewhere(replies: Iterable[Any]) -> bool:
    """Say whether one of `replies` sends us to another server."""
    return any(isinstance(reply, redis.ResponseError) and code(reply) in ELSEWHERE for reply in replies)
