"""
Redis URLs: parsed and checked before any connection, and displayed without their password.

`redis://`, `rediss://` (TLS) and `unix://` mean the same as in redis-py.
`redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB` and `rediss+sentinel://` get the primary from Sentinel.
`redis+cluster://HOST:PORT,HOST:PORT` and `rediss+cluster://` name nodes of a Cluster.
"""

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, NamedTuple, Union
from urllib.parse import parse_qsl, quote, unquote, unquote_plus

from reliq.errors import ConfigurationError
from reliq.redis.redis_py import redis

SENTINEL_PORT = 26379
REDIS_PORT = 6379
HIGHEST_PORT = 65_535

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
#: Matches a Redis URL. The last @ ends the password, because the password may contain an unencoded @.
_FORM = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:(?P<rights>[^/?#]*)@)?(?P<places>[^@/?#]*)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?(?:#.*)?",
    re.DOTALL,
)
_PLACE = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:,\s]+))(?::(?P<port>[0-9]{1,5}))?")
_SERVICE = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_OPTIONS = {"db", "protocol", "client_name", "socket_timeout", "socket_connect_timeout", "health_check_interval"}
_OPTIONS |= {"username", "password", "max_connections", "socket_keepalive", "insecure"}
_OPTIONS |= {f"ssl_{name}" for name in ("ca_certs", "ca_path", "certfile", "keyfile", "cert_reqs", "password")}
_OPTIONS |= {"ssl_check_hostname", "ssl_min_version", "ssl_ciphers"}

#: The allowed TLS versions, and the numbers that redis-py uses for them. Older versions are insecure.
_TLS_VERSIONS = {"1.2": "771", "1.3": "772"}
_NO = ("0", "f", "false", "n", "no", "")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """
    A valid Redis URL.

    Attributes:
        plain: the URL to pass to redis-py. For Sentinel and Cluster, it contains the credentials and options, but no
            host.
        shown: the URL without its password and options, for messages.
        is_exposed: whether the password would cross a network unencrypted.
        sentinels: host and port of each sentinel in the URL.
        service: the name of the primary in Sentinel's configuration.
        sentinel_rights: user and password for the sentinels.
        nodes: host and port of each Cluster node in the URL.
    """

    plain: str = field(repr=False)
    shown: str
    is_exposed: bool
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_rights: dict[str, str] = field(default_factory=dict, repr=False)
    nodes: tuple[tuple[str, int], ...] = ()


def check_url(url: str) -> RedisUrl:
    """Parse `url`. Raise ConfigurationError if it is invalid; the error contains no text that may be a password."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in _SCHEMES:
        raise ConfigurationError(
            "Redis URL must begin with redis://, rediss:// or unix://, with redis+sentinel:// to ask Sentinel, or with "
            "redis+cluster:// for a Cluster"
        )
    parts, hosts = _parts(url)
    plain, _, kind = scheme.partition("+")
    options = dict(parse_qsl(parts["query"], keep_blank_values=True))
    _check_options(options, _OPTIONS | _SENTINEL_OPTIONS if kind == "sentinel" else _OPTIONS)
    service, database = _check_place(scheme, hosts, parts["path"], options)
    # Encode the credentials and hosts for redis-py, which decodes them. If some characters were not encoded, redis-py
    # would raise an error that contains the password.
    rights = f"{quote(parts['rights'], ':%', errors='replace')}@" if parts["rights"] else ""
    place = kind or quote(parts["places"], ":%[]", errors="replace")
    has_password = ":" in parts["rights"] or "password" in options
    is_far = scheme.startswith("redis") and not all(is_near(host) for host, _ in hosts)
    return RedisUrl(
        plain=f"{plain}://{rights}{place}{database}?{_for_redis_py(parts['query'])}",
        shown=masked(url),
        is_exposed=has_password and is_far and not scheme.startswith("rediss"),
        sentinels=tuple((host, port or SENTINEL_PORT) for host, port in hosts) if kind == "sentinel" else (),
        service=service,
        sentinel_rights={name.removeprefix("sentinel_"): options[name] for name in _SENTINEL_OPTIONS & set(options)},
        nodes=tuple((host, port or REDIS_PORT) for host, port in hosts) if kind == "cluster" else (),
    )


def masked(url: str) -> str:
    """Return `url` without its password and its query, for messages."""
    try:
        parts, _ = _parts(url)
    except ConfigurationError:
        return "a URL that does not parse"
    user, _, password = parts["rights"].partition(":")
    rights = f"{user}{':***' if password else ''}@" if user or password else ""
    return f"{parts['scheme']}://{rights}{parts['places']}{parts['path']}"


def is_near(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address, so that no data crosses a network."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _parts(url: str) -> tuple[dict[str, str], list[tuple[str, int | None]]]:
    """Split a URL into its parts by name, and its hosts with ports. Raise ConfigurationError if it is invalid."""
    form = _FORM.fullmatch(url)
    places = form["places"].split(",") if form and form["places"] else []
    found = [one for one in map(_PLACE.fullmatch, places) if one and int(one["port"] or 1) <= HIGHEST_PORT]
    hosts = [(one["six"] or unquote(one["name"]), int(one["port"]) if one["port"] else None) for one in found]
    if form is None or len(hosts) < len(places):
        raise ConfigurationError(
            "Redis URL does not parse; write redis://USER:PASSWORD@HOST:PORT/DB, with % / ? # @ : in a password encoded"
        )
    return {name: text or "" for name, text in form.groupdict().items()}, hosts


def _check_place(
    scheme: str, hosts: list[tuple[str, int | None]], path: str, options: dict[str, str]
) -> tuple[str, str]:
    """Check hosts and path. Return Sentinel's name for the primary, and the path of the URL for redis-py."""
    if scheme == "unix":
        if not path:
            raise ConfigurationError("Redis URL unix:// needs the socket's path, such as unix:///run/redis.sock")
        return "", path
    service = ""
    database = path.strip("/")
    if scheme.endswith("+sentinel"):
        service, _, database = database.partition("/")
        if not hosts or _SERVICE.fullmatch(service) is None:
            raise ConfigurationError(
                f"Redis URL {scheme}:// needs sentinels and their name for the primary, such as "
                f"{scheme}://HOST:26379,HOST:26379/SERVICE/0"
            )
    elif scheme.endswith("+cluster"):
        if not hosts:
            raise ConfigurationError(f"Redis URL {scheme}:// needs nodes, such as {scheme}://HOST:6379,HOST:6379")
        if database not in ("", "0") or options.get("db", "0") != "0":
            raise ConfigurationError(
                f"Redis URL {scheme}:// must not name a database other than /0: a Cluster has only database 0"
            )
    elif len(hosts) != 1:
        raise ConfigurationError(
            "Redis URL needs a host, such as redis://HOST:6379/0 (several only with Sentinel and Cluster)"
        )
    if database and not (database.isascii() and database.isdigit()):
        raise ConfigurationError("Redis URL must end in a database number, such as /0")
    return service, f"/{database}"


