"""The end of a supervisor or of one of its processes, which no thread of the application can hold up."""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

#: The functions of atexit have 3 s to flush logs, spans and reports of errors.
ATEXIT_SECONDS = 3.0


def leave(exit_code: int) -> NoReturn:
    """Call what atexit has, and end this process although a thread of it may run on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    last = threading.Thread(target=_finish, daemon=True)
    last.start()
    last.join(ATEXIT_SECONDS)
    os._exit(exit_code)


def _finish() -> None:
    atexit._run_exitfuncs()  # noqa: SLF001  there is no public way
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, here or at its other end
            stream.flush()
