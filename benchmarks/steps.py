"""A peer's processes: one step that ends by itself, or a worker that runs until it is ended."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.catalogue import Peer
from benchmarks.environments import ROOT, command, folder_of

STEP_SECONDS = 60.0
#: A worker may take so long to end in peace; its queue is emptied after it, so that nothing depends on that.
END_SECONDS = 0.5


class StepError(Exception):
    """A step of a peer failed; the text is its last word."""


def step(peer: Peer, name: str, *numbers: float, environment: dict[str, str]) -> float:
    """Do one step and return the seconds that it measured, 0 for one that measures nothing."""
    words = command(peer, name, *(json.dumps(number) for number in numbers))
    try:
        done = subprocess.run(
            words,
            cwd=folder_of(peer),
            env=environment_with(environment),
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepError(f"{name}: took longer than {STEP_SECONDS:g} s") from None
    if done.returncode:
        raise StepError(f"{name}: {last_line(done.stderr)}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"] or 0)


@contextmanager
def worker(peer: Peer, processes: int, *, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a peer's worker, and end all its processes."""
    words = command(peer, peer.worker, str(processes))
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder_of(peer),
            env=environment_with(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process, END_SECONDS)


def last_line(text: str) -> str:
    """Return the last error that a process named, else what it said last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(("at ", "raise ", "File "))]
    return (named or lines or ["it said nothing"])[-1][:200]


def environment_with(more: dict[str, str]) -> dict[str, str]:
    """Return the environment of a peer's processes."""
    return {**os.environ, **more, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End the worker and whatever it started: first in peace, then all that is left of its group."""
    _signal(process.pid, signal.SIGTERM)
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of them are gone
