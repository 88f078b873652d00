"""`reliq check`: find, report and repair faults in the stored states of message ids."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from reliq.admin import calls
from reliq.admin.calls import TYPES, Index, KeyQueueState
from reliq.admin.filters import ignore
from reliq.admin.session import AdminBase, QueueSession
from reliq.errors import RedisUnavailableError
from reliq.lua import script, transitions
from reliq.lua.transitions import bounded, clock_arg
from reliq.redis import commands
from reliq.redis.commands import LISTS, Arg, Call, Command, List, id_text
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
    from reliq.keys import Keys
    from reliq.message import Duration

T = TypeVar("T")
Part = Literal["", "ready", "retry", "line", "both"]
#: A callback with the name of the part of the queue that is being read, and the number of ids checked so far.
OnProgress = Callable[[str, int], None]

CHECK = script("check", __package__)
CHECK_KEYS = script("check_keys", __package__)
_NO_WISH = ("",) * 7
NOWHERE: Mapping[str, str] = {}

#: One script call reads and checks this many ids, which takes about 2 ms.
BATCH = 250
#: One SCAN command scans this many Redis keys, which takes about 0.3 ms.
SCANNED_KEYS = 1000
#: An id may have moved in its list since it was read. So the script searches this many more entries before and after
#: the index where the id was read.
MARGIN = 500
#: One script call compares about this many list entries, which takes about 10 ms.
COMPARISONS = 500_000
#: If all lists together have more entries than this, the check does not search them, because a search for a single id
#: would block Redis for too long.
LONGEST_LISTS = 2_500_000
#: If all lists together have at most this many entries, the check searches them for every suspected id immediately.
SHORT_LISTS = 10_000
#: If the lists have more than SHORT_LISTS entries, the check first reads them again this many times. So it can drop
#: suspected ids that have only moved.
ROUNDS = 3

#: September 2001 in unix ms; a lower number is not a valid time.
FIRST_MS = 10**12
#: A due time or end of a lease is invalid if it is more than this many ms in the future.
LONGEST_AHEAD_MS = 3660 * 86_400_000
#: A lease may end this many ms later than its length allows, because the clocks of servers differ.
CLOCK_SLACK_MS = 1000
#: A report has at most this many examples of a fault.
EXAMPLES = 5

_COUNT = re.compile(r"\d{1,6}( .+)?", re.DOTALL)

#: For the name of each fault its meaning, and how `--repair` repairs it. A report lists the faults in this order.
FAULTS = {
    "wrong-type": ("a key of the queue has another type: scripts refuse to run", "renames the key, and keeps it"),
    "lost-map": (
        "the map of the shards is lost, corrupt or out of date: processes that start may serve too few shards",
        "writes the latest map that a shard has",
    ),
    "bad-fence": (
        "the fence of a shard (its copy of the shard map) is invalid: publishers with an old map are not refused",
        "renames the key, and writes the fence again from the map",
    ),
    "twice": ("an id is in two states or twice in a list: it may run twice", "keeps the most advanced state"),
    "lost": (
        "a message is in no state: no worker will ever claim it",
        "restores it from its envelope; a body without an envelope becomes a dead letter",
    ),
    "stray-body": ("a body exists without a message", "makes it a dead letter"),
    "stray-count": ("a retry count exists without a state or body", "ends the message as expired or cancelled"),
    "stray-word": ("a state word exists without a message", "removes the word"),
    "stray-error": ("a last error exists without a message", "removes the error"),
    "no-count": ("a message has no retry count, which means no retries", "writes 0: one more delivery"),
    "bad-count": ("a retry count is not a number", "writes 0: one more delivery"),
    "ended-count": ("a message that ended still has a retry count", "removes the count"),
    "wrong-word": ("a state word contradicts the state of its message", "removes the word"),
    "wrong-time": (
        "a due time, or the end of a lease, is not a valid time",
        "writes the time from the envelope or the lease; if both lack it, makes a dead letter",
    ),
    "strange-body": ("the key of a body has another type", "ends the message, now or at its next claim"),
    "no-body": (
        "a body is missing: the message expired, or another program deleted it",
        "ends the message, now or at its next claim",
    ),
    "no-word": ("an id is leased, but not by a reliq worker", "nothing: it is reclaimed"),
    "no-place": ("a leased message is not counted for its key: too many of the key may run", "counts it"),
    "misplaced": ("a message is in the wrong list for its message key", "moves it there, as its claim would"),
    "stray-place": (
        "a message counts as running for its key without a lease: the key may be blocked",
        "stops counting it",
    ),
    "stuck-key": ("messages of a key wait, but no worker will claim them", "lets the key take turns again"),
    "stray-turn": ("a key takes turns, but no message of it waits", "removes its turn"),
    "long-sleep": ("a key is throttled until an invalid time", "ends the throttling"),
    "asleep": (
        "the whole queue is throttled: a handler raised RateLimited for a message without a key",
        "nothing: run `reliq resume QUEUE`",
    ),
    "bad-total": ("a total is not a number, or below zero", "nothing: the true total is unknown"),
    "account": (
        "published + redriven messages are not ended + living messages: another program changed the queue",
        "nothing: repair the other faults first",
    ),
}
#: Faults that a healthy queue may have for a while; they disappear without a repair.
PASSING = {"no-body", "no-word", "misplaced", "asleep"}
#: Harmless faults: fields that a consumer in Go does not remove when it acks a message.
LEFTOVERS = {"stray-word", "stray-error"}


@dataclass(frozen=True, slots=True)
class Fault:
    """
    A kind of fault in a queue, and how often it occurs.

    Attributes:
        name: a short name, such as `lost`.
        count: number of ids or keys with this fault; for `account`, the number of missing or extra messages.
        mended: number of repaired ids or keys.
        examples: the first ids or keys with this fault.
        means: the meaning of the fault, in one sentence.
        repair: how `--repair` repairs the fault.
        passes: whether a healthy queue may have the fault for a while; it then disappears without a repair.
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
    The result of a check.

    Attributes:
        queue: name of the queue.
        looked_at: number of ids that were checked.
        faults: the kinds of faults that were found.
        unproved: number of suspected ids that could not be checked, because the lists are too long to be searched.
        away: numbers of the shards that were not checked completely, because their Redis did not answer.
    """

    queue: str
    looked_at: int
    faults: tuple[Fault, ...]
    unproved: int = 0
    away: tuple[int, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether the check was complete, and every fault was repaired or disappears without a repair."""
        return not (self.unproved or self.away) and all(
            fault.passes or fault.mended == fault.count for fault in self.faults
        )


