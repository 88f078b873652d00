"""The Redis that is measured on: private, on a loopback port, without persistence."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import redis

from reliq.testing.server import EmbeddedRedis


class CountedRedis(redis.Redis):
    """A client that knows how many commands it sent itself, to tell those of others."""

    own = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, and count it."""
        self.own += 1
        parent: Any = super()
        return parent.execute_command(*args, **options)

    def start_counting(self) -> None:
        """Count from now on."""
        self.config_resetstat()
        self.own = 0

    def commands_of_others(self) -> int:
        """Return how many commands the server ran since, those inside scripts included, our own left out."""
        calls = sum(row["calls"] for row in self.info("commandstats").values())
        return int(calls) - self.own


def private_server() -> EmbeddedRedis:
    """Return a server on a free loopback port that writes nothing to disk; it is stopped with its block."""
    return EmbeddedRedis(server=_newest(), port=None, options={"save": "", "appendonly": "no"})


def _newest() -> Path | None:
    """Return the newest redis-server on PATH: an environment may bring an old one with it."""
    places = [Path(folder) / "redis-server" for folder in os.environ.get("PATH", "").split(os.pathsep)]
    return max((place for place in places if os.access(place, os.X_OK)), key=_version, default=None)


def _version(server: Path) -> tuple[int, ...]:
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else ()
