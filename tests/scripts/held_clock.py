"""The held clock of the script tests, which scripts use instead of Redis' time."""

#: In unix microseconds; scripts count in ms.
NOON = 1_800_000_000_000_000
HOUR_MS = 3_600_000


def micros(ms=0, us=0):
    """Return the time this long after noon, in microseconds."""
    return NOON + ms * 1000 + us


def millis(ms=0):
    """Return the same time in unix ms."""
    return NOON // 1000 + ms
