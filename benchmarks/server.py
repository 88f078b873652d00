"""The Redis that is measured on: private, on a loopback port, without persistence."""

import os
import re
import subprocess
from pathlib import Path

from reliq.testing.server import EmbeddedRedis


def private_server() -> EmbeddedRedis:
    """Return a server of the newest version on PATH: a virtual environment may bring an old one with it."""
    places = [Path(folder) / "redis-server" for folder in os.environ.get("PATH", "").split(os.pathsep)]
    newest = max((place for place in places if os.access(place, os.X_OK)), key=_version, default=None)
    return EmbeddedRedis(server=newest, port=None, options={"save": "", "appendonly": "no"})


def _version(server: Path) -> list[int]:
    output = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout
    return [int(number) for number in re.findall(r"v=(\d+)\.(\d+)\.(\d+)", output)[0]]
