"""
Connection pools: bounded, without hidden retries, with time-outs, and with replies as bytes.

From a client that the application made, only the address and the rights are taken; it is never changed.
"""

import inspect
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from reliq.errors import ConfigurationError
from reliq.transport.kept_pool import KeptPool
from reliq.transport.url import check_url, is_near

RedisClient = redis.Redis | redis.asyncio.Redis | redis.RedisCluster
Target = str | RedisClient

POOL_LIMIT = 64
CONNECT_SECONDS = 2.0

EXPOSED = (
    "Redis' password crosses the network in the clear: use TLS (rediss://) or a Unix socket; "
    "ignore reliq.InsecureWarning where the network itself is private"
)
UNCHECKED = "this redis-py client takes anybody's certificate (ssl_cert_reqs='none'): name the authority instead"

#: Settings of a foreign client that are an address or a right; those that begin with `ssl_` are too.
_KEPT = {"host", "port", "path", "db", "username", "password", "credential_provider", "client_name"}
_KEPT |= {"socket_type", "socket_keepalive_options", "health_check_interval", "max_connections"}


class Primary(NamedTuple):
    """The sentinels to ask for the primary, its name there, and the rights to ask."""

    service: str
    sentinels: Sequence[tuple[str, int]]
    rights: dict[str, Any]
    is_secure: bool
    min_other_sentinels: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """
    Where a Redis is and how it is reached, as a URL or a client says.

    Attributes:
        hosts: names or addresses; none for a Unix socket.
        database: 0 unless it names another.
        is_secure: whether it speaks TLS.
        retries: how often a client of somebody else repeats a command by itself, 0 for a URL.
    """

    hosts: tuple[str, ...]
    database: int
    is_secure: bool
    retries: int


def address(target: Target) -> Address:
    """Return where a target is, without a connection."""
    given = _given(target)
    hosts = [given["host"]] if given.get("host") else []
    if isinstance(target, redis.RedisCluster):
        hosts = [node.host for node in target.nodes_manager.nodes_cache.values()]
    retry = None if isinstance(target, str) else given.get("retry")
    return Address(
        hosts=tuple(hosts),
        database=int(given.get("db") or 0),
        is_secure=_is_secure(target),
        retries=max(0, getattr(retry, "_retries", 0)),
    )


def pool(target: Target, timeout_seconds: float, *, asynchronous: bool) -> Any:
    """Return a pool for `target`: a blocking one, or one for asyncio."""
    theirs = _settings(target)
    if primary := _primary(target):
        return _sentinel_pool(primary, theirs, timeout_seconds, asynchronous=asynchronous)
    module: Any = redis.asyncio if asynchronous else redis
    plain = "UnixDomainSocketConnection" if "path" in theirs else "Connection"
    secure = _is_secure(target)
    kind = getattr(module, "SSLConnection" if secure else plain)
    theirs.pop("path", None) if secure else None
    made = module.BlockingConnectionPool(
        connection_class=kind,
        timeout=timeout_seconds,
        **_accepted(kind, theirs),
        **_ours(timeout_seconds, asynchronous=asynchronous, unix="path" in theirs),
    )
    return made if asynchronous else KeptPool(made)


def places(target: Target) -> int:
    """Return how many connections a pool for `target` has at most."""
    return int(_settings(target)["max_connections"])


def plain_client(target: Target, timeout_seconds: float) -> redis.Redis:
    """Return redis-py's own client over such a pool, to measure beside it."""
    made = pool(target, timeout_seconds, asynchronous=False)
    return redis.Redis(connection_pool=made.beneath if isinstance(made, KeptPool) else made)


def node_pool(cluster: redis.RedisCluster, host: str, port: int, timeout_seconds: float, *, asynchronous: bool) -> Any:
    """Return a pool for one node of a Cluster."""
    module: Any = redis.asyncio if asynchronous else redis
    kind = module.SSLConnection if _is_secure(cluster) else module.Connection
    theirs = _settings(cluster) | {"host": host, "port": port}
    made = module.BlockingConnectionPool(
        connection_class=kind,
        timeout=timeout_seconds,
        **_accepted(kind, theirs),
        **_ours(timeout_seconds, asynchronous=asynchronous),
    )
    return made if asynchronous else KeptPool(made)


