"""
Targets: a URL, or a client that the application made, and what they say of address and rights.

From a client, only the address and the rights are taken; it is never changed.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
import redis.asyncio
from redis.connection import parse_url

from reliq.errors import ConfigurationError
from reliq.transport.url import check_url, is_near, masked

RedisClient = redis.Redis | redis.asyncio.Redis | redis.RedisCluster
Target = str | RedisClient

#: A pool has at most this many connections.
POOL_LIMIT = 64

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
        is_cluster: whether it is a Cluster.
    """

    hosts: tuple[str, ...]
    database: int
    is_secure: bool
    retries: int
    is_cluster: bool = False


def check_target(target: Target) -> None:
    """Raise ConfigurationError when `target` is neither a URL nor a client that reliq can use."""
    if isinstance(target, str):
        check_url(target)
    elif not isinstance(target, RedisClient):
        raise ConfigurationError(f"url must be a Redis URL or a redis-py client, not {type(target).__name__}")


def shown(target: Target) -> str:
    """Return a target's URL without its password, or the kind of client."""
    return masked(target) if isinstance(target, str) else type(target).__name__


def address(target: Target) -> Address:
    """Return where a target is, without a connection."""
    given = _given(target)
    hosts = [given["host"]] if given.get("host") else []
    at = seeds(target)
    if at:
        hosts = [node.rpartition(":")[0] for node in at]
    retry = None if isinstance(target, str) else given.get("retry")
    return Address(
        hosts=tuple(hosts),
        database=int(given.get("db") or 0),
        is_secure=is_secure(target),
        retries=max(0, getattr(retry, "_retries", 0)),
        is_cluster=bool(at),
    )


def seeds(target: Target) -> list[str]:
    """Return the nodes of a Cluster that a target names, as HOST:PORT; none when it is no Cluster."""
    if isinstance(target, redis.RedisCluster):
        known = {**target.nodes_manager.startup_nodes, **target.nodes_manager.nodes_cache}
        return [f"{node.host}:{node.port}" for node in known.values()]
    named = check_url(target).nodes if isinstance(target, str) else ()
    return [f"{host}:{port}" for host, port in named]


def weakness(target: Target) -> str:
    """Return why others could read what is sent to `target`; empty when they cannot, or the URL says `insecure`."""
    if isinstance(target, str):
        return EXPOSED if check_url(target).is_exposed else ""
    given = _given(target)
    if is_secure(target):
        return UNCHECKED if given.get("ssl_cert_reqs", "required") in ("none", ssl.CERT_NONE, None) else ""
    return EXPOSED if given.get("password") and not all(map(is_near, _hosts(target))) else ""


def _hosts(client: RedisClient) -> list[str]:
    """Return the hosts that a client talks to first; none for a Unix socket."""
    if isinstance(client, redis.RedisCluster):
        return [node.rpartition(":")[0] for node in seeds(client)]
    if sentinel := primary(client):
        return [host for host, _ in sentinel.sentinels]
    given = _given(client)
    return [] if "path" in given else [str(given.get("host", "localhost"))]


def settings(target: Target) -> dict[str, Any]:
    """Return what a target says of address and rights, as redis-py calls it."""
    given = _given(target)
    kept = {name: value for name, value in given.items() if name in _KEPT or name.startswith("ssl_")}
    if is_secure(target):
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


def is_secure(target: Target) -> bool:
    """Say whether a target speaks TLS."""
    if isinstance(target, str):
        return target.startswith("rediss")
    if isinstance(target, redis.RedisCluster):
        kind = target.nodes_manager.connection_kwargs.get("connection_class")
        return bool(target.nodes_manager.connection_kwargs.get("ssl")) or _is_ssl(kind)
    return _is_ssl(target.connection_pool.connection_class)


def _is_ssl(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)


def primary(target: Target) -> Primary | None:
    """Return the sentinels to ask for the primary, None when `target` does not use Sentinel."""
    if isinstance(target, str):
        url = check_url(target)
        rights: dict[str, Any] = dict(url.sentinel_rights)
        if url.sentinels and is_secure(target):
            tls = {name: value for name, value in settings(target).items() if name.startswith("ssl_")}
            rights |= {"ssl": True, **tls}
        return Primary(url.service, url.sentinels, rights, is_secure(target)) if url.sentinels else None
    theirs: Any = None if isinstance(target, redis.RedisCluster) else target.connection_pool
    if not hasattr(theirs, "sentinel_manager"):
        return None
    manager = theirs.sentinel_manager
    addresses = [one.connection_pool.connection_kwargs for one in manager.sentinels]
    return Primary(
        service=theirs.service_name,
        sentinels=[(one["host"], one["port"]) for one in addresses],
        rights={k: v for k, v in manager.sentinel_kwargs.items() if k in _KEPT or k.startswith("ssl")},
        is_secure=is_secure(target),
        min_other_sentinels=manager.min_other_sentinels,
    )
