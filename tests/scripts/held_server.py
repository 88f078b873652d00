"""A redis-server whose clock only tests move: TIME, TTLs and scripts follow this clock."""

import mmap
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("held_server.c")


class HeldClock:
    """The clock of a server that `server` starts; its files are in `folder`."""

    def __init__(self, folder: Path, library: Path, us: int) -> None:
        self._folder, self._library = folder, library
        self._path = folder / "clock"
        self._path.write_bytes(struct.pack("q", us))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def set(self, us: int) -> None:
        """Set the time to `us` microseconds after 1970."""
        self._memory[:] = struct.pack("q", us)

    def server(self, server: Path) -> Path:
        """Return a program that starts `server` with this clock."""
        start = self._folder / "redis-server-with-held-clock"
        start.write_text(f'#!/bin/sh\nHELD_CLOCK="{self._path}" LD_PRELOAD="{self._library}" exec "{server}" "$@"\n')
        start.chmod(0o700)
        return start


def skip_unless_held(server: Path) -> None:
    """Skip the test with Redis 8 and Valkey 9: they add the time that commands take to the time that they read."""
    version = subprocess.run([server, "--version"], capture_output=True, check=True, text=True).stdout
    product, major = re.findall(r"^(\w+) server v=(\d+)", version)[0]
    if int(major) >= {"Redis": 8, "Valkey": 9}[product]:
        pytest.skip(f"the clock of {product} {major} cannot be held")


def held_clock(folder: Path, us: int) -> HeldClock | None:
    """Return a clock that starts at `us`, or None on a machine without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    library = folder / "held_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], capture_output=True, check=True)
    return HeldClock(folder, library, us)