class CheckActions(AdminBase):
    """The method that checks a queue."""

    def check(
        self, queue: str, *, repair: bool = False, patience: Duration = 5.0, progress: OnProgress = ignore
    ) -> CheckReport:
        """
        Check a queue for faults, such as lost messages; with `repair`, repair them.

        Args:
            queue: name of the queue.
            repair: correct the state of each faulty message. If its correct state is unknown, it becomes a dead letter
                with a reason.
            patience: in a layout of the Go library, report only faults that last for this many seconds. A Go program
                moves a message with several commands, so a fault may be temporary.
            progress: called with the part of the queue that is being read, and the number of ids checked so far.
        """
        wait = partial(time.sleep, seconds("patience", patience, most=3600))
        session = self._queue(queue, mends=True)
        found = Findings()
        away: dict[int, RedisUnavailableError] = {}
        for part in session.parts:
            try:
                Checker(part, found, repair=repair, progress=progress, wait=wait).run()
            except RedisUnavailableError as error:
                away[part.keys.shard] = error
        if len(away) == len(session.parts):
            raise away[min(away)]
        return found.report(session.keys, tuple(away))


@dataclass(slots=True)
class Findings:
    """The faults found so far, in all shards."""

    looked_at: int = 0
    unproved: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    examples: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, example: str, count: int = 1, *, mended: bool = False) -> None:
        """Count a fault `name`, and keep the id or key `example` if the report has room for it."""
        self.counts[name] += count
        self.mended[name] += mended
        if len(self.examples[name]) < EXAMPLES:
            self.examples[name].append(example)

    def report(self, keys: Keys, away: tuple[int, ...] = ()) -> CheckReport:
        """Return the report on a queue; `away` contains the numbers of the shards whose Redis did not answer."""
        passing = PASSING | LEFTOVERS if keys.bare else PASSING
        faults = [
            Fault(
                name, self.counts[name], self.mended[name], tuple(self.examples[name]), *FAULTS[name], name in passing
            )
            for name in sorted(self.counts, key=[*FAULTS].index)
        ]
        return CheckReport(keys.name, self.looked_at, tuple(faults), self.unproved, away)


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
    Return the script call that reads the states of ids at one moment or, with `wishes`, repairs the ids.

    Args:
        part: the list to search: `ready`, `retry`, or `line` for the key queues in `lines`. With `both`, the script
            searches all these lists completely; with an empty text, it searches no list.
        piece: the first and last index to search in the list; ignored for `both`.
        lines: for each id that was found in a key queue, the message key of that queue.
        wishes: the repair of each id: values for the arguments `seen` to `note` of the script `check`.

    Returns:
        A script call. Its result is the server's time in ms, and a row for each id. Without `wishes`, the row is the
        id's state. With `wishes`, the row is `mended`; or it is `changed`, if the id's state is no longer `seen`.
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
) -> Call[list[str]]:
    """
    Return the script call that checks message keys, and the entries of leased messages in the Redis key `held`.

    With its entry in `held`, a leased message counts against the concurrency limit of its message key.

    Args:
        items: pairs of a message key and a message id, to check the entry of the message in `held`; or pairs of a
            message key and an empty text, to check the message key.
        repair: whether to repair the faults.

    Returns:
        A script call. Its result is the name of each item's fault, or an empty text for an item without a fault.
    """
    bounded("items", items)
    args: list[Arg] = [clock_arg(clock), "1" if repair else "", *(part for item in items for part in item)]
    return Call(CHECK_KEYS, CHECK_KEYS.lead(keys), args, _read_faults)


