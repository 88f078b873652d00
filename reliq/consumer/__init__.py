"""Handlers by queue, and the worker process that runs them."""
