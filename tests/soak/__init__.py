"""A long run at a steady rate: nothing may grow. `python -m tests.soak --minutes 30`."""
