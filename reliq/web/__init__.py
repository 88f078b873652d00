"""Web pages of the queues."""