def _read_faults(reply: Sequence[bytes]) -> list[str]:
    names = [word.decode() for word in reply]
    if not {*names} <= {"", *FAULTS}:
        raise ValueError
    return names


@dataclass(frozen=True, slots=True)
class IdState:
    """
    Everything that Redis stores about an id, at one moment.

    Attributes:
        at: the message key of the key queue in which the id was found; empty if it was found elsewhere.
        key: the message key that Redis stores with its retry count; empty without a key.
        pending, unack: the scores of the id in these sorted sets, in unix seconds; None if the set does not contain it.
        garbage: whether the id is in the set `garbage`.
        left: the retry count as stored in Redis; None if there is none.
        word: the state word, that is, the value of the id in the Redis key `lease`.
        error: whether Redis stores a last error of the message.
        body: the type of the Redis key of the body; `none` without a body.
        due_ms: the due time in the envelope of the body, in unix ms; None if there is none.
        ready, retry: how often the id is in these lists; None for a list that was not searched.
        line, other: how often the id is in the key queue of `key`, and in the key queue of `at`.
        digest: digest of all these values. Redis refuses a repair if the digest has changed.
    """

    id: str
    at: str
    key: str
    pending: float | None
    unack: float | None
    garbage: bool
    left: str | None
    word: StateWord
    error: bool
    body: str
    due_ms: int | None
    ready: int | None
    retry: int | None
    line: int | None
    other: int | None
    digest: str

    @property
    def scored(self) -> list[str]:
        """The states that contain this id, out of pending, unack and garbage."""
        held = {"pending": self.pending is not None, "unack": self.unack is not None, "garbage": self.garbage}
        return [place for place, is_there in held.items() if is_there]

    @property
    def listed(self) -> int:
        """How often the id is in the lists that were searched."""
        return sum(filter(None, (self.ready, self.retry, self.line, self.other)))

    @property
    def places(self) -> int:
        """How often the id is in pending, unack, garbage, and the lists that were searched."""
        return len(self.scored) + self.listed

    @property
    def is_empty(self) -> bool:
        """Whether Redis stores nothing about the id outside of lists."""
        return not self.scored and self.left is None and not self.has_word and not self.error and self.body == "none"

    @property
    def has_word(self) -> bool:
        """Whether the Redis key `lease` has a value for this id: a lease's token, or a word such as `suspect`."""
        return self.word != Unset()

    @property
    def lease_ms(self) -> int | None:
        """The length of the current lease in ms; None if the message is not leased."""
        return self.word.lease_ms if isinstance(self.word, Held) else None

    def is_as(self, other: IdState) -> bool:
        """Return whether the state equals the state `other`, except for the numbers of list entries."""
        unlooked = {"ready": None, "retry": None, "line": None, "other": None, "digest": ""}
        return replace(self, **unlooked) == replace(other, **unlooked)  # type: ignore[arg-type]


