"""The relay moves messages from the outbox of a database to Redis."""
