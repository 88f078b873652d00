"""The plain commands that ask a whole server, not a queue: no role of an ACL rule has them but the walk for queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.call import Command
from reliq.replies import read_facts, read_ids
from reliq.rights import runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.lua import Script


@runs("SCAN")
def keys_scanned(pattern: str, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Look at about `count` keys; return where the next are (0: these were the last), and those that match."""
    return Command(
        ("SCAN", cursor, "MATCH", pattern, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1]))
    )


@runs("TYPE")
def type_of_key(any_key: str) -> Command[str]:
    """Return the type of a key, `none` when it is not there."""
    return Command(("TYPE", any_key), bytes.decode)


@runs("UNLINK")
def delete_keys(any_keys: Sequence[str]) -> Command[int]:
    """Delete keys."""
    return Command(("UNLINK", *any_keys), int)


@runs("CONFIG")
def parameter(name: str) -> Command[dict[str, str]]:
    """Read a parameter of the server's configuration, by its name."""
    return Command(("CONFIG", "GET", name), _pairs)


@runs("CLUSTER")
def cluster_facts() -> Command[dict[str, str]]:
    """Return what a node of a Cluster thinks of the Cluster."""
    return Command(("CLUSTER", "INFO"), read_facts)


@runs("SLOWLOG")
def slow_scripts(count: int) -> Command[list[int]]:
    """Return the microseconds of each script among the last `count` entries of the slow log."""
    return Command(
        ("SLOWLOG", "GET", count),
        lambda reply: [int(one[2]) for one in reply if one[3] and bytes(one[3][0]).upper() in (b"EVAL", b"EVALSHA")],
    )


@runs("EVAL")
def eval_nothing() -> Command[bool]:
    """Run a script that does nothing: it is refused to who may not EVAL."""
    return Command(("EVAL", "return 1", 0), bool)


@runs("SCRIPT")
def load_script(script: Script) -> Command[str]:
    """Have the server know a script; return its digest."""
    return Command(("SCRIPT", "LOAD", script.text), bytes.decode)


@runs("ACL")
def user_name() -> Command[str]:
    """Return the user that asks."""
    return Command(("ACL", "WHOAMI"), bytes.decode)


@runs("ACL")
def user_rule(name: str) -> Command[str]:
    """Return the rule of a user on commands."""
    return Command(("ACL", "GETUSER", name), _rule)


@runs("ACL")
def commands_in(group: str) -> Command[set[str]]:
    """Return the commands of a group of ACL rules, in capitals."""
    return Command(("ACL", "CAT", group), lambda reply: {one.decode().upper() for one in reply})


def _pairs(reply: Sequence[bytes]) -> dict[str, str]:
    texts = [part.decode("utf-8", "replace") for part in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _rule(reply: Sequence[Any]) -> str:
    pairs = dict(zip(reply[::2], reply[1::2], strict=True))
    return str(pairs[b"commands"].decode())
