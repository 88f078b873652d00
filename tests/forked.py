"""Processes that start in milliseconds, so that many can be killed."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

# One fork server for all tests of a process: it has imported the package, not the test modules.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["reliq.admin", "reliq.consumer"])


def forked(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Start `target` in a process with a copy of this environment; the fork server has the first test's environment."""
    child = CONTEXT.Process(target=_run, args=(dict(os.environ), target, args), daemon=True)
    child.start()
    return child


def end_forked() -> None:
    """Kill the remaining forked processes."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def _run(environment: dict[str, str], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
