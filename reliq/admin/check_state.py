"""The script `check`: it reads the state of ids at one moment, and repairs those that are still as they were seen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from reliq.admin import calls
from reliq.admin.calls import MOVING_MS, KeyQueueState
from reliq.lua import script
from reliq.lua.transitions import bounded, clock_arg
from reliq.redis.commands import LISTS, Arg, Call
from reliq.text import chunked
from reliq.wire_format import Delayed, Held, StateWord, Suspect, Unset, envelope_due, read_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliq.admin.calls import Index
    from reliq.admin.session import QueueSession
    from reliq.keys import Keys
    from reliq.redis.commands import Command, List


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

        def told(at: int) -> Command[tuple[int, list[T]]]:
            self.tell(what)
            return step(self.queue.keys, *of, at, count)

        return self.queue.scan(told)

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
    return _of_a_living(state, now_ms, bare=bare)


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


def _of_a_living(state: IdState, now_ms: int, *, bare: bool) -> list[FaultName]:
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
    if not held and score * 1000 >= MOVING_MS:  # put off by a move that is not finished
        return is_time(score * 1000 - MOVING_MS, now_ms)
    return is_time(score * 1000, now_ms, ahead_ms=(state.lease_ms or 0) + CLOCK_SLACK_MS if held else LONGEST_AHEAD_MS)


def _score(text: str) -> float | None:
    return None if text == "" else float(text)
