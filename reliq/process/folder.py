"""The folder of the files that a worker shares with its processes: locked while it works, swept by the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from reliq.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # without a Unix there are no locks, and nothing is swept
    fcntl = None  # type: ignore[assignment]

PREFIX = "reliq-worker-"
#: The folder within it for the figures of processes.
METRICS_FOLDER = "metrics"
#: The variable of Prometheus' client that names that folder to the processes.
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: A folder is not swept in its first minute: it may not be locked yet.
YOUNG_SECONDS = 60.0


class Folder:
    """
    A temporary folder of this process alone.

    Attributes:
        path: where it is; another folder after the first was cleaned away.

    Raises:
        ConfigurationError: there is no place for one.
    """

    def __init__(self) -> None:
        try:
            self._make()
        except OSError as error:
            raise ConfigurationError(
                f"a worker needs a folder for temporary files: {error}; set TMPDIR to one"
            ) from error
        _sweep(self.path.parent)

    def restore(self, within: str) -> None:
        """
        Make another folder if this one was cleaned away, and the folder `within` it.

        Another user may have made a folder of the same name since.
        """
        try:
            is_there = os.path.samestat(self.path.lstat(), self._made)
        except OSError:
            is_there = False
        if not is_there:
            Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
            before = self._lock
            self._make()
            _close(before)
        (self.path / within).mkdir(mode=0o700, exist_ok=True)

    def _make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._made, self._lock = self.path.lstat(), _locked(self.path)

    def remove(self) -> None:
        """Remove the folder with its content."""
        _close(self._lock)
        self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def _locked(path: Path) -> int:
    """Lock a folder against systemd-tmpfiles and other workers; return the lock's descriptor, -1 if it is taken."""
    if fcntl is None:
        return -1
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove the folders of workers that were killed."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or has gone meanwhile
            known = path.lstat()
            if path.is_symlink() or known.st_uid != os.geteuid() or time.time() - known.st_mtime < YOUNG_SECONDS:
                continue
            held = _locked(path)
            if held >= 0:
                shutil.rmtree(path, ignore_errors=True)
                _close(held)
