"""Register handlers, pass jobs to them, and settle messages by their results."""
