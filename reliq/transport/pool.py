"""Connection pools: bounded, without hidden retries, with time-outs, and with replies as bytes."""

import inspect
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from reliq.transport.failures import BROKEN, not_sent
from reliq.transport.kept_pool import KeptPool
from reliq.transport.target import Primary, Target, is_secure, primary, settings
from reliq.transport.wire import read_replies

CONNECT_SECONDS = 2.0


def pool(target: Target, timeout_seconds: float, *, asynchronous: bool, node: str = "") -> Any:
    """Return a pool for `target`, or for one node of it, HOST:PORT: a blocking one, or one for asyncio."""
    theirs = settings(target)
    if sentinel := primary(target):
        return _sentinel_pool(sentinel, theirs, timeout_seconds, asynchronous=asynchronous)
    module: Any = redis.asyncio if asynchronous else redis
    kind, theirs = _kind(target, theirs, node, module)
    made = module.BlockingConnectionPool(
        connection_class=kind,
        timeout=timeout_seconds,
        **theirs,
        **_ours(timeout_seconds, asynchronous=asynchronous, unix="path" in theirs),
    )
    return made if asynchronous else KeptPool(made)


def ask(target: Target, timeout_seconds: float, commands: Sequence[Sequence[str]], *, node: str = "") -> list[Any]:
    """Connect to `target`, or to one node of it, and return the replies to `commands`, a refusal in its place."""
    made = pool(target, timeout_seconds, asynchronous=False, node=node)
    try:
        connection = made.get_connection()
    except (*BROKEN, redis.ResponseError) as error:
        raise not_sent(error, made) from error
    try:
        replies = []
        for command in commands:
            connection.send_command(*command)
            replies += read_replies(connection, 1)[0]
        return replies
    finally:
        connection.disconnect()


def places(target: Target) -> int:
    """Return how many connections a pool for `target` has at most."""
    return int(settings(target)["max_connections"])


def plain_client(target: Target, timeout_seconds: float, *, node: str = "") -> redis.Redis:
    """Return redis-py's own client over such a pool, to measure beside it."""
    made = pool(target, timeout_seconds, asynchronous=False, node=node)
    return redis.Redis(connection_pool=made.beneath if isinstance(made, KeptPool) else made)


def _kind(target: Target, theirs: dict[str, Any], node: str, module: Any) -> tuple[type, dict[str, Any]]:
    """Return the class of the connections, and the settings that it knows."""
    plain = "UnixDomainSocketConnection" if "path" in theirs else "Connection"
    kind = getattr(module, "SSLConnection" if is_secure(target) else plain)
    if is_secure(target):
        theirs.pop("path", None)
    if node:
        host, _, port = node.rpartition(":")
        theirs |= {"host": host, "port": int(port)}
    return kind, _accepted(kind, theirs)


def sentinels(one: Any) -> list[Any]:
    """Return the clients by which a pool asks Sentinel; most pools have none."""
    return one.sentinel_manager.sentinels if hasattr(one, "sentinel_manager") else []


def _ours(timeout_seconds: float, *, asynchronous: bool, unix: bool = False) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "retry": (AsyncRetry if asynchronous else Retry)(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(timeout_seconds, CONNECT_SECONDS),
    }
    return ours if unix else ours | {"socket_keepalive": True}


def _accepted(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what connections of `kind` do not know: the two colours differ in a few TLS settings."""
    makers: list[Any] = [vars(base).get("__init__") for base in kind.__mro__]
    known = {name for maker in makers if maker for name in inspect.signature(maker).parameters}
    return {name: value for name, value in settings.items() if name in known or name == "max_connections"}


def _sentinel_pool(primary: Primary, settings: dict[str, Any], timeout_seconds: float, *, asynchronous: bool) -> Any:
    """Return a pool that asks Sentinel for the primary, with sentinel clients of its own."""
    module: Any = redis.asyncio if asynchronous else redis
    ours = _ours(timeout_seconds, asynchronous=asynchronous)
    secure = "SentinelManagedSSLConnection" if primary.is_secure else "SentinelManagedConnection"
    kind = getattr(module.sentinel, secure)
    return module.sentinel.SentinelConnectionPool(
        primary.service,
        module.sentinel.Sentinel(
            primary.sentinels,
            min_other_sentinels=primary.min_other_sentinels,
            sentinel_kwargs=primary.rights | ours,
        ),
        connection_class=kind,
        **_accepted(kind, {k: v for k, v in settings.items() if k not in ("host", "port")}),
        **ours,
    )
