"""A long run at a steady rate, in which nothing may grow. `python -m tests.harness.soak --minutes 30`."""
