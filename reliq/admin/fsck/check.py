"""
The queue's own fsck: looks at every id, a bounded piece at a time, and sets right what is asked for.

A live queue moves while it is read. So what is wrong is never told from two readings: each id is looked at by one
script, at one moment. That settles all but what depends on the lists, which have no index. An id that may be in none
or in two of them is only suspected; it is reported when one more script has looked through both lists for it.

The Go original publishes by three commands and acks by three. In its layout all that is wrong is only suspected, and
told when it is still wrong, and the same, after a while.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reliq import commands, transitions
from reliq.admin import queue_queries
from reliq.admin.fsck.ids import Part, check_ids, check_keys
from reliq.admin.fsck.reading import BATCH, OnProgress, Reading
from reliq.admin.fsck.repair import repair_of
from reliq.admin.fsck.report import CheckReport, FaultTally, sum_of
from reliq.admin.fsck.state import IdState, faults_of, read_state
from reliq.admin.places import TYPES
from reliq.admin.shard_change import ShardChange
from reliq.call import id_text
from reliq.chunks import chunked
from reliq.commands import LISTS
from reliq.errors import RedisUnavailableError
from reliq.foreign import whole_number
from reliq.settings import seconds
from reliq.shardmap import fence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reliq.admin.queries import Index
    from reliq.admin.session import QueueSession
    from reliq.message import Duration

#: The script looks for an id this many entries around the place where it was read: as many may have come meanwhile.
MARGIN = 500
#: Entries of lists that one call compares: some 10 ms.
COMPARISONS = 500_000
#: Longer lists are not looked through: the call for one id would hold up Redis.
LONGEST_LISTS = 2_500_000
#: In shorter lists the script settles every suspicion at once.
SHORT_LISTS = 10_000
#: The lists are read this many times more, to drop the suspects that were only moving.
ROUNDS = 3


def check(queue: QueueSession, *, repair: bool, patience: Duration, progress: OnProgress) -> CheckReport:
    """Check a queue; in a layout of the Go original a fault is reported when it is still there after `patience` seconds."""
    wait = partial(time.sleep, seconds("patience", patience, most=3600))
    reports, away = list[CheckReport](), dict[int, RedisUnavailableError]()
    for part in queue.parts:
        try:
            reports.append(Checker(part, repair=repair, progress=progress, wait=wait).run())
        except RedisUnavailableError as error:
            away[part.keys.shard] = error
    if not reports:
        raise next(iter(away.values()))
    return replace(sum_of(reports), away=tuple(away))


class Checker:
    """
    One check of one queue.

    Args:
        queue: must be known.
        wait: lets the time pass after which a move of the Go original must have come to its end.
    """

    def __init__(
        self,
        queue: QueueSession,
        *,
        repair: bool,
        progress: OnProgress,
        wait: Callable[[], None],
    ) -> None:
        self._queue, self._keys, self._repair, self._wait = queue, queue.keys, repair, wait
        self._tally, self._reading = FaultTally(), Reading(queue, progress)
        self._known = self._reading.known
        self._suspects: set[str] = set()
        self._passing: dict[str, IdState] = {}
        self._unproved = 0

    def run(self) -> CheckReport:
        """Look at everything; return what was found."""
        if self._check_types():
            self._check_fence()
            self._read_lists()
            self._read_lines()
            self._read_scored()
            self._read_strays()
            self._settle_suspicions()
            self._tell_what_stays()
            self._check_keys()
            self._check_account()
        return CheckReport(self._keys.name, len(self._known), self._tally.faults(bare=self._keys.bare), self._unproved)

    def _check_types(self) -> bool:
        """Look at the types of the queue's keys; return whether scripts can run."""
        all_right = True
        for name, wanted in TYPES.items():
            found = self._queue.run(queue_queries.type_of(self._keys, name))
            if found in (wanted, "none"):
                continue
            self._tally.found("wrong-type", f"{getattr(self._keys, name)} is a {found}, not a {wanted}")
            # Scripts refuse to touch a key of the wrong type: it is the same key still.
            if self._repair and self._queue.run(queue_queries.put_aside(self._keys, name, time.time_ns() // 1_000_000)):
                self._tally.was_mended("wrong-type")
            else:
                all_right = False
        return all_right

    def _check_fence(self) -> None:
        """Compare the fence of the shard with the map."""
        if self._keys.bare:
            return
        known, fenced = self._queue.map, self._queue.run(fence(self._keys))
        if fenced is None:
            self._tally.found("bad-fence", self._keys.epoch)
            if self._repair and self._queue.run(
                queue_queries.put_aside(self._keys, "epoch", time.time_ns() // 1_000_000)
            ):
                ShardChange(self._queue).restore()
                self._tally.was_mended("bad-fence")
        elif fenced.epoch > known.epoch or (known.is_lost and self._keys.shard == 0):
            change = ShardChange(self._queue)
            if change.map.is_lost:  # else somebody has changed it since the check began
                self._tally.found(
                    "lost-map", f"{self._keys.of_shard(0).map}: {change.map.n} shards, epoch {change.map.epoch}"
                )
                if self._repair:
                    change.restore()
                    self._tally.was_mended("lost-map")

    def _read_lists(self) -> None:
        """Read ready and retry, from the end where ids come in: what comes in meanwhile hides nothing."""
        for part in LISTS:
            for start, ids in self._reading.pieces(part):
                again = {id for id in ids if id in self._known} | {id for id, n in Counter(ids).items() if n > 1}
                self._suspects |= again
                fresh = [id for id in dict.fromkeys(ids) if id not in again]
                self._look(fresh, part, (max(0, start - MARGIN), start + BATCH + MARGIN))

    def _read_lines(self) -> None:
        """Read the lines of message keys, from the end where ids come in."""
        for start, rows in self._reading.line_pieces():
            ids = [id for id, _ in rows]
            again = {id for id in ids if id in self._known} | {id for id, n in Counter(ids).items() if n > 1}
            self._suspects |= again
            fresh = [row for row in rows if row[0] not in again]
            self._reading.lines |= dict(fresh)
            self._look([id for id, _ in fresh], "line", (max(0, start - MARGIN), start + BATCH + MARGIN))
            for id, key in rows:
                if id in again:
                    self._note_line(id, key)

    def _note_line(self, id: str, key: str) -> None:
        """Note the line of an id that was met before, unless it is that of its own key."""
        before = self._reading.lines.get(id, "")
        self._reading.lines[id] = key
        self._states([id])
        if before:
            self._reading.lines.setdefault(id, before)

    def _read_scored(self) -> None:
        """Read what is in no list but has a place."""
        places: tuple[Index, ...] = ("pending", "unack", "garbage")
        for place in places:
            for ids in self._reading.scanned(place, place):
                self._look(ids)

    def _read_strays(self) -> None:
        """Read what belongs to ids; those that were met nowhere are suspected to be in no place."""
        hashes: dict[str, Index] = {"retry counts": "retries_left", "state words": "lease", "errors": "errors"}
        for what, index in hashes.items():
            for ids in self._reading.scanned(what, index):
                self._look(ids)
        for ids in self._reading.bodies():
            lefts = self._queue.run(commands.retries_left(self._keys, ids))
            self._look([id for id, left in zip(ids, lefts, strict=True) if left is None])

    def _look(self, ids: Sequence[str], part: Part = "", piece: tuple[int, int] = (1, 0)) -> None:
        """Look at ids that were read in one place; note what is wrong, or suspected."""
        if not ids:
            return
        self._known.update(ids)
        now_ms, states = self._states(ids, part, piece)
        wrong = []
        for state in states:
            if _needs_proof(state, part) or (not state.scored and not state.listed and self._faults(state, now_ms)):
                self._suspects.add(state.id)
            elif self._faults(state, now_ms):
                wrong.append(state)
        self._note(wrong, now_ms, part, piece)

    def _settle_suspicions(self) -> None:
        """Look through both lists for every suspect, and tell what is wrong with those that are still."""
        length = self._reading.length_of_lists()
        rounds = ROUNDS if length > SHORT_LISTS else 0
        for _ in range(rounds):
            self._drop_what_only_moved()
        if length > LONGEST_LISTS:
            self._unproved = len(self._suspects)
            return
        for now_ms, states in self._searched(self._suspects, length):
            self._note([state for state in states if self._faults(state, now_ms)], now_ms, "both")

    def _tell_what_stays(self) -> None:
        """Look once more at what was wrong in a queue of the Go original, and tell what is wrong in the same way."""
        if not self._passing:
            return
        self._reading.tell("what was wrong, once more")
        self._wait()
        length, before = self._reading.length_of_lists(), self._passing
        if length > LONGEST_LISTS:
            self._unproved += len(before)
            return
        for now_ms, states in self._searched(before, length):
            stayed = [state for state in states if state.is_as(before[state.id]) and self._faults(state, now_ms)]
            self._tell(stayed, now_ms, "both")

    def _searched(self, ids: Iterable[str], length: int) -> Iterator[tuple[int, list[IdState]]]:
        """Yield the states of `ids`, looked for in both lists, some at a time."""
        size = max(1, min(BATCH, COMPARISONS // max(1, length)))
        for some in chunked(sorted(ids), size):
            self._reading.tell("suspects")
            yield self._states(some, "both")

    def _drop_what_only_moved(self) -> None:
        """Read the lists once more, and drop the suspects that are in one place by now, or have ended."""
        if not self._suspects:
            return
        met: Counter[str] = Counter()
        for part in LISTS:
            for _, ids in self._reading.pieces(part):
                met.update(self._suspects.intersection(ids))
        for ids in chunked(sorted(self._suspects), BATCH):
            _, states = self._states(ids)
            for state in states:
                places = len(state.scored) + met[state.id]
                is_sound = places == 1 and state.left is not None
                if is_sound or (places == 0 and state.is_empty):
                    self._suspects.discard(state.id)

    def _check_keys(self) -> None:
        """Look at every message key, and at every place of one that is held or should be."""
        for items in self._reading.keys_and_places():
            faults = self._queue.run(check_keys(self._keys, items, repair=self._repair))
            for (key, id), fault in zip(items, faults, strict=True):
                if fault:
                    self._tally.found(fault, id or key)
                if fault and self._repair:
                    self._tally.was_mended(fault)

    def _check_account(self) -> None:
        """Compare what was published with what has ended and what lives, at one moment."""
        totals = self._queue.run(queue_queries.raw_totals(self._keys))
        numbers = {totals[at]: whole_number(totals[at + 1]) for at in range(0, len(totals), 2)}
        bad = [name for name, number in numbers.items() if number is None or number < 0]
        for name in bad:
            self._tally.found("bad-total", id_text(name))
        if bad or self._keys.bare:  # the Go original keeps no account
            return
        counts = self._queue.run(transitions.counts(self._keys))
        until = counts.keyed and self._queue.run(transitions.lines(self._keys)).asleep_until
        if until:
            self._tally.found("asleep", f"until unix time {until:.0f}")
        if missing := counts.missing:
            self._tally.found("account", f"{abs(missing)} too {'few' if missing > 0 else 'many'}", abs(missing))

    def _note(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int] = (1, 0)) -> None:
        """Note what is wrong with ids; in a queue of the Go original it may be a move that is not over."""
        if self._keys.bare:
            self._passing |= {state.id: state for state in states}
        else:
            self._tell(states, now_ms, part, piece)

    def _tell(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int] = (1, 0)) -> None:
        """Tell what is wrong with ids, and set it right if that was asked for."""
        mended = self._mended(states, now_ms, part, piece) if self._repair else set()
        for state in states:
            for name in self._faults(state, now_ms):
                self._tally.found(name, state.id)
                if state.id in mended:
                    self._tally.was_mended(name)

    def _mended(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int]) -> set[str]:
        """Set ids right where they still are as they were seen; return those that were."""
        repairs = {}
        for state in states:
            repair = repair_of(state, now_ms, bare=self._keys.bare)
            if repair is not None:
                repairs[state.id] = repair.args(state.digest)
        if not repairs:
            return set()
        ids = list(repairs)
        lines = {state.id: state.at for state in states}
        _, rows = self._queue.run(check_ids(self._keys, ids, part=part, piece=piece, lines=lines, wishes=repairs))
        return {id for id, row in zip(ids, rows, strict=True) if row == b"mended"}

    def _faults(self, state: IdState, now_ms: int) -> list[Any]:
        return faults_of(state, now_ms, bare=self._keys.bare)

    def _states(
        self, ids: Sequence[str], part: Part = "", piece: tuple[int, int] = (1, 0)
    ) -> tuple[int, list[IdState]]:
        lines = self._reading.lines
        now_ms, rows = self._queue.run(check_ids(self._keys, ids, part=part, piece=piece, lines=lines))
        states = [read_state(id, row, lines.get(id, "")) for id, row in zip(ids, rows, strict=True)]
        self._reading.note(states)
        return now_ms, states


def _needs_proof(state: IdState, part: Part) -> bool:
    """Say whether what is wrong, or not, with an id depends on lists that were not looked through."""
    if state.scored:
        return state.listed > 0
    return not part and not state.is_empty
