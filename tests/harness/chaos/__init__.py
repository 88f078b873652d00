"""A Jepsen-style run: producers, consumers, faults and a checker of what they wrote down. `python -m tests.harness.chaos`."""