def _check_options(options: dict[str, str], known: set[str]) -> None:
    """Refuse unknown options. Refuse options that turn off TLS certificate checks, unless `insecure` is true."""
    if set(options) - known:  # do not show the option: if a password contains ?, its rest is parsed as an option
        raise ConfigurationError(
            f"Redis URL has an unknown option after its ? (in a password, write ? as %3F); "
            f"known: {', '.join(sorted(known))}"
        )
    if options.get("ssl_min_version", "1.2") not in _TLS_VERSIONS:
        raise ConfigurationError("Redis URL option ssl_min_version must be 1.2 or 1.3")
    if options.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise ConfigurationError("Redis URL option ssl_cert_reqs must be required, or none with insecure=true")
    unchecked = options.get("ssl_cert_reqs") == "none" or options.get("ssl_check_hostname", "yes").lower() in _NO
    if unchecked and options.get("insecure", "no").lower() in _NO:
        raise ConfigurationError(
            "Redis URL would accept any certificate (ssl_cert_reqs=none or ssl_check_hostname=false): name the "
            "authority with ssl_ca_certs=FILE, or add insecure=true"
        )


def _for_redis_py(query: str) -> str:
    """Return the options of `query` for redis-py, without the options that only reliq uses."""
    kept = []
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        name = unquote_plus(name)
        if name == "ssl_min_version":
            kept.append(f"{name}={_TLS_VERSIONS[unquote_plus(value)]}")
        elif name and name not in _SENTINEL_OPTIONS | {"insecure"}:
            kept.append(pair)
    return "&".join(kept)


RedisClient = Union["redis.Redis", "redis.asyncio.Redis", "redis.RedisCluster"]
Target = str | RedisClient

#: A connection pool has at most this many connections.
POOL_LIMIT = 64

EXPOSED = (
    "Redis' password crosses the network unencrypted: use TLS (rediss://) or a Unix socket; "
    "ignore reliq.InsecureWarning where the network itself is private"
)
UNCHECKED = "this redis-py client accepts any certificate (ssl_cert_reqs='none'): name the authority instead"

#: The settings that reliq copies from a redis-py client of the application: its address and its credentials, and a few
#: others. Settings that begin with `ssl_` are also copied.
_KEPT = {"host", "port", "path", "db", "username", "password", "credential_provider", "client_name"}
_KEPT |= {"socket_type", "socket_keepalive_options", "health_check_interval", "max_connections"}


