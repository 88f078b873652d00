"""A long run at a steady rate: nothing may grow. `python -m tests.harness.soak --minutes 30`."""
