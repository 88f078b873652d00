"""Makes a `Call`: one client for blocking code, one for asyncio, and what both share."""
