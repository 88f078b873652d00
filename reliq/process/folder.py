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
#: A folder is not swept in its first minute: it may not be locked yet.
YOUNG_SECONDS = 60.0


class Folder:
    """
    A temporary folder of this process alone.

    Raises:
        ConfigurationError: there is no place for one.
    """

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise ConfigurationError(
                f"a worker needs a folder for temporary files: {error}; set TMPDIR to one"
            ) from error
        self._lock = _locked(self.path)
        _sweep(self.path.parent)

    def restore(self, within: str) -> None:
        """Make the folder, and the one `within` it, again if somebody has cleaned them away."""
        if not self.path.exists():
            self.path.mkdir(mode=0o700, parents=True)
            _close(self._lock)
            self._lock = _locked(self.path)
        (self.path / within).mkdir(mode=0o700, exist_ok=True)

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