def sentinels(one: Any) -> list[Any]:
    """Return the clients by which a pool asks Sentinel; most pools have none."""
    return one.sentinel_manager.sentinels if hasattr(one, "sentinel_manager") else []


def weakness(target: Target) -> str:
    """Return why others could read what is sent to `target`; empty when they cannot, or the URL says `insecure`."""
    if isinstance(target, str):
        return EXPOSED if check_url(target).is_exposed else ""
    given = _given(target)
    if _is_secure(target):
        return UNCHECKED if given.get("ssl_cert_reqs", "required") in ("none", ssl.CERT_NONE, None) else ""
    return EXPOSED if given.get("password") and not all(map(is_near, _hosts(target))) else ""


def _hosts(client: RedisClient) -> list[str]:
    """Return the hosts that a client talks to first; none for a Unix socket."""
    if isinstance(client, redis.RedisCluster):
        return [str(node.host) for node in client.get_nodes()]  # type: ignore[no-untyped-call]
    if primary := _primary(client):
        return [host for host, _ in primary.sentinels]
    given = _given(client)
    return [] if "path" in given else [str(given.get("host", "localhost"))]


def _ours(timeout_seconds: float, *, asynchronous: bool, unix: bool = False) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "retry": (AsyncRetry if asynchronous else Retry)(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(timeout_seconds, CONNECT_SECONDS),
    }
    return ours if unix else ours | {"socket_keepalive": True}


def _settings(target: Target) -> dict[str, Any]:
    given = _given(target)
    kept = {name: value for name, value in given.items() if name in _KEPT or name.startswith("ssl_")}
    if _is_secure(target):
        oldest = kept.get("ssl_min_version") or ssl.TLSVersion.TLSv1_2
        kept["ssl_min_version"] = max(ssl.TLSVersion(oldest), ssl.TLSVersion.TLSv1_2)
    limit = kept.get("max_connections")
    return kept | {"max_connections": min(limit, POOL_LIMIT) if isinstance(limit, int) else POOL_LIMIT}


def _given(target: Target) -> dict[str, Any]:
    if isinstance(target, str):
        try:
            return dict(parse_url(check_url(target).plain))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigurationError(f"Redis URL: {error}") from None
    if isinstance(target, redis.RedisCluster):
        return dict(target.nodes_manager.connection_kwargs)
    return dict(target.connection_pool.connection_kwargs)


def _is_secure(target: Target) -> bool:
    if isinstance(target, str):
        return target.startswith("rediss")
    if isinstance(target, redis.RedisCluster):
        kind = target.nodes_manager.connection_kwargs.get("connection_class")
        return bool(target.nodes_manager.connection_kwargs.get("ssl")) or _is_ssl(kind)
    return _is_ssl(target.connection_pool.connection_class)


def _is_ssl(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)


def _accepted(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what connections of `kind` do not know: the two colours differ in a few TLS settings."""
    makers: list[Any] = [vars(base).get("__init__") for base in kind.__mro__]
    known = {name for maker in makers if maker for name in inspect.signature(maker).parameters}
    return {name: value for name, value in settings.items() if name in known or name == "max_connections"}


def _primary(target: Target) -> Primary | None:
    """Return the sentinels to ask for the primary, None when `target` does not use Sentinel."""
    if isinstance(target, str):
        url = check_url(target)
        rights: dict[str, Any] = dict(url.sentinel_rights)
        if url.sentinels and _is_secure(target):
            tls = {name: value for name, value in _settings(target).items() if name.startswith("ssl_")}
            rights |= {"ssl": True, **tls}
        return Primary(url.service, url.sentinels, rights, _is_secure(target)) if url.sentinels else None
    theirs: Any = None if isinstance(target, redis.RedisCluster) else target.connection_pool
    if not hasattr(theirs, "sentinel_manager"):
        return None
    manager = theirs.sentinel_manager
    addresses = [one.connection_pool.connection_kwargs for one in manager.sentinels]
    return Primary(
        service=theirs.service_name,
        sentinels=[(one["host"], one["port"]) for one in addresses],
        rights={k: v for k, v in manager.sentinel_kwargs.items() if k in _KEPT or k.startswith("ssl")},
        is_secure=_is_secure(target),
        min_other_sentinels=manager.min_other_sentinels,
    )


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
