"""
Do one step of one peer: `python -m benchmarks.peers NAME STEP …`, in the peer's own environment.

Prints one line of JSON. The module is imported by its name, so that tasks have the same names here and in a worker.
"""

import asyncio
import importlib
import json
import sys


def main():
    """Do the step that the command line names."""
    name, step, *words = sys.argv[1:]
    peer = importlib.import_module(f"benchmarks.peers.{name}")
    answer = getattr(peer, step)(*(json.loads(word) for word in words))
    if asyncio.iscoroutine(answer):
        answer = asyncio.run(answer)
    print(json.dumps({"seconds": answer}))


main()