class Primary(NamedTuple):
    """The name of a primary in Sentinel, the addresses of the sentinels, and the credentials for the sentinels."""

    service: str
    sentinels: Sequence[tuple[str, int]]
    rights: dict[str, Any]
    min_other_sentinels: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """
    The address of a Redis, taken from a URL or a redis-py client.

    Attributes:
        hosts: the host names or IP addresses. With Sentinel, the hosts of the sentinels; empty for a Unix socket.
        servers: each server as HOST:PORT. For a Unix socket, its path; with Sentinel, its name for the primary.
        database: the database number, 0 by default.
        is_secure: whether connections use TLS.
        is_cluster: whether the Redis is a Cluster.
    """

    hosts: tuple[str, ...]
    servers: tuple[str, ...]
    database: int
    is_secure: bool
    is_cluster: bool


def check_target(target: Target) -> None:
    """Raise ConfigurationError if `target` is neither a valid URL nor a supported redis-py client."""
    if isinstance(target, str):
        check_url(target)
    elif not isinstance(target, redis.Redis | redis.asyncio.Redis | redis.RedisCluster):
        raise ConfigurationError(f"url must be a Redis URL or a redis-py client, not {type(target).__name__}")


def shown(target: Target) -> str:
    """Return the URL `target` without its password, or the class name of the redis-py client `target`."""
    return masked(target) if isinstance(target, str) else type(target).__name__


def address(target: Target) -> Address:
    """Return the address in a URL or redis-py client, without a connection to Redis."""
    given = _given(target)
    nodes = seeds(target)
    sentinel = primary(target)
    if nodes:
        hosts, servers = [node.rpartition(":")[0] for node in nodes], nodes
    elif sentinel:
        hosts, servers = [host for host, _ in sentinel.sentinels], [sentinel.service]
    elif "path" in given:
        hosts, servers = [], [given["path"]]
    else:
        host = given.get("host", "localhost")
        hosts, servers = [host], [f"{host}:{given.get('port', REDIS_PORT)}"]
    return Address(tuple(hosts), tuple(servers), int(given.get("db") or 0), is_secure(target), bool(nodes))


def seeds(target: Target) -> list[str]:
    """Return the Cluster nodes in a URL or redis-py client, as HOST:PORT; an empty list if it is not a Cluster."""
    if isinstance(target, str):
        return [f"{host}:{port}" for host, port in check_url(target).nodes]
    if not isinstance(target, redis.RedisCluster):
        return []
    known = {**target.nodes_manager.startup_nodes, **target.nodes_manager.nodes_cache}
    return [f"{node.host}:{node.port}" for node in known.values()]


def weakness(target: Target) -> str:
    """Return a warning if a password would cross a network unencrypted, or if a client accepts any certificate."""
    if isinstance(target, str):
        return EXPOSED if check_url(target).is_exposed else ""
    given = _given(target)
    if is_secure(target):
        return UNCHECKED if given.get("ssl_cert_reqs", "required") in ("none", ssl.CERT_NONE, None) else ""
    return EXPOSED if given.get("password") and not all(map(is_near, address(target).hosts)) else ""


def settings(target: Target) -> dict[str, Any]:
    """Return the address, credentials and options of a URL or client, as settings for redis-py connections."""
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
            return dict(redis.connection.parse_url(check_url(target).plain))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigurationError(f"Redis URL: {error}") from None
    if isinstance(target, redis.RedisCluster):
        return dict(target.nodes_manager.connection_kwargs)
    return dict(target.connection_pool.connection_kwargs)


def is_secure(target: Target) -> bool:
    """Return whether a URL or redis-py client uses TLS."""
    if isinstance(target, str):
        return target.startswith("rediss")
    if isinstance(target, redis.RedisCluster):
        kind = target.nodes_manager.connection_kwargs.get("connection_class")
        return bool(target.nodes_manager.connection_kwargs.get("ssl")) or _is_ssl(kind)
    return _is_ssl(target.connection_pool.connection_class)


def _is_ssl(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)


def primary(target: Target) -> Primary | None:
    """Return the sentinels of a URL or client and their name for the primary; None if it does not use Sentinel."""
    if isinstance(target, str):
        url = check_url(target)
        rights: dict[str, Any] = dict(url.sentinel_rights)
        if url.sentinels and is_secure(target):
            tls = {name: value for name, value in settings(target).items() if name.startswith("ssl_")}
            rights |= {"ssl": True, **tls}
        return Primary(url.service, url.sentinels, rights) if url.sentinels else None
    theirs: Any = None if isinstance(target, redis.RedisCluster) else target.connection_pool
    if not hasattr(theirs, "sentinel_manager"):
        return None
    manager = theirs.sentinel_manager
    addresses = [one.connection_pool.connection_kwargs for one in manager.sentinels]
    return Primary(
        service=theirs.service_name,
        sentinels=[(one["host"], one["port"]) for one in addresses],
        rights={k: v for k, v in manager.sentinel_kwargs.items() if k in _KEPT or k.startswith("ssl")},
        min_other_sentinels=manager.min_other_sentinels,
    )
