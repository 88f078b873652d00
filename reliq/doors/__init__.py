"""Where a `Call` is made: one door for blocking code, one for asyncio, and what both share."""
