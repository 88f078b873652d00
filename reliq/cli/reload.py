"""`reliq worker --reload`: a changed source stops the worker as a deploy does, and the same command begins anew."""

import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from reliq.cli.configuration import ENVIRONMENT, FILE
from reliq.cli.output import EXIT_INTERRUPTED, complain
from reliq.consumer.signals import STOPS, end_at_once, take
from reliq.distribution import missing
from reliq.errors import ConfigurationError

try:
    import watchfiles
except ImportError:  # the extra `reload` brings it
    watchfiles = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

#: Imported modules that lie elsewhere are looked at ten times a second.
LOOK_MS = 100
#: Modules that were installed do not change while one develops.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Reloader:
    """
    Notices a change of a Python file or of pyproject.toml in the working folder, or of an imported module elsewhere.

    It watches when it is made: nothing that changes while modules are imported is missed.

    Raises:
        ConfigurationError: watchfiles is not installed.
    """

    def __init__(self) -> None:
        if watchfiles is None:
            raise ConfigurationError(missing("--reload", "watchfiles", "reload"))
        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts the changes that are named here
        self._began = time.time()
        self._watch = watchfiles.watch(
            Path.cwd(),
            watch_filter=watchfiles.PythonFilter(extra_extensions=(FILE,)),
            rust_timeout=LOOK_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
        )
        next(self._watch)
        self._changed, self._watches = threading.Event(), False
        self._stop: Callable[[], bool] = lambda: True

    def watch(self, stop: Callable[[], bool]) -> None:
        """Have `stop` called, once, when a source has changed since this process began; it says whether it stops it."""
        self._stop, self._watches = stop, True
        threading.Thread(target=self._notice, name="reliq-reload", daemon=True).start()

    def exit_code(self, code: int) -> int:
        """Return `code` when the worker was to end; begin anew when a source has changed, and if it failed wait for that."""
        if code not in (0, EXIT_INTERRUPTED) and not self._changed.is_set():
            for number in STOPS:
                take(number, end_at_once)
            complain("the worker has ended; it begins anew when a source changes")
            if not self._watches:
                self.watch(lambda: True)
            self._changed.wait()
        if self._changed.is_set():
            sys.stdout.flush()
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], ENVIRONMENT)  # noqa: S606  this command
        return code

    def _notice(self) -> None:
        for changes in self._watch:
            names = {path for _, path in changes} | _changed_since(self._began)
            if names and self._stop():
                logger.info("%s changed: restarting", ", ".join(sorted(map(os.path.relpath, names))))
                self._changed.set()
            if names:
                return


def reloaded(work: Callable[[Reloader], int]) -> int:
    """Run a worker until it is to end, and begin it anew after each change of a source; return its exit code."""
    reloader = Reloader()
    return reloader.exit_code(work(reloader))


def _changed_since(moment: float) -> set[str]:
    """Return the files of imported modules that were written after a moment in unix seconds, installed ones aside."""
    changed = set()
    for path in {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}:
        with suppress(OSError):
            if path and not path.startswith(_INSTALLED) and Path(path).stat().st_mtime > moment:
                changed.add(path)
    return changed
