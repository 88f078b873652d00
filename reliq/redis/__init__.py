"""Calls to Redis: a client for blocking code, a client for asyncio, and their shared parts."""
