"""A Jepsen-style test: producers, consumers, faults and a checker of the histories. `python -m tests.harness.chaos`."""
