"""Counts a message's walk through the package: every Python call into it, comprehensions and lambdas included."""

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import reliq

PACKAGE = Path(reliq.__file__).parent


class Hop(NamedTuple):
    """One call: the thread it ran in, its file within the package, and the function."""

    thread: str
    file: str
    function: str


class Walk:
    """The hops of one message, in the order in which they were made."""

    def __init__(self):
        self.hops = []

    @property
    def files(self):
        """How many calls went to each file."""
        return Counter(hop.file for hop in self.hops)

    def __str__(self):
        lines = [f"{len(self.hops)} calls in {len(self.files)} files"]
        for hop in self.hops:
            place = f"[{hop.thread}] {hop.file}"
            if lines[-1].startswith(f"{place}: "):
                lines[-1] += f", {hop.function}"
            else:
                lines.append(f"{place}: {hop.function}")
        return "\n".join(lines)


@contextmanager
def walked(*, threads=False):
    """
    Yield the walk of what runs inside: in this thread, or with `threads` in every thread that is started inside.

    A thread counts from its own start, so a worker's walk is cut out of `hops` by what it does at each end.
    """
    walk = Walk()

    def note(frame, event, _arg):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            file = path.removeprefix(f"{PACKAGE}/")
            walk.hops.append(Hop(threading.current_thread().name, file, frame.f_code.co_name))

    if threads:
        threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        if threads:
            threading.setprofile(None)