def read_state(id: str, row: Sequence[Any], at: str = "") -> IdState:
    """
    Return the state of an id from a row of the script `check`.

    Args:
        id: the id.
        row: the values that the script returned for this id.
        at: the message key of the key queue in which the id was found.
    """
    texts = [part.decode("utf-8", "surrogateescape") if isinstance(part, bytes) else part for part in row]
    left, key = read_count(row[3])
    scores = [None if text == "" else float(text) for text in texts[:2]]
    times = [None if text == "" else int(text) for text in texts[8:12]]
    return IdState(
        id=id,
        at=at,
        key="" if left is None else key,
        pending=scores[0],
        unack=scores[1],
        garbage=bool(texts[2]),
        left=texts[3] or None,
        word=StateWord.parse(texts[4]),
        error=bool(texts[5]),
        body=texts[6],
        due_ms=envelope_due(row[7]),
        ready=times[0],
        retry=times[1],
        line=times[2],
        other=times[3],
        digest=texts[12],
    )


def faults_of(state: IdState, now_ms: int, *, bare: bool) -> list[str]:
    """
    Return the names of the faults of an id.

    If the lists were not searched, assume that an id outside of pending, unack and garbage is in a list.
    """
    if state.places > 1:
        return ["twice"]
    is_strange = state.body not in ("string", "none")
    if state.places == 0 and state.ready is not None and state.retry is not None:
        remains = {  # the fault is the first name whose condition is true
            "stray-count": state.left is not None and state.body == "none",
            "lost": state.left is not None,
            "stray-body": state.body != "none",
            "stray-word": state.has_word,
            "stray-error": state.error,
        }
        return [name for name, is_there in remains.items() if is_there][:1]
    if state.garbage:
        found = {"ended-count": state.left is not None, "wrong-word": state.has_word, "strange-body": is_strange}
    else:
        score = state.unack if state.pending is None else state.pending
        is_held = state.unack is not None and state.lease_ms is not None
        ahead_ms = (state.lease_ms or 0) + CLOCK_SLACK_MS if is_held else LONGEST_AHEAD_MS
        is_elsewhere = state.other or (state.key and (state.ready or state.retry))
        found = {
            "no-count": state.left is None,
            "bad-count": state.left is not None and not is_count(state.left),
            "wrong-word": not fits(state.word, place_of(state)),
            "wrong-time": score is not None and not is_time(score * 1000, now_ms, ahead_ms=ahead_ms),
            "strange-body": is_strange,
            "no-body": state.body == "none" and not state.word.cancelled and state.lease_ms is None,
            "no-word": state.unack is not None and not state.has_word and not bare,
            "misplaced": is_count(state.left) and bool(is_elsewhere),
        }
    return [name for name, is_there in found.items() if is_there]


def is_time(ms: float, now_ms: int, *, ahead_ms: int = LONGEST_AHEAD_MS) -> bool:
    """Return whether a score in ms can be a valid time: after 2001, and not too far ahead."""
    return math.isfinite(ms) and FIRST_MS <= ms <= now_ms + ahead_ms


def fits(word: StateWord, place: str) -> bool:
    """Return whether an id in the state `place` may have the value `word` in the Redis key `lease`."""
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
    """Return whether a stored retry count is valid: a number, which a space and a message key may follow."""
    return left is not None and _COUNT.fullmatch(left) is not None


def place_of(state: IdState) -> str:
    """Return the state of an id that is in a single state; `list` stands for ready, retry and key queues."""
    return state.scored[0] if state.scored else "list"


#: States, the most advanced first. If an id is in several states, a repair keeps the most advanced state, so that the
#: message does not run again.
FURTHER_ON = ("unack", "retry", "ready", "line", "pending", "garbage")


class Repair(NamedTuple):
    """
    The state that a repair gives an id, as arguments of the script `check`.

    Attributes:
        place: the state to move the id to; `line` for the key queue of its message key, `=` for no move, and an empty
            text to remove the id from all states.
        due_ms: the new score of the id in pending or unack, in unix ms.
        left: the new retry count; `=` for no change, empty to delete the count.
        word: the new state word (the value in the Redis key `lease`); `=` for no change, empty to delete the word.
        kind: how the message ends; empty if it does not end, `stray` to delete the remains of an id without a message.
        note: reason, attempt and error for the dead letter of the message.
    """

    place: str = "="
    due_ms: int = 0
    left: str = "="
    word: str = "="
    kind: Literal["", "stray", "expired", "cancelled", "dead"] = ""
    note: str = ""


