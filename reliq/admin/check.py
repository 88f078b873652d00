"""`reliq check`: the faults that a queue can have, what its ids say at one moment, the report, and the repair."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from reliq.admin import calls
from reliq.admin.calls import TYPES, KeyQueueState
from reliq.errors import RedisUnavailableError
from reliq.lua import script, transitions
from reliq.lua.transitions import bounded, clock_arg
from reliq.redis import commands
from reliq.redis.commands import LISTS, Arg, Call, id_text
from reliq.redis.shards import fence
from reliq.settings import seconds
from reliq.sharding import ShardChange
from reliq.text import chunked, whole_number
from reliq.wire_format import (
    Delayed,
    FailureNote,
    Held,
    StateWord,
    Suspect,
    Unset,
    count_text,
    envelope_due,
    read_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reliq.admin.calls import Index
    from reliq.admin.session import QueueSession
    from reliq.keys import Keys
    from reliq.message import Duration
    from reliq.redis.commands import Arg, Command, List


Part = Literal["", "ready", "retry", "line", "both"]

CHECK = script("check", __package__)
CHECK_KEYS = script("check_keys", __package__)
_NO_WISH = ("",) * 7
NOWHERE: Mapping[str, str] = {}


def check_ids(
    keys: Keys,
    ids: Sequence[str],
    *,
    part: Part = "",
    piece: tuple[int, int] = (1, 0),
    lines: Mapping[str, str] = NOWHERE,
    wishes: Mapping[str, Sequence[Arg]] | None = None,
    clock: int | None = None,
) -> Call[tuple[int, list[Any]]]:
    """
    Tell the state of each id, read at one moment, and set right those that have a wish.

    Args:
        part: the list that is looked through in its `piece`, from one index to another; `line` is that in which an id
            was met, `both` is all of each.
        lines: the message key of the line in which an id was met, by id.
        wishes: the fields after the id in the script's ARGV, by id.

    Returns:
        The time in ms, and a row for each id: its state, or for a wish `mended`, or `changed` where the state is no
        longer the one that was seen.
    """
    bounded("ids", ids)
    args: list[Arg] = [clock_arg(clock), part, *piece]
    for id in ids:
        args += (id, lines.get(id, ""), *(wishes[id] if wishes else _NO_WISH))
    return Call(
        CHECK,
        (*CHECK.lead(keys), *keys.msgs(ids), *map(keys.dedup, ids)),
        args,
        lambda reply: (int(reply[0]), reply[1:]),
    )


def check_keys(
    keys: Keys, items: Sequence[tuple[str, str]], *, repair: bool, clock: int | None = None
) -> Call[list[FaultName | None]]:
    """
    Tell what is wrong with message keys, and with places of keys, and set it right with `repair`.

    Args:
        items: a key and an empty text, or a key and the id of a message that holds a place of it, or should.
    """
    bounded("items", items)
    args: list[Arg] = [clock_arg(clock), "1" if repair else "", *(part for item in items for part in item)]
    return Call(CHECK_KEYS, CHECK_KEYS.lead(keys), args, lambda reply: [_fault(one) for one in reply])


def _fault(reply: bytes) -> FaultName | None:
    word = reply.decode()
    if word and word not in get_args(FaultName):
        raise ValueError
    return cast("FaultName", word) if word else None


T = TypeVar("T")
#: It is called with the name of what is read, and how many ids were looked at so far.
OnProgress = Callable[[str, int], None]

#: Ids that are read in one piece and looked at in one call: some 2 ms.
BATCH = 250
#: Keys that Redis looks at in one step of a walk through the key space: some 0.3 ms.
SCANNED_KEYS = 1000


@dataclass(slots=True)
class Reading:
    """
    One reading of a queue.

    Attributes:
        known: the ids that were looked at.
        lines: the message key of the line in which an id was met that has no place there.
        leases: key and id of every message with a key that is leased.
        keys: the message keys that have a line.
        longest_line: how many ids the longest line has.
    """

    queue: QueueSession
    progress: OnProgress
    known: set[str] = field(default_factory=set)
    lines: dict[str, str] = field(default_factory=dict)
    leases: set[tuple[str, str]] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    longest_line: int = 0

    def tell(self, what: str) -> None:
        """Say what is read now."""
        self.progress(what, len(self.known))

    def note(self, states: Iterable[IdState]) -> None:
        """Note what is known now of ids."""
        for one in states:
            if one.at and one.at == one.key:
                del self.lines[one.id]
            if one.key and one.lease_ms is not None:
                self.leases.add((one.key, one.id))

    def pieces(self, part: List) -> Iterator[tuple[int, list[str]]]:
        """Yield the ids of a list, a piece at a time, each with the place of its first."""
        start = 0
        while True:
            self.tell(part)
            ids = self.queue.run(calls.newest_ids(self.queue.keys, part, start, BATCH))
            if not ids:
                return
            yield start, ids
            start += len(ids)

    def line_pieces(self) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """Yield the ids of lines, each with its key: pieces of one long line, or the begin of several lines."""
        for keys in self._line_keys():
            self.keys.update(keys)
            begins = self.queue.run_all(
                [calls.newest_ids(self.queue.keys, KeyQueueState(key), 0, BATCH) for key in keys]
            )
            rows = [(id, key) for key, ids in zip(keys, begins, strict=True) for id in ids]
            for some in chunked(rows, BATCH):
                yield 0, some
            for key, ids in zip(keys, begins, strict=True):
                self.longest_line = max(self.longest_line, len(ids))
                if len(ids) == BATCH:
                    yield from self._rest_of_line(key, BATCH)

    def _rest_of_line(self, key: str, start: int) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        while ids := self.queue.run(calls.newest_ids(self.queue.keys, KeyQueueState(key), start, BATCH)):
            yield start, [(id, key) for id in ids]
            start += len(ids)
            self.longest_line = max(self.longest_line, start)

    def _line_keys(self) -> Iterator[list[str]]:
        """Yield the message keys that have a line, some at a time; a queue without keys is not looked through for them."""
        if self.queue.run(calls.has_keys(self.queue.keys)):
            for keys in self._scanned("lines", calls.names_of, "line", count=SCANNED_KEYS):
                yield from chunked(keys, BATCH)

    def keys_and_places(self) -> Iterator[list[tuple[str, str]]]:
        """Yield every message key that is known, without an id, and every place of one that is held, or should be."""
        yield from chunked(sorted(self.leases), BATCH)
        for places in self._scanned("places", calls.places_scanned):
            yield from chunked(places, BATCH)
        in_turn = (self._scanned(name, calls.keys_among, name) for name in ("ring", "asleep"))
        for keys in chain([sorted(self.keys)], *in_turn):
            yield from ([(key, "") for key in some] for some in chunked(keys, BATCH))

    def scanned(self, what: str, index: Index) -> Iterator[list[str]]:
        """Yield the ids of a set, sorted set or hash that were not looked at yet, a piece at a time."""
        for found in self._scanned(what, calls.ids_scanned, index):
            yield from map(self.unknown, chunked(found, BATCH))

    def bodies(self) -> Iterator[list[str]]:
        """Yield the ids that have a body and were not looked at yet."""
        for found in self._scanned("bodies", calls.names_of, "msg", count=SCANNED_KEYS):
            yield from chunked(self.unknown(found), BATCH)

    def _scanned(
        self, what: str, step: Callable[..., Command[tuple[int, list[T]]]], *of: str, count: int = BATCH
    ) -> Iterator[list[T]]:
        """Yield what each step of a walk finds that `step` makes; say before each what is read."""

        def next_step(at: int) -> Command[tuple[int, list[T]]]:
            self.tell(what)
            return step(self.queue.keys, *of, at, count)

        return self.queue.scan(next_step)

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that were not looked at yet, each once."""
        return [id for id in dict.fromkeys(ids) if id not in self.known]

    def length_of_lists(self) -> int:
        """Return how many ids one that is looked for everywhere is compared with."""
        sizes: list[int] = self.queue.run_all([calls.size(self.queue.keys, place) for place in LISTS])
        return sum(sizes) + self.longest_line


