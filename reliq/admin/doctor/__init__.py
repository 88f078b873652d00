"""Whether a server is fit for queues."""