_STRAY = Repair(place="", left="", word="", kind="stray")
_EXPIRED = _STRAY._replace(kind="expired")


def _dead(why: str) -> Repair:
    return _STRAY._replace(kind="dead", note=str(FailureNote("lost", None, why)))


def repair_of(state: IdState, now_ms: int, *, bare: bool) -> Repair | None:
    """
    Return the repair of a faulty id; None to change nothing, for example because the next claim repairs the id.

    If the id is in several states or in no state, `state` must come from a search of all lists.
    """
    # A retry count of 0 allows one more delivery.
    left = "=" if is_count(state.left) else count_text(0, state.key or state.at)
    list_of = "line" if state.key else "retry" if state.retry else "ready"
    if state.places == 0:
        due = state.due_ms
        if state.left is None and state.body != "string":
            # If the Redis key of the body has another type, keep the key, because another program may use it.
            return _STRAY if state.body == "none" else None
        if state.word.cancelled:
            return _STRAY._replace(kind="cancelled")
        if state.body != "string":
            return _EXPIRED
        if bare or state.left is None or due is None or not is_time(due, now_ms):
            return _dead("it was in no state of its queue, and its correct state is unknown")
        word = "=" if fits(state.word, "pending") else ""
        return Repair("pending", due, left, word) if due > now_ms else Repair(list_of, 0, left, word)
    place = place_of(state)
    if moves := state.places > 1:
        there = {*state.scored, *([list_of] if state.listed else [])}
        has_ended = state.garbage and state.left is None
        place = "garbage" if has_ended else next(place for place in FURTHER_ON if place in there)
    if place == "garbage":
        is_right = not moves and state.left is None and not state.has_word
        return None if is_right else Repair(place="garbage", left="", word="")
    if state.body != "string" and (place == "pending" or (place == "unack" and state.word.waits)):
        return _EXPIRED
    is_listed = place not in ("pending", "unack")
    repair = Repair(left=left, word="=" if fits(state.word, "list" if is_listed else place) else "")
    if is_listed:
        if moves or (is_count(state.left) and (state.other or (state.key and not state.line))):
            repair = repair._replace(place=list_of)
    else:
        score_ms = ((state.pending if place == "pending" else state.unack) or 0.0) * 1000
        due = _due(state, place, score_ms, now_ms)
        if due is None:
            return _dead("its due time was invalid, and its envelope has none")
        if moves or not math.isfinite(score_ms) or due != round(score_ms):
            repair = repair._replace(place=place, due_ms=due)
    return repair if repair != Repair() else None


def _due(state: IdState, place: str, score_ms: float, now_ms: int) -> int | None:
    """Return the correct score of an id in pending or unack, in unix ms; None if it is unknown."""
    if place == "unack" and state.lease_ms is not None:
        latest = now_ms + state.lease_ms
        return round(score_ms) if is_time(score_ms, latest + CLOCK_SLACK_MS, ahead_ms=0) else latest
    if is_time(score_ms, now_ms):
        return round(score_ms)
    if state.due_ms is not None and is_time(state.due_ms, now_ms):
        return state.due_ms
    return now_ms if place == "unack" else None


def _places_scanned(keys: Keys, cursor: int, count: int) -> Command[tuple[int, list[tuple[str, str]]]]:
    """Scan about `count` entries of `held`; return the next cursor, and the message key and id of each entry."""

    def read(reply: Any) -> tuple[int, list[tuple[str, str]]]:
        members = [id_text(member).partition("\0") for member in reply[1][::2]]
        return int(reply[0]), [(key, id) for key, _, id in members]

    return Command(("ZSCAN", keys.held, cursor, "COUNT", count), read)


