"""Rates and one message of a key at a time: reliq beside the limiters of other queues, on the same work."""
