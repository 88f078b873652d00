"""
Do one step of one peer: `python -m benchmarks.peers NAME STEP NUMBER…`, in the peer's own environment.

The module is imported by its name, so that tasks have the same names here and in a worker.
"""

import asyncio
import importlib
import sys

name, step, *numbers = sys.argv[1:]
seconds = getattr(importlib.import_module(f"benchmarks.peers.{name}"), step)(*map(int, numbers))
if asyncio.iscoroutine(seconds):
    seconds = asyncio.run(seconds)
print(seconds or 0)