@dataclass
class Checker:
    """
    A check of one queue, or of one shard of a queue.

    Args:
        queue: the session of the queue, which must exist.
        found: collects the faults.
        repair: whether to repair faults.
        progress: called with the part of the queue that is being read, and the number of ids checked so far.
        wait: a function that waits until programs in Go have had the time to finish moving messages.
    """

    queue: QueueSession
    found: Findings
    repair: bool
    progress: OnProgress
    wait: Callable[[], None]

    def __post_init__(self) -> None:
        self._keys = self.queue.keys
        self._known: set[str] = set()
        #: For each id that was found in the key queue of another message key than its own, this other message key.
        self._lines: dict[str, str] = {}
        #: Message key and id of every leased message that has a key.
        self._leases: set[tuple[str, str]] = set()
        #: Message keys that have a key queue.
        self._key_names: set[str] = set()
        self._longest_line = 0
        self._suspects: set[str] = set()
        self._passing: dict[str, IdState] = {}

    def run(self) -> None:
        """Run all checks of this queue or shard."""
        if not self._check_types():
            return
        self._check_fence()
        for part in LISTS:
            self._check_list(part, ((start, [(id, "") for id in ids]) for start, ids in self._pieces(part)))
        self._check_list("line", self._line_pieces())
        indexes: dict[str, Index] = {"pending": "pending", "unack": "unack", "garbage": "garbage"}
        indexes |= {"retry counts": "retries_left", "state words": "lease", "errors": "errors"}
        for what, index in indexes.items():
            for found in self._scanned(what, calls.ids_scanned, index):
                for ids in chunked(found, BATCH):
                    self._look(self._unknown(ids))
        for found in self._scanned("bodies", calls.names_of, "msg", count=SCANNED_KEYS):
            for ids in chunked(self._unknown(found), BATCH):
                lefts = self.queue.run(commands.retries_left(self._keys, ids))
                self._look([id for id, left in zip(ids, lefts, strict=True) if left is None])
        self._settle_suspicions()
        self._report_what_stays()
        self._check_keys()
        self._check_account()

    def _check_types(self) -> bool:
        """Check the types of the queue's Redis keys; return whether the scripts can run."""
        can_run = True
        for name, wanted in TYPES.items():
            found = self.queue.run(Command(("TYPE", getattr(self._keys, name)), bytes.decode))
            if found not in (wanted, "none"):
                # RENAMENX is safe: scripts refuse a key of a wrong type, so none has changed the key since TYPE.
                mended = self.repair and self._put_aside(name)
                example = f"{getattr(self._keys, name)} is a {found}, not a {wanted}"
                self.found.add("wrong-type", example, mended=mended)
                can_run = can_run and mended
        return can_run

    def _put_aside(self, name: str) -> bool:
        aside = self._keys.aside(name, time.time_ns() // 1_000_000)
        return self.queue.run(Command(("RENAMENX", getattr(self._keys, name), aside), bool))

    def _check_fence(self) -> None:
        """Check the fence of the shard, which is the shard's copy of the shard map."""
        if self._keys.bare:
            return
        known = self.queue.map
        fenced = self.queue.run(fence(self._keys))
        if fenced is None:
            mended = self.repair and self._put_aside("epoch")
            if mended:
                ShardChange(self.queue, self._keys).restore()
            self.found.add("bad-fence", self._keys.epoch, mended=mended)
        elif fenced.epoch > known.epoch or (known.is_lost and self._keys.shard == 0):
            # `ShardChange` reads the shard map again. If the map is not lost now, another process has just changed it.
            change = ShardChange(self.queue, self._keys)
            if change.map.is_lost:
                example = f"{self._keys.of_shard(0).map}: {change.map.n} shards, epoch {change.map.epoch}"
                if self.repair:
                    change.restore()
                self.found.add("lost-map", example, mended=self.repair)

    def _pieces(self, spot: List | KeyQueueState, start: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Read a list in pieces, newest ids first; yield the index of each piece's first id, and the piece's ids."""
        while True:
            self._tell("lines" if isinstance(spot, KeyQueueState) else spot)
            ids = self.queue.run(calls.newest_ids(self._keys, spot, start, BATCH))
            if not ids:
                return
            yield start, ids
            start += len(ids)

    def _line_pieces(self) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """
        Read all key queues in pieces; yield the index of each piece's first id, and its ids with their message keys.

        A piece contains the newest ids of several key queues, or further ids of one long key queue.
        """
        keys = self._keys
        if not self.queue.run(Command(("EXISTS", keys.limits, keys.ring, keys.held, keys.asleep), int)):
            return  # a queue without message keys needs no SCAN for key queues
        for found in self._scanned("lines", calls.names_of, "line", count=SCANNED_KEYS):
            for names in chunked(found, BATCH):
                self._key_names.update(names)
                starts = self.queue.run_all([calls.newest_ids(keys, KeyQueueState(key), 0, BATCH) for key in names])
                queues = list(zip(names, starts, strict=True))
                for rows in chunked(((id, key) for key, ids in queues for id in ids), BATCH):
                    yield 0, rows
                for key, ids in queues:
                    self._longest_line = max(self._longest_line, len(ids))
                    if len(ids) == BATCH:
                        for start, more in self._pieces(KeyQueueState(key), BATCH):
                            self._longest_line = max(self._longest_line, start + len(more))
                            yield start, [(id, key) for id in more]

    def _check_list(self, part: Part, pieces: Iterable[tuple[int, list[tuple[str, str]]]]) -> None:
        """
        Check the ids in the pieces of a list.

        Publishes add ids before the newest id. So a check that reads the newest ids first misses no id.
        """
        for start, rows in pieces:
            times = Counter(id for id, _ in rows)
            again = {id for id in times if times[id] > 1 or id in self._known}
            self._suspects |= again
            fresh = {id: key for id, key in rows if id not in again}
            if part == "line":
                self._lines |= fresh
            self._look([*fresh], part, (max(0, start - MARGIN), start + BATCH + MARGIN))
            for id, key in rows:
                # The id was found more than once, so check it in this key queue too. If this is the correct key queue
                # of the id, `_states` deletes the id from `_lines`. Then restore the previous entry of the id.
                if key and id in again:
                    before = self._lines.get(id, "")
                    self._lines[id] = key
                    self._states([id])
                    if before:
                        self._lines.setdefault(id, before)

    def _scanned(
        self, what: str, step: Callable[..., Command[tuple[int, list[T]]]], *of: str, count: int = BATCH
    ) -> Iterator[list[T]]:
        """Run a scan; yield the result of each step, and report the progress before each step."""

        def next_step(at: int) -> Command[tuple[int, list[T]]]:
            self._tell(what)
            return step(self._keys, *of, at, count)

        return self.queue.scan(next_step)

    def _unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that were not checked before, without duplicates."""
        return [id for id in dict.fromkeys(ids) if id not in self._known]

    def _tell(self, what: str) -> None:
        self.progress(what, self.found.looked_at)

    def _look(self, ids: Sequence[str], part: Part = "", piece: tuple[int, int] = (1, 0)) -> None:
        """
        Check ids that were read from one list, set or hash, and record their faults.

        Record an id as suspected if all lists must be searched for it.
        """
        if not ids:
            return
        self._known.update(ids)
        self.found.looked_at += len(ids)
        now_ms, states = self._states(ids, part, piece)
        wrong = []
        for state in states:
            is_wrong = bool(self._faults(state, now_ms))
            # The id may also be in a list that was not searched. So search all lists for this id later.
            needs_proof = state.listed > 0 if state.scored else not part and not state.is_empty
            if needs_proof or (is_wrong and not state.places):
                self._suspects.add(state.id)
            elif is_wrong:
                wrong.append(state)
        self._note(wrong, now_ms, part, piece)

    def _settle_suspicions(self) -> None:
        """Search all lists for the suspected ids, and record the remaining faults."""
        for _ in range(ROUNDS if self._length_of_lists() > SHORT_LISTS else 0):
            self._drop_what_only_moved()
        for now_ms, states in self._searched(self._suspects):
            self._note([state for state in states if self._faults(state, now_ms)], now_ms, "both")

    def _drop_what_only_moved(self) -> None:
        """Read ready and retry again; drop the suspected ids that are now in exactly one state, or have ended."""
        if not self._suspects:
            return
        found: Counter[str] = Counter()
        for part in LISTS:
            for _, ids in self._pieces(part):
                found.update(self._suspects.intersection(ids))
        for ids in chunked(sorted(self._suspects), BATCH):
            for state in self._states(ids)[1]:
                places = len(state.scored) + found[state.id]
                if (places == 1 and state.left is not None) or (places == 0 and state.is_empty):
                    self._suspects.discard(state.id)

    def _report_what_stays(self) -> None:
        """In a Go layout, check the recorded faulty ids again; report the ids whose states have not changed."""
        if not self._passing:
            return
        self._tell("faulty ids again")
        self.wait()
        for now_ms, states in self._searched(self._passing):
            stayed = [one for one in states if one.is_as(self._passing[one.id]) and self._faults(one, now_ms)]
            self._report(stayed, now_ms, "both")

    def _length_of_lists(self) -> int:
        """Return the largest number of list entries that a search for one id in all lists compares."""
        sizes: list[int] = self.queue.run_all([calls.size(self._keys, part) for part in LISTS])
        return sum(sizes) + self._longest_line

    def _searched(self, ids: Collection[str]) -> Iterator[tuple[int, list[IdState]]]:
        """
        Search all lists for `ids`, and yield their states in batches.

        If the lists are too long, yield nothing, and count the ids as not checked.
        """
        length = self._length_of_lists()
        if length > LONGEST_LISTS:
            self.found.unproved += len(ids)
            return
        for some in chunked(sorted(ids), max(1, min(BATCH, COMPARISONS // max(1, length)))):
            self._tell("suspects")
            yield self._states(some, "both")

    def _check_keys(self) -> None:
        """Check all message keys and all entries of `held`; check that each leased message with a key has an entry."""
        in_turn = (self._scanned(name, calls.keys_among, name) for name in ("ring", "asleep"))
        found = chain([sorted(self._leases)], self._scanned("places", _places_scanned))
        names = chain([sorted(self._key_names)], *in_turn)
        places, keys = chain.from_iterable(found), chain.from_iterable(names)
        for items in chunked(chain(places, ((key, "") for key in keys)), BATCH):
            faults = self.queue.run(check_keys(self._keys, items, repair=self.repair))
            for (key, id), fault in zip(items, faults, strict=True):
                if fault:
                    self.found.add(fault, id or key, mended=self.repair)

    def _check_account(self) -> None:
        """Check that the number of published messages is the number of ended messages plus living messages."""
        totals: list[bytes] = self.queue.run(Command(("HGETALL", self._keys.totals), list))
        numbers = {name: whole_number(number) for name, number in zip(totals[::2], totals[1::2], strict=True)}
        bad = [name for name, number in numbers.items() if number is None or number < 0]
        for name in bad:
            self.found.add("bad-total", id_text(name))
        if bad or self._keys.bare:  # the Go library does not count messages
            return
        counts = self.queue.run(transitions.counts(self._keys))
        until = counts.keyed and self.queue.run(transitions.key_queues(self._keys)).asleep_until
        if until:
            self.found.add("asleep", f"until unix time {until:.0f}")
        if missing := counts.missing:
            self.found.add("account", f"{abs(missing)} too {'few' if missing > 0 else 'many'}", abs(missing))

    def _note(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int] = (1, 0)) -> None:
        """
        Report faulty ids; in a Go layout, record the ids instead, and check them again later.

        A Go program moves a message with several commands, so a fault may be temporary.
        """
        if self._keys.bare:
            self._passing |= {state.id: state for state in states}
        else:
            self._report(states, now_ms, part, piece)

    def _report(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int] = (1, 0)) -> None:
        """Report faulty ids; with `repair`, first repair the ids whose state has not changed."""
        mended = set()
        repairs = {one.id: (one, repair_of(one, now_ms, bare=self._keys.bare)) for one in states if self.repair}
        wishes = {id: (state.digest, *repair) for id, (state, repair) in repairs.items() if repair}
        if wishes:
            lines = {state.id: state.at for state in states}
            call = check_ids(self._keys, [*wishes], part=part, piece=piece, lines=lines, wishes=wishes)
            mended = {id for id, row in zip(wishes, self.queue.run(call)[1], strict=True) if row == b"mended"}
        for state in states:
            for name in self._faults(state, now_ms):
                self.found.add(name, state.id, mended=state.id in mended)

    def _faults(self, state: IdState, now_ms: int) -> list[str]:
        return faults_of(state, now_ms, bare=self._keys.bare)

    def _states(
        self, ids: Sequence[str], part: Part = "", piece: tuple[int, int] = (1, 0)
    ) -> tuple[int, list[IdState]]:
        """
        Read the states of ids; add the leased messages with a key to `_leases`.

        Delete an id from `_lines` if it was found in the key queue of its own message key.
        """
        lines = self._lines
        now_ms, rows = self.queue.run(check_ids(self._keys, ids, part=part, piece=piece, lines=lines))
        states = [read_state(id, row, lines.get(id, "")) for id, row in zip(ids, rows, strict=True)]
        for state in states:
            if state.at and state.at == state.key:
                del lines[state.id]
            if state.key and state.lease_ms is not None:
                self._leases.add((state.key, state.id))
        return now_ms, states
