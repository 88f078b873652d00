"""The shards of a queue that one process looks at while it waits, and moves what comes due there."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import closing, suppress
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from reliq.errors import ReliqError
from reliq.keys import token
from reliq.lua import transitions
from reliq.lua.transitions import NOT_WATCHING, CallNumber
from reliq.redis import commands
from reliq.redis.wakeups import WakeTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.keys import Keys
    from reliq.lua.transitions import ClaimAnswer
    from reliq.redis.client import Client
    from reliq.redis.commands import Call
    from reliq.redis.shards import Shards


#: A shard is looked at this often, which bounds the delay after a lost wake token.
EACH_SHARD_SECONDS = 1.0
#: A shard that another process watches is looked at by that one; by this one in case that it was killed.
WATCHED_SHARD_SECONDS = 2.5
#: Another move is made after this time where something is still due, such as leases that are spared.
AGAIN_SECONDS = 0.1
#: A look names a length for leases, in ms, and leases nothing.
_LEASE_MS = 1000


class ShardWatch:
    """
    One process' looks at shards: it watches for the due times of those that no other process watches (see `claim`).

    Args:
        spares_leases: says of a shard whether its leases that are over are left alone.
    """

    def __init__(self, client: Client, spares_leases: Callable[[Keys], bool]) -> None:
        self._client, self._spares_leases = client, spares_leases
        self._name = token()
        self._look_at: dict[Keys, float] = {}
        self._due_at: dict[Keys, float] = {}  # of the shards that are watched here, or were until somebody was told

    def seconds(self) -> float:
        """Return how long nothing is to be done."""
        return max(0.0, min([*self._look_at.values(), *self._due_at.values()], default=0.0) - time.monotonic())

    def note(self, keys: Keys, at: float) -> None:
        """Take over that something is due in a shard: whoever put it there has ended the watch, and told it by a token."""
        self._due_at[keys] = min(at, self._due_at.get(keys, inf))

    def step(self, shards: Sequence[Keys]) -> list[Keys]:
        """
        Look at the shards whose time has come, and move what is due there; return those that have messages.

        Raises:
            ReliqError: none of them could be looked at.
        """
        for keys in self._look_at.keys() - set(shards):
            self._look_at.pop(keys)
            self._due_at.pop(keys, None)
        now = time.monotonic()
        due = {keys for keys in shards if self._due_at.get(keys, now + 1) <= now}
        asked = [keys for keys in shards if keys in due or self._look_at.get(keys, 0.0) <= now]
        calls = [self._calls(keys, is_due=keys in due) for keys in asked]
        answers = iter(self._client.run_all([call for some in calls for call in some]))
        looks = [[next(answers) for _ in some][-1] for some in calls]
        for keys, look in zip(asked, looks, strict=True):
            self._note(keys, look, has_moved=keys in due)
        failures = [look for look in looks if isinstance(look, Exception)]
        if failures and len(failures) == len(looks):
            raise failures[0]
        return [
            keys for keys, look in zip(asked, looks, strict=True) if not isinstance(look, Exception) and look.behind
        ]

    def close(self) -> None:
        """Let other processes watch; where something is to come due, one of them looks at once."""
        requests: list[Any] = []
        for keys, at in self._due_at.items():
            requests += [commands.drop_watch(keys), *(commands.push_wake_token(keys) if isfinite(at) else ())]
        with suppress(ReliqError):
            self._client.run_all(requests)

    def _calls(self, keys: Keys, *, is_due: bool) -> list[Call[Any]]:
        number = CallNumber(self._name, 1)  # a look needs no number
        look = transitions.claim(keys, number, limit=0, lease_ms=_LEASE_MS, watcher=self._name)
        if not is_due:
            return [look]
        return [transitions.promote(keys), transitions.reclaim(keys, spare_leases=self._spares_leases(keys)), look]

    def _note(self, keys: Keys, look: ClaimAnswer | Exception, *, has_moved: bool) -> None:
        """Take over when a shard is due, and when it is looked at again."""
        now = time.monotonic()
        self._due_at.pop(keys, None)
        if isinstance(look, Exception):
            self._look_at[keys] = now + EACH_SHARD_SECONDS
            return
        is_watched_here = look.promote_in_ms != NOT_WATCHING
        self._look_at[keys] = now + (EACH_SHARD_SECONDS if is_watched_here else WATCHED_SHARD_SECONDS)
        if is_watched_here:
            waits = [ms / 1000 for ms in (look.promote_in_ms, look.reclaim_in_ms) if ms >= 0]
            self._due_at[keys] = now + max(min(waits, default=inf), AGAIN_SECONDS * has_moved)


logger = logging.getLogger(__name__)

#: The thread of a listener takes a step at least this often.
STEP_SECONDS = 1.0
#: The connections are kept for the next wait for this many seconds after the last one.
KEPT_SECONDS = 1.0

#: Where a wait has found something: in these shards, or anywhere.
Found = tuple["Keys", ...]
ANYWHERE: Found = ()


class Listener:
    """
    The waits of a process for a queue whose shards lie apart, as a worker waits: a standing wait for each shard's token.

    Its thread runs while anybody waits. A token wakes who has waited for the longest; where nobody waits any more another
    process gets it.

    Args:
        spares_leases: says of a shard whether its leases that are over are left alone.
    """

    def __init__(self, client: Client, shards: Shards, spares_leases: Callable[[Keys], bool]) -> None:
        self.client, self._shards, self._spares_leases = client, shards, spares_leases
        self._lock = threading.Lock()
        self._waiting: deque[Future[Found]] = deque()
        self._unheard: list[Keys] = []  # what came for who has gone
        self._dues: dict[Keys, float] = {}  # what looks have seen, until the thread takes it over
        self._left_at = 0.0  # when the last wait ended
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._poke: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> Found | None:
        """Wait so long for something to come; return where, or None."""
        place = self._enter()
        try:
            return place.result(seconds)
        except TimeoutError:
            return self._leave(place)
        except BaseException:
            self.give_back(self._leave(place))
            raise

    async def await_(self, seconds: float) -> Found | None:
        """As `wait`, in async code."""
        place = self._enter()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(place)), seconds)
        except TimeoutError:
            return self._leave(place)
        except BaseException:
            self.give_back(self._leave(place))
            raise

    def note(self, due_in: dict[Keys, float]) -> None:
        """Take over in how many seconds something is due in shards, as a look has seen: who looked may be gone by then."""
        now = time.monotonic()
        with self._lock:
            for keys, seconds in due_in.items():
                self._dues[keys] = now + seconds
        if due_in:
            self._poke()

    def close(self) -> None:
        """End the thread, and its connections."""
        with self._lock:
            self._is_closed, thread = True, self._thread
        self._poke()
        if thread is not None:
            thread.join(KEPT_SECONDS)

    def _enter(self) -> Future[Found]:
        place: Future[Found] = Future()
        with self._lock:
            self._is_closed = False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="reliq-listener", daemon=True)
                thread.start()  # one that cannot start is none: the next wait tries again
                self._thread = thread
            self._waiting.append(place)
        self._poke()
        return place

    def _leave(self, place: Future[Found]) -> Found | None:
        """Give up a place; return what has come for it meanwhile."""
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                self._left_at = time.monotonic()
                return None
        return place.result()

    def give_back(self, found: Found | None) -> None:
        """Have somebody else take what came for who has gone."""
        for keys in found or ():
            if not self._wake((keys,)):
                with self._lock:
                    self._unheard.append(keys)
                self._poke()

    def _wake(self, found: Found) -> bool:
        """Wake who has waited for the longest; return whether anybody waits."""
        with self._lock:
            if not self._waiting:
                return False
            self._left_at = time.monotonic()
            self._waiting.popleft().set_result(found)
            return True

    def _wake_all(self) -> None:
        """Have everybody look, who sees then what failed."""
        while self._wake(ANYWHERE):
            pass

    def _run(self) -> None:
        try:
            with (
                closing(ShardWatch(self.client, self._spares_leases)) as watch,
                closing(WakeTokens(self.client)) as tokens,
            ):
                self._poke = tokens.poke
                while not self._is_over():
                    self._step(tokens, watch)
        except Exception:
            logger.exception("queue %s: the waits of `receive` failed and begin anew", self._shards.first.name)
            time.sleep(STEP_SECONDS)  # whoever waits looks then, and begins them anew
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._wake_all()

    def _is_over(self) -> bool:
        with self._lock:
            is_kept = bool(self._waiting or self._unheard)
            is_over = not is_kept and (self._is_closed or time.monotonic() >= self._left_at + KEPT_SECONDS)
            if is_over:
                self._thread = None
            return is_over

    def _step(self, tokens: WakeTokens, watch: ShardWatch) -> None:
        """Look at what is to be looked at, stand while anybody waits, and hear what comes."""
        if self._shards.is_due:
            with suppress(ReliqError):
                self._shards.refresh(for_seconds=0.0)
        with self._lock:
            dues, self._dues = self._dues, {}
        for keys, at in dues.items():
            watch.note(keys, at)
        shards, seconds = self._shards.all, STEP_SECONDS
        if self._waiting:
            tokens.expect(shards)
        try:
            tokens.pass_on([keys for keys in watch.step(shards) if not self._wake((keys,))])
            seconds = min(seconds, watch.seconds())
        except ReliqError as error:
            logger.debug("queue %s: no shard can be looked at: %s", self._shards.first.name, error)
            self._wake_all()
        came = tokens.came(seconds)
        with self._lock:
            unheard, self._unheard = self._unheard, []
        tokens.pass_on([*unheard, *(keys for keys in came if not self._wake((keys,)))])