FaultName = Literal[
    "lost-map",
    "bad-fence",
    "twice",
    "lost",
    "stray-body",
    "stray-count",
    "stray-word",
    "stray-error",
    "no-count",
    "bad-count",
    "ended-count",
    "wrong-word",
    "wrong-time",
    "strange-body",
    "no-body",
    "no-word",
    "no-place",
    "misplaced",
    "stray-place",
    "stuck-key",
    "stray-turn",
    "long-sleep",
    "asleep",
    "wrong-type",
    "bad-total",
    "account",
]

#: September 2001: a smaller number is no time in unix ms.
FIRST_MS = 10**12
#: Due times and leases lie at most this many ms ahead.
LONGEST_AHEAD_MS = 3660 * 86_400_000
#: A lease may seem this many ms longer than it is.
CLOCK_SLACK_MS = 1000

_COUNT = re.compile(r"\d{1,6}( .+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class IdState:
    """
    Everything that Redis knows of an id, at one moment.

    Attributes:
        pending, unack: its score, in unix seconds, None where it is not.
        garbage: whether it waits to be collected.
        ready, retry: how often it is in a list, None where nobody looked.
        line, other: how often it is in the line of its key, and in that of the other key under which it was met.
        left: its retry count as it stands, None without one.
        key: its message key, empty without one.
        at: the key in whose line it was met, empty where it was met elsewhere.
        word: its state word.
        error: whether a last error is kept.
        body: the type of its body's key, `none` without one.
        due_ms: as the envelope of its body says, None without one.
        digest: of all that; a repair is made only while it is still the same.
    """

    id: str
    pending: float | None
    unack: float | None
    garbage: bool
    ready: int | None
    retry: int | None
    line: int | None
    other: int | None
    left: str | None
    key: str
    at: str
    word: StateWord
    error: bool
    body: str
    due_ms: int | None
    digest: str

    @property
    def scored(self) -> list[str]:
        """The places it is in, besides the lists."""
        held = {"pending": self.pending is not None, "unack": self.unack is not None, "garbage": self.garbage}
        return [place for place, there in held.items() if there]

    @property
    def listed(self) -> int:
        """How often it is known to be in a list."""
        return (self.ready or 0) + (self.retry or 0) + (self.line or 0) + (self.other or 0)

    @property
    def is_exact(self) -> bool:
        """Whether every list was looked through in which it can be."""
        return self.ready is not None and self.retry is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of it anywhere but, perhaps, in a list."""
        return not self.scored and self.left is None and not self.has_word and not self.error and self.body == "none"

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, and ends when a worker meets it."""
        return self.word.cancelled

    @property
    def has_word(self) -> bool:
        """Whether it has a state word."""
        return self.word != Unset()

    def is_as(self, other: IdState) -> bool:
        """Say whether nothing has changed since `other` was seen, but for what is known of the lists."""
        unlooked = {"ready": None, "retry": None, "line": None, "other": None, "digest": ""}
        return replace(self, **unlooked) == replace(other, **unlooked)  # type: ignore[arg-type]

    @property
    def lease_ms(self) -> int | None:
        """How long the claim that holds it said, None when none does."""
        return self.word.lease_ms if isinstance(self.word, Held) else None


def read_state(id: str, row: Sequence[Any], at: str = "") -> IdState:
    """Return the state of `id`, which was met in the line of `at`, from a row of the script `check`."""
    texts = [part.decode("utf-8", "surrogateescape") if isinstance(part, bytes) else part for part in row]
    left, key = read_count(row[3])
    ready, retry, line, other = (None if text == "" else int(text) for text in texts[8:12])
    return IdState(
        id=id,
        pending=_score(texts[0]),
        unack=_score(texts[1]),
        garbage=bool(texts[2]),
        left=texts[3] or None,
        key="" if left is None else key,
        at=at,
        word=StateWord.parse(texts[4]),
        error=bool(texts[5]),
        body=texts[6],
        due_ms=envelope_due(row[7]),
        ready=ready,
        retry=retry,
        line=line,
        other=other,
        digest=texts[12],
    )


def faults_of(state: IdState, now_ms: int, *, bare: bool) -> list[FaultName]:
    """
    Return what is wrong with an id.

    Where the lists were not looked through, an id that is nowhere else is taken to be in one of them.
    """
    places = len(state.scored) + state.listed
    if places > 1:
        return ["twice"]
    if places == 0 and state.is_exact:
        return _stray(state)
    if state.garbage:
        return _of_an_ended(state)
    return _is_of_a_living(state, now_ms, bare=bare)


def is_time(ms: float, now_ms: int, *, ahead_ms: int = LONGEST_AHEAD_MS) -> bool:
    """Say whether a score, in ms, can be a time of this queue: after 2001, and not further ahead than it may be."""
    return math.isfinite(ms) and FIRST_MS <= ms <= now_ms + ahead_ms


def fits(word: StateWord, place: str) -> bool:
    """Say whether a state word may stand beside an id in `place`."""
    if word == Unset():
        return True
    if word.cancelled:
        return place in ("unack", "list")
    if place == "unack":
        return word.waits or isinstance(word, Held)
    if place == "list":
        return isinstance(word, Suspect | Delayed)
    return place == "pending" and isinstance(word, Suspect)


def is_count(left: str | None) -> bool:
    """Say whether a retry count is one: a number, and the message's key where it has one."""
    return left is not None and _COUNT.fullmatch(left) is not None


def place_of(state: IdState) -> str:
    """Return the one place of an id that is not in two: of ready and retry, `list`."""
    return state.scored[0] if state.scored else "list"


def _stray(state: IdState) -> list[FaultName]:
    """Return the fault of an id in no place, named by the most that is left of it."""
    if state.left is not None:
        return ["stray-count" if state.body == "none" else "lost"]
    if state.body != "none":
        return ["stray-body"]
    return ["stray-word"] if state.has_word else ["stray-error"] if state.error else []


def _of_an_ended(state: IdState) -> list[FaultName]:
    found: list[FaultName] = []
    if state.left is not None:
        found.append("ended-count")
    if state.has_word:
        found.append("wrong-word")
    if state.body not in ("string", "none"):
        found.append("strange-body")
    return found


def _is_of_a_living(state: IdState, now_ms: int, *, bare: bool) -> list[FaultName]:
    found: list[FaultName] = []
    if not is_count(state.left):
        found.append("no-count" if state.left is None else "bad-count")
    if not fits(state.word, place_of(state)):
        found.append("wrong-word")
    if not _is_in_time(state, now_ms):
        found.append("wrong-time")
    if state.body not in ("string", "none"):
        found.append("strange-body")
    if state.body == "none" and not state.is_cancelled and state.lease_ms is None:
        found.append("no-body")
    if state.unack is not None and not state.has_word and not bare:
        found.append("no-word")
    if is_count(state.left) and (state.other or (state.key and (state.ready or state.retry))):
        found.append("misplaced")
    return found


def _is_in_time(state: IdState, now_ms: int) -> bool:
    """Say whether the score of an id can be a time; of one that is held, one within its lease."""
    score = state.pending if state.pending is not None else state.unack
    if score is None:
        return True
    held = state.unack is not None and state.lease_ms is not None
    return is_time(score * 1000, now_ms, ahead_ms=(state.lease_ms or 0) + CLOCK_SLACK_MS if held else LONGEST_AHEAD_MS)


def _score(text: str) -> float | None:
    return None if text == "" else float(text)


#: A report has at most this many examples of a fault.
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class FaultKind:
    """
    One way in which a queue can be wrong.

    Attributes:
        means: its meaning, in one sentence.
        repair: what `--repair` does about it.
        passes: whether it goes by itself, and a sound queue may have it.
    """

    means: str
    repair: str
    passes: bool = False


FAULT_KINDS: dict[FaultName, FaultKind] = {
    "wrong-type": FaultKind(
        "a key of the queue holds another type, so that scripts refuse to run", "renames the key, and keeps it"
    ),
    "lost-map": FaultKind(
        "the map of the shards is lost, corrupt or earlier than that of the shards: processes that start may serve too few",
        "writes the latest map that a shard has",
    ),
    "bad-fence": FaultKind(
        "a fence of a shard is no map that reliq writes, so that it stops no publisher with an old map",
        "renames the key, and writes the fence of the map",
    ),
    "twice": FaultKind("an id is in two places, and may be delivered from each", "keeps the one that is further on"),
    "lost": FaultKind(
        "a message is in no place, so that nobody will ever claim it",
        "puts it back where its envelope says; a body without one becomes a dead letter",
    ),
    "stray-body": FaultKind("a body has no message", "makes it a dead letter"),
    "stray-count": FaultKind("a retry count has neither place nor body", "ends the message as expired or cancelled"),
    "stray-word": FaultKind("a state word has no message", "removes it"),
    "stray-error": FaultKind("a last error has no message", "removes it"),
    "no-count": FaultKind(
        "a message has no retry count, and is taken to have none left", "writes 0: one more delivery"
    ),
    "bad-count": FaultKind("a retry count is no number", "writes 0: one more delivery"),
    "ended-count": FaultKind("a message at its end still has a retry count", "removes the count"),
    "wrong-word": FaultKind("a state word does not fit the place of its message", "removes the word"),
    "wrong-time": FaultKind(
        "a score is no time of this queue", "takes the time of the envelope, or of the lease; else a dead letter"
    ),
    "strange-body": FaultKind("the key of a body holds another type", "ends a waiting message; else its claim will"),
    "no-body": FaultKind(
        "a body is gone: the message's time is over, or somebody deleted it", "ends a waiting message", passes=True
    ),
    "no-word": FaultKind(
        "an id is leased, and nobody of reliq's has the lease", "nothing: it is reclaimed", passes=True
    ),
    "no-place": FaultKind(
        "a message is leased and holds no place of its key, so that more of them may run than the limit says",
        "gives it a place",
    ),
    "misplaced": FaultKind(
        "a message is not in the line of its key, but in another list",
        "moves it there, as the claim does that meets it",
        passes=True,
    ),
    "stray-place": FaultKind(
        "a place of a key is held for a message that has none, so that the key may stand still", "frees the place"
    ),
    "stuck-key": FaultKind("messages of a key wait, and nobody will ever serve it", "puts the key into the ring"),
    "stray-turn": FaultKind("a key has a turn in the ring, and no message waits", "takes it out of the ring"),
    "long-sleep": FaultKind("a key sleeps until a time that is none", "wakes it"),
    "asleep": FaultKind(
        "the whole queue sleeps: a handler raised RateLimited for a message without a key",
        "nothing: `reliq resume QUEUE` wakes it",
        passes=True,
    ),
    "bad-total": FaultKind(
        "a total is spoilt: no number, or below zero, so that the account cannot be kept",
        "nothing: what it was is unknown",
    ),
    "account": FaultKind(
        "published + redriven is not every end + alive: somebody else changed the queue", "nothing: mend the rest first"
    ),
}


#: A consumer in Go leaves these behind at an ack, for it knows of neither; they harm nobody.
LEFTOVERS: frozenset[FaultName] = frozenset({"stray-word", "stray-error"})


@dataclass(frozen=True, slots=True)
class Fault:
    """
    One way in which a queue is wrong, and how often.

    Attributes:
        name: of the fault, a key of `FAULT_KINDS`.
        count: how many ids or keys have it; for the account, how many messages it is off by.
        mended: how many of them were set right.
        examples: the first few.
        means, repair, passes: see `FaultKind`.
    """

    name: str
    count: int
    mended: int
    examples: tuple[str, ...]
    means: str
    repair: str
    passes: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """
    The findings of one check.

    Attributes:
        looked_at: how many ids were looked at.
        unproved: ids that may be wrong, in lists that are too long to be read at one moment.
        away: the shards that were not checked, or not to the end, because their Redis is away.
    """

    queue: str
    looked_at: int
    faults: tuple[Fault, ...]
    unproved: int = 0
    away: tuple[int, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, or nothing any more, in any shard: what passes by itself does not count."""
        return not (self.unproved or self.away) and all(
            fault.passes or fault.mended == fault.count for fault in self.faults
        )


@dataclass(slots=True)
class FaultCount:
    """Counts faults as they are found."""

    counts: dict[FaultName, int] = field(default_factory=dict)
    mended: dict[FaultName, int] = field(default_factory=dict)
    examples: dict[FaultName, list[str]] = field(default_factory=dict)

    def found(self, name: FaultName, example: str, count: int = 1) -> None:
        """Note that something has the fault `name`."""
        self.counts[name] = self.counts.get(name, 0) + count
        shown = self.examples.setdefault(name, [])
        if len(shown) < EXAMPLES:
            shown.append(example)

    def was_mended(self, name: FaultName) -> None:
        """Note that an id with this fault was repaired."""
        self.mended[name] = self.mended.get(name, 0) + 1

    def faults(self, *, bare: bool = False) -> tuple[Fault, ...]:
        """Return the faults, in the order of `FAULT_KINDS`; `bare` stands for a layout of the Go original."""
        return tuple(
            Fault(
                name,
                self.counts[name],
                self.mended.get(name, 0),
                tuple(self.examples[name]),
                kind.means,
                kind.repair,
                kind.passes or (bare and name in LEFTOVERS),
            )
            for name, kind in FAULT_KINDS.items()
            if name in self.counts
        )


def sum_of(reports: Sequence[CheckReport]) -> CheckReport:
    """Return the report on a queue from those on its shards."""
    if len(reports) == 1:
        return reports[0]
    by_name: dict[str, list[Fault]] = {}
    for fault in (fault for report in reports for fault in report.faults):
        by_name.setdefault(fault.name, []).append(fault)
    faults = [
        replace(
            some[0],
            count=sum(one.count for one in some),
            mended=sum(one.mended for one in some),
            examples=tuple(example for one in some for example in one.examples)[:EXAMPLES],
        )
        for some in by_name.values()
    ]
    looked_at, unproved = (
        sum(numbers) for numbers in zip(*((one.looked_at, one.unproved) for one in reports), strict=True)
    )
    return CheckReport(reports[0].queue, looked_at, tuple(faults), unproved)


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
    reports = list[CheckReport]()
    away = dict[int, RedisUnavailableError]()
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
        self._queue = queue
        self._keys = queue.keys
        self._repair = repair
        self._wait = wait
        self._fault_count = FaultCount()
        self._reading = Reading(queue, progress)
        self._known = self._reading.known
        self._suspects: set[str] = set()
        self._passing: dict[str, IdState] = {}
        self._unproved = 0

    def run(self) -> CheckReport:
        """Look at everything; return what was found."""
        if self._check_types():
            self._check_fence()
            self._read_lists()
            self._read_key_queues()
            self._read_scored()
            self._read_strays()
            self._settle_suspicions()
            self._tell_what_stays()
            self._check_keys()
            self._check_account()
        return CheckReport(
            self._keys.name, len(self._known), self._fault_count.faults(bare=self._keys.bare), self._unproved
        )

    def _check_types(self) -> bool:
        """Look at the types of the queue's keys; return whether scripts can run."""
        all_right = True
        for name, wanted in TYPES.items():
            found = self._queue.run(calls.type_of(self._keys, name))
            if found in (wanted, "none"):
                continue
            self._fault_count.found("wrong-type", f"{getattr(self._keys, name)} is a {found}, not a {wanted}")
            # Scripts refuse to touch a key of the wrong type: it is the same key still.
            if self._repair and self._queue.run(calls.put_aside(self._keys, name, time.time_ns() // 1_000_000)):
                self._fault_count.was_mended("wrong-type")
            else:
                all_right = False
        return all_right

    def _check_fence(self) -> None:
        """Compare the fence of the shard with the map."""
        if self._keys.bare:
            return
        known = self._queue.map
        fenced = self._queue.run(fence(self._keys))
        if fenced is None:
            self._fault_count.found("bad-fence", self._keys.epoch)
            if self._repair and self._queue.run(calls.put_aside(self._keys, "epoch", time.time_ns() // 1_000_000)):
                ShardChange(self._queue, self._keys).restore()
                self._fault_count.was_mended("bad-fence")
        elif fenced.epoch > known.epoch or (known.is_lost and self._keys.shard == 0):
            change = ShardChange(self._queue, self._keys)
            if change.map.is_lost:  # else somebody has changed it since the check began
                self._fault_count.found(
                    "lost-map", f"{self._keys.of_shard(0).map}: {change.map.n} shards, epoch {change.map.epoch}"
                )
                if self._repair:
                    change.restore()
                    self._fault_count.was_mended("lost-map")

    def _read_lists(self) -> None:
        """Read ready and retry, from the end where ids come in: what comes in meanwhile hides nothing."""
        for part in LISTS:
            for start, ids in self._reading.pieces(part):
                again = {id for id in ids if id in self._known} | {id for id, n in Counter(ids).items() if n > 1}
                self._suspects |= again
                fresh = [id for id in dict.fromkeys(ids) if id not in again]
                self._look(fresh, part, (max(0, start - MARGIN), start + BATCH + MARGIN))

    def _read_key_queues(self) -> None:
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
        length = self._reading.length_of_lists()
        before = self._passing
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
                    self._fault_count.found(fault, id or key)
                if fault and self._repair:
                    self._fault_count.was_mended(fault)

    def _check_account(self) -> None:
        """Compare what was published with what has ended and what lives, at one moment."""
        totals = self._queue.run(calls.raw_totals(self._keys))
        numbers = {totals[at]: whole_number(totals[at + 1]) for at in range(0, len(totals), 2)}
        bad = [name for name, number in numbers.items() if number is None or number < 0]
        for name in bad:
            self._fault_count.found("bad-total", id_text(name))
        if bad or self._keys.bare:  # the Go original keeps no account
            return
        counts = self._queue.run(transitions.counts(self._keys))
        until = counts.keyed and self._queue.run(transitions.key_queues(self._keys)).asleep_until
        if until:
            self._fault_count.found("asleep", f"until unix time {until:.0f}")
        if missing := counts.missing:
            self._fault_count.found("account", f"{abs(missing)} too {'few' if missing > 0 else 'many'}", abs(missing))

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
                self._fault_count.found(name, state.id)
                if state.id in mended:
                    self._fault_count.was_mended(name)

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


#: Further on comes first: a copy that waits behind one that is held would only be delivered once more.
FURTHER_ON = ("unack", "retry", "ready", "line", "pending", "garbage")

RepairKind = Literal["", "stray", "expired", "cancelled", "dead"]


@dataclass(frozen=True, slots=True)
class Repair:
    """
    How a repair leaves an id.

    Attributes:
        place: where it belongs, `=` where it is, empty for nowhere; `line` is that of its key.
        due_ms: its score there.
        left: its retry count, `=` as it is, empty for none.
        word: `=` for the state word as it is, empty for none.
        kind: how it ends, `stray` when no message ends with it, empty when it lives on.
        note: of its dead letter: reason, attempt and error.
    """

    place: str = "="
    due_ms: int = 0
    left: str = "="
    word: str = "="
    kind: RepairKind = ""
    note: str = ""

    def args(self, digest: str) -> tuple[Arg, ...]:
        """Return it as the script `check` takes it, for the state of a digest."""
        return (digest, self.place, self.due_ms, self.left, self.word, self.kind, self.note)


def repair_of(state: IdState, now_ms: int, *, bare: bool) -> Repair | None:
    """
    Return where an id that has a fault belongs; None when it is better left to the next claim or reclaim.

    An id in two places or in none must have been looked for in both lists.
    """
    places = len(state.scored) + state.listed
    if places == 0:
        return _of_a_stray(state, now_ms, bare=bare)
    place = _place_kept(state) if places > 1 else place_of(state)
    if place == "garbage":
        right = places == 1 and state.left is None and not state.has_word
        return None if right else Repair(place="garbage", left="", word="")
    return _of_a_living(state, place, now_ms, moves=places > 1)


def _place_kept(state: IdState) -> str:
    """Return which of its places an id keeps: garbage only when it has no retry count, so that it had ended."""
    if state.garbage and state.left is None:
        return "garbage"
    there = {*state.scored, *({_list_of(state)} if state.listed else ())}
    return next(place for place in FURTHER_ON if place in there)


def _list_of(state: IdState) -> str:
    """Return the list in which an id belongs that waits in any."""
    return "line" if state.key else "retry" if state.retry else "ready"


def _of_a_stray(state: IdState, now_ms: int, *, bare: bool) -> Repair | None:
    if state.left is None and state.body != "string":
        return _gone("stray") if state.body == "none" else None  # what lies there is nobody's, least of all ours
    if state.is_cancelled:
        return _gone("cancelled")
    if state.body != "string":
        return _gone("expired")
    due = state.due_ms
    if bare or state.left is None or due is None or not is_time(due, now_ms):
        return _gone("dead", "it was in no place of its queue, and nothing says where it belongs")
    left = _left(state)
    word = "=" if fits(state.word, "pending") else ""
    if due > now_ms:
        return Repair("pending", due, left, word)
    return Repair(_list_of(state), 0, left, word)


def _of_a_living(state: IdState, place: str, now_ms: int, *, moves: bool) -> Repair | None:
    """Return the repair of an id that goes on living in `place`, or ends because its body or due time is missing."""
    kind_of_place = "list" if place in ("ready", "retry", "line", "list") else place
    waits = place == "pending" or (place == "unack" and state.word.waits)
    if waits and state.body != "string":
        return _gone("expired")
    left = _left(state)
    word = "=" if fits(state.word, kind_of_place) else ""
    if kind_of_place == "list":
        belongs = moves or (is_count(state.left) and (state.other or (state.key and not state.line)))
        repair = Repair(_list_of(state) if belongs else "=", 0, left, word)
        return repair if repair != Repair() else None
    score_ms = ((state.pending if place == "pending" else state.unack) or 0.0) * 1000
    due = _due(state, place, score_ms, now_ms)
    if due is None:
        return _gone("dead", "its due time was no time, and nothing says when it is due")
    if moves or not math.isfinite(score_ms) or due != round(score_ms):
        return Repair(place, due, left, word)
    repair = Repair(left=left, word=word)
    return repair if repair != Repair() else None


def _due(state: IdState, place: str, score_ms: float, now_ms: int) -> int | None:
    """Return the score, in ms, that an id should have; None when nothing says."""
    if place == "unack" and state.lease_ms is not None:
        latest = now_ms + state.lease_ms
        return round(score_ms) if is_time(score_ms, latest + CLOCK_SLACK_MS, ahead_ms=0) else latest
    if is_time(score_ms, now_ms):
        return round(score_ms)
    if state.due_ms is not None and is_time(state.due_ms, now_ms):
        return state.due_ms
    return now_ms if place == "unack" else None


def _left(state: IdState) -> str:
    """Return the count that an id should have: 0, one more delivery, when its own is none."""
    return "=" if is_count(state.left) else count_text(0, state.key or state.at)


def _gone(kind: RepairKind, why: str = "") -> Repair:
    note = str(FailureNote("lost", None, why)) if why else ""
    return Repair(place="", left="", word="", kind=kind, note=note)
