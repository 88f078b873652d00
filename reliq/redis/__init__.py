"""Access to Redis: a client for blocking code, a client for asyncio, their connections and their requests."""
