"""Start processes with a shifted wall clock."""

import mmap
import shutil
import struct
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from required import must_run_in_ci

SOURCE = Path(__file__).with_name("shifted_clock.c")


def library(folder: Path) -> Path:
    """Compile the library that shifts a clock; skip the test without a compiler."""
    built = folder / "shifted_clock.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        must_run_in_ci("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, SOURCE], check=True)
    return built


class Clock:
    """A wall clock that can be set."""

    def __init__(self, library: Path, folder: Path) -> None:
        file = folder / "shift"
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._shift = mmap.mmap(opened.fileno(), 8)
        self._environment = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(file)}

    @contextmanager
    def of_processes(self):
        """Let all processes that are started meanwhile use this clock."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            yield

    def set(self, seconds: float) -> None:
        """Set the clock this far ahead of the machine's clock, or behind it if negative."""
        struct.pack_into("q", self._shift, 0, int(seconds * 1_000_000))
