"""
The clock of a test, which time-machine moves: Redis' scripts get the time of Python, and keys expire by it.

Scripts receive the clock as an argument. Redis itself expires keys by its own clock, so a move of the test's clock changes the
time to live of every key.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.redis.commands import Command, runs
from reliq.settings import LONGEST_SECONDS, seconds
from reliq.testing.published import keys_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.message import Duration
    from reliq.redis.client import Client

#: Other code has moved Python's clock when it differs by this much from the time that has passed.
MOVED_US = 5000
#: After a move, keys expire sooner by this: real time has passed between a script's clock and its write.
SOONER_MS = 50


@runs("PTTL")
def expiries(any_keys: Sequence[str]) -> list[Command[int]]:
    """Read in how many ms keys expire; below 0: never, or gone."""
    return [Command(("PTTL", key), int) for key in any_keys]


@runs("PEXPIRE")
def expire(any_key: str, lasts_ms: int) -> Command[bool]:
    """Have a key expire in so many ms; below 1: at once."""
    return Command(("PEXPIRE", any_key, lasts_ms), bool)


class TestClock:
    """
    Python's clock as Redis' own: scripts are told it, and what expires does so when it says.

    Args:
        client: of the tests' Redis, by its own clock.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.RLock()
        self._ahead = _ahead_us()
        self._moves = ExitStack()
        self._is_held = False

    def __call__(self) -> int:
        """Return the time in unix microseconds."""
        if abs(_ahead_us() - self._ahead) >= MOVED_US:
            self.follow()
        return _now_us()

    def follow(self) -> None:
        """Have keys expire as much sooner, or later, as the clock was moved since the last time."""
        with self._lock:
            by_ms = (_ahead_us() - self._ahead) // 1000
            self._ahead += by_ms * 1000
            keys = keys_of(self._client)
            expiring = zip(keys, self._client.run_all(expiries(keys)), strict=True)
            left = [(key, ms - by_ms) for key, ms in expiring if ms >= 0]
            self._client.run_all([expire(key, ms if ms > SOONER_MS else 0) for key, ms in left])

    def travel(self, by: Duration) -> None:
        """
        Move the clock on.

        Raises:
            ConfigurationError: time would go backwards, time-machine is not installed, or something else holds the clock.
        """
        by_us = round(seconds("travel", by, most=LONGEST_SECONDS) * 1_000_000)
        # Due times are rounded up to whole ms: so is the time that meets them.
        self._move_to(-(-(_now_us() + by_us) // 1000) * 1000, ticks=not self._is_held and _ticks())

    def hold(self) -> None:
        """Have time pass by `travel` alone; raise as that does."""
        self._is_held = True
        self._move_to(_now_us() // 1000 * 1000, ticks=False)  # due times and time outs are whole ms

    def end(self) -> None:
        """Give Python its clock back."""
        self._moves.close()

    def _move_to(self, to_us: int, *, ticks: bool) -> None:
        to = to_us / 1_000_000
        if int(to * 1e9) < to_us * 1000:  # a float is exact to a quarter of a microsecond
            to = math.nextafter(to, math.inf)
        traveller = _time_machine().travel(to, tick=ticks)
        try:
            traveller.start()
        except RuntimeError as error:
            raise ConfigurationError(f"Python's clock cannot be moved: {error}") from error
        if _now_us() < to_us:
            traveller.stop()
            raise ConfigurationError(
                "something else holds Python's clock, such as freezegun: move it by that, and Redis goes by it"
            )
        self._moves.callback(traveller.stop)
        self.follow()


def _now_us() -> int:
    return time.time_ns() // 1000


def _ahead_us() -> int:
    """Return by how much Python's clock is ahead of the monotonic clock."""
    return _now_us() - time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def _ticks() -> bool:
    """Say whether Python's clock goes on by itself: a test may hold it by time-machine."""
    if not _time_machine().escape_hatch.is_travelling():
        return True
    began = time.time_ns()
    real = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    while time.clock_gettime_ns(time.CLOCK_MONOTONIC) - real < 10_000:  # noqa: PLR2004  it counts microseconds
        pass
    return time.time_ns() > began


def _time_machine() -> Any:
    try:
        return importlib.import_module("time_machine")
    except ImportError:
        raise ConfigurationError(distribution.missing("time travel", "time-machine", "testing")) from None
