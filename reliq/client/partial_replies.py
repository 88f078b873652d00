"""Requests of one round trip and their replies, of which some may come from a further try."""

from collections.abc import Sequence
from typing import Any

from reliq.call import Request
from reliq.client.errors import translated
from reliq.errors import RedisUnavailableError
from reliq.transport.failures import NotSentError, is_failure


class PartialReplies:
    """
    The replies to `requests`, each in its place.

    One of several servers may fail and the others answer: a further try makes the failed requests alone, of those only
    the sent ones when `once_sent` is true.

    Attributes:
        replies: empty until there was a round trip.
        left: the places whose servers failed.
    """

    def __init__(self, requests: Sequence[Request[Any]], *, once_sent: bool = False) -> None:
        self._requests, self._once_sent = requests, once_sent
        self.replies: list[Any] = []
        self.left: Sequence[int] = range(len(requests))

    @property
    def requests(self) -> list[Request[Any]]:
        """The requests to be made."""
        return [self._requests[at] for at in self.left]

    def put(self, replies: list[Any]) -> None:
        """Take the replies to the requests that were left."""
        self.replies = self.replies or [None] * len(self._requests)
        for at, reply in zip(self.left, replies, strict=True):
            # Whether a request ran is not known of its last try alone.
            if not (isinstance(reply, NotSentError) and is_failure(self.replies[at])):
                self.replies[at] = reply
        done = (NotSentError,) if self._once_sent else ()
        self.left = [at for at in self.left if is_failure(self.replies[at]) and not isinstance(self.replies[at], done)]

    def check(self) -> None:
        """Raise RedisUnavailableError when there are places left."""
        if self.left:
            error = translated(self._requests[self.left[0]], self.replies[self.left[0]])
            if isinstance(error, RedisUnavailableError):
                raise error
