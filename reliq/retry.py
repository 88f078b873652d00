"""Waiting and trying again, by tenacity: a handler's backoff, and the tries at a Redis that is away."""

from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    wait_exponential,
    wait_random,
    wait_random_exponential,
)
from tenacity.wait import wait_base

from reliq.errors import RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.message import RETRIES_LIMIT

#: 1 to 3 s, 2 to 6, 4 to 12 …, at most an hour; about two hours over twelve retries. Two thirds of the longest wait are
#: jitter: what failed together, when a dependency went down, does not come back together.
DEFAULT_BACKOFF = wait_exponential(max=1800) + wait_random_exponential(multiplier=2, max=1800)

#: The wait between two tries at Redis, in seconds.
RECONNECT = wait_exponential(multiplier=0.05, max=2) + wait_random(0, 0.1)

#: The longest wait between two deliveries, in seconds: ten years.
LONGEST_WAIT_SECONDS = 3650 * 86_400.0

R = TypeVar("R", Retrying, AsyncRetrying)


def seconds_after(backoff: wait_base, attempt: int) -> float:
    """
    Return how long `backoff` waits after delivery number `attempt` (1 for the first), in seconds.

    It is asked for no attempt beyond those that retries allow: a strategy may compute 2**attempt.
    """
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = min(attempt, RETRIES_LIMIT + 1)
    return max(0.0, min(LONGEST_WAIT_SECONDS, float(backoff(state))))


class Tries:
    """
    The further tries at a request, the first at once, until `for_seconds` after its beginning.

    The last one is made at the end of that time, so that a server that is away for no longer fails nothing; where
    tries take long, no further one is made that would not end in time. Whether a request ran is not known of its last
    try alone: an earlier one may have been lost on its way back.

    Args:
        first: the error that the first try ended in.
        took_seconds: how long that was.
    """

    def __init__(self, for_seconds: float, first: RedisUnavailableError, took_seconds: float) -> None:
        self._for_seconds, self._took = for_seconds, took_seconds
        self._maybe_ran = first.maybe_ran

    def of(self, kind: type[R]) -> R:
        """Return what calls a function until it is through."""
        return kind(
            retry=retry_if_exception_type(RedisUnavailableError),
            wait=lambda state: max(0.0, min(RECONNECT(state), self._left(state))),
            stop=lambda state: self._left(state) <= 0,
            before_sleep=self._note,
            reraise=True,
        )

    def mark(self, error: ReliqError) -> None:
        """Note at the last error whether any try may have run."""
        if isinstance(error, RedisUnavailableError | RedisRefusedError):
            error.maybe_ran = error.maybe_ran or self._maybe_ran

    def _left(self, state: RetryCallState) -> float:
        """Return the seconds in which a try may begin that takes as long as they did so far."""
        since = self._took + (state.seconds_since_start or 0.0)
        each = (since - state.idle_for) / (state.attempt_number + 1)
        return self._for_seconds - since - each

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, RedisUnavailableError):
            self._maybe_ran = self._maybe_ran or error.maybe_ran
