"""Claims messages for free slots, and waits in Redis when there are none."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq.call import Command
from reliq.doors.ids import token
from reliq.errors import RedisRefusedError, ReliqError
from reliq.worker.flight import flights_of
from reliq.worker.loop import Troubles
from reliq.worker.reader import Reader
from reliq.worker.shares import Turns, shares
from reliq.worker.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.doors.blocking import BlockingDoor
    from reliq.handler import Handler
    from reliq.worker.flight import Flight
    from reliq.worker.inflight import Inflight
    from reliq.worker.outcome import Outcome
    from reliq.worker.reader import Piece
    from reliq.worker.shares import Room
    from reliq.worker.timekeeper import Timekeeper

#: Between two looks at every queue: so much later a lost token, or Go's silent publish, is noticed.
POLL_SECONDS = 1.0
#: Between two looks at the tokens of idle queues while others keep the worker busy.
GLANCE_SECONDS = 0.05
SHORTEST_WAIT_SECONDS = 0.01
#: A wait for a token that was over so soon says that tokens come faster than one by one can be taken.
RUSH_SECONDS = 0.001
#: A poke that nobody meets goes by itself.
POKE_MS = 5000


class Fetcher:
    """
    Claims in rounds: of queues that are hot at once, else after waiting for a token.

    A round whose reply was lost is made again under the same numbers: Redis gives the same answer.

    Args:
        along: returns what is to go along with the wait of an idle second, if anything; its answers are not read.
    """

    def __init__(
        self,
        door: BlockingDoor,
        handlers: Sequence[Handler],
        inflight: Inflight,
        timekeeper: Timekeeper,
        submit: Callable[[list[Flight]], None],
        settle: Callable[[list[Flight], Outcome], None],
        along: Callable[[], Sequence[Command[None]]],
    ) -> None:
        self._door, self._inflight, self._timekeeper, self._along = door, inflight, timekeeper, along
        self._sources = [Source(handler) for handler in handlers]
        self._name = token()
        self._poke_key = self._sources[0].keys.lane(f"{self._name}.poke")
        self._turns, self._troubles = Turns(), Troubles("fetcher")
        self._reader = Reader(handlers, inflight, self._troubles, submit, settle)
        self._polled_at = self._glanced_at = time.monotonic()
        self._shut: list[Source] = []  # without room when the wait in Redis began
        self._waits_in_redis = False
        self._idle = False  # whether the last wait ended without a token
        self.last_claim_at = time.monotonic()

    def step(self) -> float:
        """Make one round; return 0: the waiting is done in Redis, or for a slot."""
        sources = [source for source in self._sources if not self._troubles.waits(source.name)]
        hot, pieces = self._hot_with_room(sources), self._reader.pieces()
        if hot or pieces:
            self._claim(hot, pieces)
        else:
            self._reader.start()
            if not sources:
                return self._troubles.seconds()
            self._look_around(sources)
        self.last_claim_at = time.monotonic()
        return 0.0

    def _hot_with_room(self, sources: list[Source]) -> list[tuple[Source, Room]]:
        """Return what can be claimed of without a look at the other queues; nothing when it is time for one."""
        now = time.monotonic()
        hot = [source for source in sources if source.hot]
        if not hot or now - self._polled_at >= POLL_SECONDS:
            return []
        if len(hot) < len(sources) and now - self._glanced_at >= GLANCE_SECONDS:
            return []
        rooms = self._inflight.wait_for_rooms(hot, 0.0)
        return [pair for pair in zip(hot, rooms, strict=True) if pair[0].is_to_be_asked(pair[1])]

    def _look_around(self, sources: list[Source]) -> None:
        """Find out which queues have work, claim of it, or wait for some; first for a slot, if all are taken."""
        rooms = self._inflight.wait_for_rooms(sources, POLL_SECONDS / 2)
        opened: list[Source] = []
        shut: list[Source] = []
        reached: list[tuple[Source, Room]] = []
        for source, room in zip(sources, rooms, strict=True):
            has_room = source.limit(room) > 0
            (opened if has_room else shut).append(source)
            if has_room or room.crowded:
                reached.append((source, room))
        self._find_hot([source for source, _ in reached])
        if hot := [pair for pair in reached if pair[0].is_to_be_asked(pair[1])]:
            self._claim(hot, [])
        elif opened:
            self._wait(opened, shut)

    def look_again(self) -> None:
        """Have a wait in Redis end when there is more to wait for than when it began; called by other threads."""
        if not self._waits_in_redis:
            return
        freed = self._inflight.has_room(self._shut)
        if freed or (self._any_waits_for_suspect() and not self._inflight.suspects):
            self.poke()

    def poke(self) -> None:
        """Have a wait in Redis end now; called by other threads."""
        if self._waits_in_redis:
            self._waits_in_redis = False
            push = Command(("RPUSH", self._poke_key, "1"), int)
            self._door.run_all([push, Command(("PEXPIRE", self._poke_key, POKE_MS), int)])

    def hand_on(self) -> None:
        """Let other processes have the tokens and the watches of this one, which ends."""
        requests: list[Any] = []
        for source in self._sources:
            watches = self._timekeeper.watches(source.name)
            if watches:
                requests.append(Command(("DEL", source.keys.watch), int))
            if watches or source.hot:
                requests.append(Command(("RPUSH", source.keys.wake, "1"), int))
                requests.append(Command(("LTRIM", source.keys.wake, 0, 0), bool))
        if requests:
            with suppress(ReliqError):
                self._door.run_all(requests)

    def _find_hot(self, sources: list[Source]) -> None:
        """Look at every queue once a second, and at those that wait for a suspect when it has ended."""
        poll = time.monotonic() - self._polled_at >= POLL_SECONDS
        if poll:
            self._polled_at = time.monotonic()
        for source in sources:
            source.unsure = source.unsure or poll
            if poll or (source.waits_for_suspect and not self._inflight.suspects):
                source.hot = True
        self._glance(sources)

    def _glance(self, sources: list[Source]) -> None:
        """Now and then, while others are hot, see whether a token has come for those that are not."""
        cold = [source for source in sources if not source.hot]
        if len(cold) in (0, len(sources)) or time.monotonic() - self._glanced_at < GLANCE_SECONDS:
            return
        self._glanced_at = time.monotonic()
        tokens = self._door.run_all([Command(("LPOP", source.keys.wake), bool) for source in cold])
        for source, token_there in zip(cold, tokens, strict=True):
            source.hot = token_there is True

    def _wait(self, sources: list[Source], shut: list[Source]) -> None:
        """Wait in Redis for a token of `sources`, the time to look at all, or a poke: a `shut` one got room."""
        self._shut = shut
        self._waits_in_redis = True  # before the last look, so that what happens after it is told by a poke
        self._inflight.watched = bool(shut) or self._any_waits_for_suspect()
        if self._inflight.closed or self._inflight.has_room(shut):
            self._waits_in_redis = False
            return
        rest = max(SHORTEST_WAIT_SECONDS, POLL_SECONDS - (time.monotonic() - self._polled_at))
        keys = [self._poke_key, *(source.keys.wake for source in sources)]
        began = time.monotonic()
        request = Command(("BLPOP", *keys, f"{rest:.3f}"), _popped_from)
        # In an idle second the look at every queue, and what else is due, go along with the wait: one round trip for all.
        looks = [source.look(self._name) for source in sources] if self._idle else []
        along = self._along() if self._idle else []
        try:
            woken, *answers = self._door.run_all([request, *looks, *along])
        finally:
            self._waits_in_redis = self._inflight.watched = False
        if isinstance(woken, Exception):
            self._find_the_culprit(sources, woken, rest)
            return
        self._idle = woken is None
        if woken is not None and time.monotonic() - began < RUSH_SECONDS:
            self._glanced_at = 0.0
        self._note_looks(sources, answers[: len(looks)], all_seen=not shut)
        for source in sources:
            source.hot = source.hot or source.keys.wake == woken

    def _note_looks(self, sources: list[Source], answers: list[Any], *, all_seen: bool) -> None:
        """Take over what looks have found, if any were made; one that failed is made again when it is time."""
        at = time.monotonic()
        for source, answer in zip(sources, answers, strict=False):
            if not isinstance(answer, Exception):
                self._troubles.over(source.name)
                self._timekeeper.note(source.name, answer, at)
                source.looked(answer)
        if answers and all_seen and not any(isinstance(answer, Exception) for answer in answers):
            self._polled_at = at

    def _find_the_culprit(self, sources: list[Source], error: Exception, seconds: float) -> None:
        """Have every queue asked, later: a wait for all of them does not say whose key is in the way."""
        if not isinstance(error, RedisRefusedError):
            raise error
        time.sleep(seconds)
        for source in sources:
            source.hot = True

    def _claim(self, hot: list[tuple[Source, Room]], pieces: list[Piece]) -> None:
        """
        Claim of `hot`, and read `pieces` of what was claimed before; what has been read starts as soon as that is sent.

        So Redis works on the next messages while handlers work on these.
        """
        suspects = 0 if self._inflight.suspects else 1
        asked = self._offered(hot) if hot else []  # a round without claims is none of the turns
        requests = [source.claim(source.limit(part), part, suspects, self._name) for source, part in asked]
        sent_at = time.monotonic()
        try:
            answers = self._door.run_all([*self._reader.requests(pieces), *requests], meanwhile=self._reader.start)
        finally:
            self._reader.start()
        failures = self._claimed(asked, answers[len(pieces) :], suspects, sent_at)
        failures += self._reader.take(pieces, answers[: len(pieces)])
        if failures:
            self._reader.start()  # the next round may be long in coming
        for name, failure in failures:
            self._troubles.note(name, failure)

    def _offered(self, hot: list[tuple[Source, Room]]) -> list[tuple[Source, Room]]:
        """Divide the free slots by the weights of the queues; a claim that has no answer yet is made again."""
        places = self._turns.order([source.name for source, _ in hot])
        weights = [source.handler.settings.weight for source, _ in hot]
        parts = shares([room for _, room in hot], weights, list(places.values()))
        offered = [(source, part) for (source, _), part in zip(hot, parts, strict=True)]
        return [(source, part) for source, part in offered if source.limit(part) or source.unsure]

    def _claimed(
        self, asked: list[tuple[Source, Room]], answers: Sequence[Any], suspects: int, sent_at: float
    ) -> list[tuple[str, Exception]]:
        """Take over what claims were told; return the queues that failed."""
        at = time.monotonic()
        failures: list[tuple[str, Exception]] = []
        for (source, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                failures.append((source.name, answer))
                continue
            self._troubles.over(source.name)
            self._timekeeper.note(source.name, answer, at)
            source.answered(answer, suspects)
            self._turns.took(source.name, len(answer.claimed) / source.handler.batch, source.handler.settings.weight)
            self._reader.add(flights_of(answer.claimed, source.handler, sent_at))
        return failures

    def _any_waits_for_suspect(self) -> bool:
        return any(source.waits_for_suspect for source in self._sources)


def _popped_from(reply: list[bytes] | None) -> str | None:
    """Return the key that a token came from."""
    return None if reply is None else reply[0].decode()
