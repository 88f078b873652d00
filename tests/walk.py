"""The calls into the package that one message costs, counted by the interpreter's own profiler."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import reliq

PACKAGE = Path(reliq.__file__).parent


class Walk:
    """
    Every Python call into the package, in order, while it is `recording`.

    Comprehensions count as calls, as the interpreter has them. Threads must be started within `walking`.

    Attributes:
        calls: for each the name of its thread, its file and its function.
    """

    def __init__(self):
        self.recording = False
        self.calls = []
        self._folder = f"{PACKAGE}/"

    def __call__(self, frame, event, _arg):
        code = frame.f_code
        if event == "call" and self.recording and code.co_filename.startswith(self._folder):
            place = code.co_filename.removeprefix(self._folder)
            self.calls.append((threading.current_thread().name, place, code.co_qualname))

    @property
    def files(self):
        return sorted({place for _, place, _ in self.calls})

    def __str__(self):
        return "\n".join(f"{thread}: {place} {name}" for thread, place, name in self.calls)


@contextmanager
def walking():
    """Have the calls of this thread, and of those that it starts meanwhile, seen by a `Walk`."""
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
