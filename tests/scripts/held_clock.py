"""The held clock of the scripts' tests: a script takes it for Redis' own."""

#: In unix microseconds; scripts count in ms.
NOON = 1_800_000_000_000_000
HOUR_MS = 3_600_000


def micros(ms=0, us=0):
    """The clock so long after noon."""
    return NOON + ms * 1000 + us


def millis(ms=0):
    """The same moment in unix ms."""
    return NOON // 1000 + ms
