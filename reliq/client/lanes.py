"""
Lanes: what makes a publish or a claim safe to repeat.

Redis remembers the last call number and answer of each lane, so a call whose reply was lost is
made again under the same number and gets the same answer. A lane serves one call at a time.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from reliq.ids import token
from reliq.transitions import CallNumber

#: The lanes of at most this many calls with an unknown outcome are kept: publishing the same ids again is safe.
PARKED_LIMIT = 1000
#: A lane is kept for half of the time for which Redis remembers it, so that Redis still knows a call made again.
PARKED_SECONDS = 300.0


class Message(NamedTuple):
    """A message as it is known when it is published again: its id, and a hash of its body and all its terms."""

    id: str
    rest: int


Messages = tuple[Message, ...]


@dataclass(slots=True)
class Lane:
    """A name and the number of its last call."""

    name: str
    number: int = 0

    def next(self) -> CallNumber:
        """Return the number of a new call."""
        self.number += 1
        return CallNumber(self.name, self.number)

    def same(self) -> CallNumber:
        """Return the number of the last call, to make it again."""
        return CallNumber(self.name, self.number)


class Lanes:
    """
    The lanes of one client in this process; a fork starts with none.

    Attributes:
        parked: the calls whose outcome is unknown; while there is none, nobody need say what is published.
    """

    def __init__(self) -> None:
        self._start_over()

    def take(self, messages: Messages = ()) -> tuple[Lane, CallNumber]:
        """
        Return a lane and the call number for publishing `messages`: the old one if that call's outcome is unknown.

        Any other call with one of their ids ends the old one: what is published from now on is something else.
        """
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            if messages in self.parked:
                lane, since = self.parked[messages]
                self._forget(messages)
                if time.monotonic() - since < PARKED_SECONDS:
                    return lane, lane.same()
            if messages:
                self._end(message.id for message in messages)
            lane = self._free.pop() if self._free else self._new()
            return lane, lane.next()

    def give_back(self, lane: Lane) -> None:
        """Note that the call has its answer: the lane is free."""
        with self._lock:
            self._free.append(lane)

    def park(self, lane: Lane, messages: Messages) -> None:
        """Note that the call's outcome is unknown: its number is kept for when `messages` are published again."""
        with self._lock:
            self._end(message.id for message in messages)
            self.parked[messages] = lane, time.monotonic()
            self._by_id.update((message.id, messages) for message in messages)
            if len(self.parked) > PARKED_LIMIT:
                self._forget(next(iter(self.parked)))

    def end(self, id: str) -> None:
        """Note that a publish of `id` from now on is a new one: the message was cancelled."""
        if self.parked:
            with self._lock:
                self._end([id])

    def _end(self, ids: Iterable[str]) -> None:
        if self.parked:
            for id in ids:
                if messages := self._by_id.get(id):
                    self._forget(messages)

    def _forget(self, messages: Messages) -> None:
        del self.parked[messages]
        for message in messages:
            self._by_id.pop(message.id, None)

    def _new(self) -> Lane:
        self._made += 1
        return Lane(f"{self._client}{self._made}")

    def _start_over(self) -> None:
        self._lock = threading.Lock()  # the parent may have held the old one at the fork
        self._pid = os.getpid()
        self._client = token()
        self._made = 0
        self._free: list[Lane] = []
        self.parked: OrderedDict[Messages, tuple[Lane, float]] = OrderedDict()
        self._by_id: dict[str, Messages] = {}
