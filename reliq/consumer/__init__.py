"""The `Consumer`: it finds the user's module, starts the worker's engine, and ends it at a signal."""
