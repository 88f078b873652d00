"""Limiters of the queues that have one, each in the environment of its queue."""
