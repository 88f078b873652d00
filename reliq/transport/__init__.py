"""Commands out, replies back: URLs, pools, connections, and one round trip at a time."""
