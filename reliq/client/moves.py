"""The raw transitions of one queue, made at once: `queue.moves.claim(...)`."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from reliq import transitions
from reliq.call import Call
from reliq.client.client import Client
from reliq.keys import Keys

P = ParamSpec("P")
T = TypeVar("T")


class Moves:
    """
    The functions of `reliq.transitions` that move messages or hold them up, with the queue's keys, made at once.

    For tools and tests that need one exact move. Nothing is retried: a call that failed may have run.
    """

    def __init__(self, keys: Keys, client: Callable[[], Client]) -> None:
        self._keys, self._client = keys, client
        self.publish = self._move(transitions.publish)
        self.promote = self._move(transitions.promote)
        self.claim = self._move(transitions.claim)
        self.reclaim = self._move(transitions.reclaim)
        self.ack = self._move(transitions.ack)
        self.nack = self._move(transitions.nack)
        self.extend = self._move(transitions.extend)
        self.release = self._move(transitions.release)
        self.snooze = self._move(transitions.snooze)
        self.cancel = self._move(transitions.cancel)
        self.reschedule = self._move(transitions.reschedule)
        self.collect = self._move(transitions.collect)
        self.redrive = self._move(transitions.redrive)
        self.purge = self._move(transitions.purge)
        self.counts = self._move(transitions.counts)
        self.tidy = self._move(transitions.tidy)
        self.limit = self._move(transitions.limit)
        self.sleep = self._move(transitions.sleep)

    def _move(self, build: Callable[Concatenate[Keys, P], Call[T]]) -> Callable[P, T]:
        def move(*args: P.args, **options: P.kwargs) -> T:
            return self._client().run(build(self._keys, *args, **options))

        move.__name__, move.__doc__ = build.__name__, build.__doc__
        return move
