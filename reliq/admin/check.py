"""`reliq check`: the faults that a queue can have, the state of its ids at one moment, the report, and the repair."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from reliq.admin import calls
from reliq.admin.calls import TYPES, KeyQueueState
from reliq.admin.filters import ignore
from reliq.admin.session import AdminBase
from reliq.errors import RedisUnavailableError
from reliq.lua import script, transitions
from reliq.lua.transitions import bounded, clock_arg
from reliq.redis import commands
from reliq.redis.commands import LISTS, Call, Command, id_text
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
    from reliq.redis.commands import Arg, List

T = TypeVar("T")
Part = Literal["", "ready", "retry", "line", "both"]
#: Called with the name of the part that is read, and how many ids were checked so far.
OnProgress = Callable[[str, int], None]

CHECK = script("check", __package__)
CHECK_KEYS = script("check_keys", __package__)
_NO_WISH = ("",) * 7
NOWHERE: Mapping[str, str] = {}

#: Ids that are read in one piece and checked in one call: some 2 ms.
BATCH = 250
#: Redis keys in one step of a walk through the key space: some 0.3 ms.
SCANNED_KEYS = 1000
#: The script searches for an id this many entries around the place where it was read: as many may have come meanwhile.
MARGIN = 500
#: Entries of lists that a call compares: some 10 ms.
COMPARISONS = 500_000
#: Longer lists are not searched: the call for one id would hold up Redis.
LONGEST_LISTS = 2_500_000
#: In shorter lists the script settles every suspicion immediately.
SHORT_LISTS = 10_000
#: The lists are read this many times more, to drop the suspects that were only moving.
ROUNDS = 3

#: September 2001: a smaller number is no time in unix ms.
FIRST_MS = 10**12
#: Due times and leases lie at most this many ms ahead.
LONGEST_AHEAD_MS = 3660 * 86_400_000
#: A lease may seem this many ms longer than it is.
CLOCK_SLACK_MS = 1000
#: A report has at most this many examples of a fault.
EXAMPLES = 5

_COUNT = re.compile(r"\d{1,6}( .+)?", re.DOTALL)

#: Fault -> its meaning, and how `--repair` repairs it, in the order of a report.
FAULTS = {
    "wrong-type": ("a key of the queue has another type: scripts refuse to run", "renames the key, and keeps it"),
    "lost-map": (
        "the map of the shards is lost, corrupt or out of date: processes that start may serve too few shards",
        "writes the latest map that a shard has",
    ),
    "bad-fence": (
        "the fence of a shard is no map that reliq writes: it stops no publisher that has an old map",
        "renames the key, and writes the fence of the map",
    ),
    "twice": ("an id is in two places, and may be delivered from each", "keeps the place that is further on"),
    "lost": (
        "a message is in no place: no worker will ever claim it",
        "restores it from its envelope; a body without an envelope becomes a dead letter",
    ),
    "stray-body": ("a body has no message", "makes it a dead letter"),
    "stray-count": ("a retry count has neither place nor body", "ends the message as expired or cancelled"),
    "stray-word": ("a state word has no message", "removes the word"),
    "stray-error": ("a last error has no message", "removes the error"),
    "no-count": ("a message has no retry count, which means no retries", "writes 0: one more delivery"),
    "bad-count": ("a retry count is no number", "writes 0: one more delivery"),
    "ended-count": ("a message that ended still has a retry count", "removes the count"),
    "wrong-word": ("a state word does not fit the place of its message", "removes the word"),
    "wrong-time": (
        "a score is no time of this queue",
        "writes the time of the envelope, or of the lease; without either, makes a dead letter",
    ),
    "strange-body": ("the key of a body has another type", "ends a waiting message; a claim ends any other"),
    "no-body": ("a body is missing: the message expired, or a program deleted the body", "ends a waiting message"),
    "no-word": ("an id is leased, but not by a reliq worker", "nothing: it is reclaimed"),
    "no-place": ("a message is leased without a place of its key: too many of the key may run", "gives it a place"),
    "misplaced": ("a message is in another list than its key's queue", "moves it there, as its claim would"),
    "stray-place": ("a message that is not leased has a place of a key: the key may be blocked", "frees the place"),
    "stuck-key": ("messages of a key wait, but no worker will ever claim them", "puts the key into the ring"),
    "stray-turn": ("a key has a turn in the ring, but no message waits", "removes the key from the ring"),
    "long-sleep": ("a key is throttled until an impossible time", "ends the throttling"),
    "asleep": (
        "the whole queue is throttled: a handler raised RateLimited for a message without a key",
        "nothing: run `reliq resume QUEUE`",
    ),
    "bad-total": ("a total is no number, or below zero: the account is unknown", "nothing: the true total is unknown"),
    "account": (
        "published + redriven is not every end + alive: another program changed the queue",
        "nothing: repair the other faults first",
    ),
}
#: Faults that pass without a repair: a sound queue may have them.
PASSING = {"no-body", "no-word", "misplaced", "asleep"}
#: Harmless remains of an ack by a consumer in Go, which does not remove these fields.
LEFTOVERS = {"stray-word", "stray-error"}


@dataclass(frozen=True, slots=True)
class Fault:
    """
    A kind of fault that a queue has, and how often.

    Attributes:
        name: a short name, such as `lost`.
        count: how many ids or keys have it; for the account, the difference in messages.
        mended: how many of them were repaired.
        examples: the first few.
        means: its meaning, in one sentence.
        repair: how `--repair` repairs it.
        passes: whether it passes without a repair, and a sound queue may have it.
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
    The findings of a check.

    Attributes:
        looked_at: how many ids were checked.
        unproved: ids that may be wrong, in lists that are too long to be read at one moment.
        away: the shards that were not checked to the end, because their Redis is away.
    """

    queue: str
    looked_at: int
    faults: tuple[Fault, ...]
    unproved: int = 0
    away: tuple[int, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether all shards were checked, and every fault was repaired or passes without a repair."""
        return not (self.unproved or self.away) and all(
            fault.passes or fault.mended == fault.count for fault in self.faults
        )


class CheckActions(AdminBase):
    """Check a queue."""

    def check(
        self, queue: str, *, repair: bool = False, patience: Duration = 5.0, progress: OnProgress = ignore
    ) -> CheckReport:
        """
        Check every id of a queue for contradictions to the model.

        Args:
            repair: repair all that needs no guess; move the rest to the dead letters with a reason.
            patience: seconds for which a fault must last to be reported, in a layout of the Go original: a program in Go
                moves a message by several commands.
            progress: is called with the name of the part that is read, and how many ids were checked so far.
        """
        wait = partial(time.sleep, seconds("patience", patience, most=3600))
        session = self._redis.queue(queue, mends=True)
        found = Findings()
        away: dict[int, RedisUnavailableError] = {}
        for part in session.parts:
            try:
                Checker(part, found, repair=repair, progress=progress, wait=wait).run()
            except RedisUnavailableError as error:
                away[part.keys.shard] = error
        if len(away) == len(session.parts):
            raise next(iter(away.values()))
        return found.report(session.keys, tuple(away))


@dataclass(slots=True)
class Findings:
    """The faults that were found so far, in all shards."""

    looked_at: int = 0
    unproved: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    examples: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, example: str, count: int = 1, *, mended: bool = False) -> None:
        """Note a fault."""
        self.counts[name] += count
        self.mended[name] += mended
        if len(self.examples[name]) < EXAMPLES:
            self.examples[name].append(example)

    def report(self, keys: Keys, away: tuple[int, ...] = ()) -> CheckReport:
        """Return the report on a queue."""
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
    Read the state of each id, all at one moment, and repair the ids that have a wish.

    Args:
        part: the list that is searched in its `piece`, from an index to another; `line` is the key queue in which an id
            was found, `both` is all of each list.
        lines: the message key of the key queue in which an id was found, by id.
        wishes: the fields after the id in the script's ARGV, by id.

    Returns:
        The time in ms, and a row for each id: its state, or for a wish `mended`, or `changed` when the state is no
        longer the state that was seen.
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
    Check message keys and places of keys, and with `repair` repair them; return the fault of each, empty for none.

    Args:
        items: a key and an empty text, or a key and the id of a message that has a place of it, or should have.
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
    Everything that Redis has of an id, at one moment.

    Attributes:
        at: the key in whose queue it was found, empty when it was found elsewhere.
        key: its message key, empty without a key.
        pending, unack: its score, in unix seconds; None when it is not there.
        garbage: whether it waits to be collected.
        left: its retry count as Redis has it.
        word: its state word.
        error: whether a last error is kept.
        body: the type of its body's key, `none` without a body.
        due_ms: the due time in the envelope of its body.
        ready, retry: how often it is in a list; None when the list was not searched.
        line, other: how often it is in the queue of its key, and in the queue of the key `at`.
        digest: of all that; a repair is made only while it is still the same.
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
        """The places it is in, besides the lists."""
        held = {"pending": self.pending is not None, "unack": self.unack is not None, "garbage": self.garbage}
        return [place for place, is_there in held.items() if is_there]

    @property
    def listed(self) -> int:
        """How often it was found in a list."""
        return sum(filter(None, (self.ready, self.retry, self.line, self.other)))

    @property
    def places(self) -> int:
        """How many places it was found in."""
        return len(self.scored) + self.listed

    @property
    def is_empty(self) -> bool:
        """Whether Redis has nothing of it but, perhaps, a place in a list."""
        return not self.scored and self.left is None and not self.has_word and not self.error and self.body == "none"

    @property
    def has_word(self) -> bool:
        """Whether it has a state word."""
        return self.word != Unset()

    @property
    def lease_ms(self) -> int | None:
        """The lease of the claim that holds it, in ms; None without a claim."""
        return self.word.lease_ms if isinstance(self.word, Held) else None

    def is_as(self, other: IdState) -> bool:
        """Return whether nothing has changed since `other` was seen, except the counts in lists."""
        unlooked = {"ready": None, "retry": None, "line": None, "other": None, "digest": ""}
        return replace(self, **unlooked) == replace(other, **unlooked)  # type: ignore[arg-type]


def read_state(id: str, row: Sequence[Any], at: str = "") -> IdState:
    """Return the state of `id`, which was found in the queue of the key `at`, from a row of the script `check`."""
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
    Return the faults of an id.

    When the lists were not searched, an id that is nowhere else counts as being in one of them.
    """
    if state.places > 1:
        return ["twice"]
    is_strange = state.body not in ("string", "none")
    if state.places == 0 and state.ready is not None and state.retry is not None:
        remains = {  # the fault has the name of the most that is left
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
    """Return whether a score, in ms, can be a time of this queue: after 2001, and not too far ahead."""
    return math.isfinite(ms) and FIRST_MS <= ms <= now_ms + ahead_ms


def fits(word: StateWord, place: str) -> bool:
    """Return whether an id in `place` may have a state word."""
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
    """Return whether a retry count is valid: a number, and the message's key if it has a key."""
    return left is not None and _COUNT.fullmatch(left) is not None


def place_of(state: IdState) -> str:
    """Return the place of an id that is not in two: `list` for ready, retry and key queues."""
    return state.scored[0] if state.scored else "list"


#: Further on comes first: a copy that waits behind a leased message would only be delivered once more.
FURTHER_ON = ("unack", "retry", "ready", "line", "pending", "garbage")


class Repair(NamedTuple):
    """
    How a repair leaves an id, as the script `check` takes it.

    Attributes:
        place: where it belongs, `=` where it is, empty for nowhere; `line` is the queue of its key.
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
    kind: Literal["", "stray", "expired", "cancelled", "dead"] = ""
    note: str = ""


_STRAY = Repair(place="", left="", word="", kind="stray")
_EXPIRED = _STRAY._replace(kind="expired")


def _dead(why: str) -> Repair:
    return _STRAY._replace(kind="dead", note=str(FailureNote("lost", None, why)))


def repair_of(state: IdState, now_ms: int, *, bare: bool) -> Repair | None:
    """
    Return where an id that has a fault belongs; None when the next claim or reclaim is the better repair.

    For an id in two places or in none, both lists must have been searched.
    """
    left = "=" if is_count(state.left) else count_text(0, state.key or state.at)  # 0: one more delivery
    list_of = "line" if state.key else "retry" if state.retry else "ready"
    if state.places == 0:
        due = state.due_ms
        if state.left is None and state.body != "string":
            return _STRAY if state.body == "none" else None  # a key of another type may belong to another program
        if state.word.cancelled:
            return _STRAY._replace(kind="cancelled")
        if state.body != "string":
            return _EXPIRED
        if bare or state.left is None or due is None or not is_time(due, now_ms):
            return _dead("it was in no place of its queue, and its place is unknown")
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
            return _dead("its due time was no time, and its envelope has none")
        if moves or not math.isfinite(score_ms) or due != round(score_ms):
            repair = repair._replace(place=place, due_ms=due)
    return repair if repair != Repair() else None


def _due(state: IdState, place: str, score_ms: float, now_ms: int) -> int | None:
    """Return the score, in ms, that an id should have; None when it is unknown."""
    if place == "unack" and state.lease_ms is not None:
        latest = now_ms + state.lease_ms
        return round(score_ms) if is_time(score_ms, latest + CLOCK_SLACK_MS, ahead_ms=0) else latest
    if is_time(score_ms, now_ms):
        return round(score_ms)
    if state.due_ms is not None and is_time(state.due_ms, now_ms):
        return state.due_ms
    return now_ms if place == "unack" else None


def _places_scanned(keys: Keys, cursor: int, count: int) -> Command[tuple[int, list[tuple[str, str]]]]:
    """Read about `count` places of keys; return the next cursor, and key and id of each place."""

    def read(reply: Any) -> tuple[int, list[tuple[str, str]]]:
        members = [id_text(member).partition("\0") for member in reply[1][::2]]
        return int(reply[0]), [(key, id) for key, _, id in members]

    return Command(("ZSCAN", keys.held, cursor, "COUNT", count), read)


class Checker:
    """
    A check of one queue, or of one shard of it.

    Args:
        queue: must exist.
        found: gets the faults.
        wait: waits until a move by a program in Go must have ended.
    """

    def __init__(
        self,
        queue: QueueSession,
        found: Findings,
        *,
        repair: bool,
        progress: OnProgress,
        wait: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._keys = queue.keys
        self._found = found
        self._repair = repair
        self._progress = progress
        self._wait = wait
        self._known: set[str] = set()
        #: Id -> the message key of the key queue in which it was found, if it has no place there.
        self._lines: dict[str, str] = {}
        #: Key and id of every leased message that has a key.
        self._leases: set[tuple[str, str]] = set()
        #: Message keys that have a key queue.
        self._key_names: set[str] = set()
        self._longest_line = 0
        self._suspects: set[str] = set()
        self._passing: dict[str, IdState] = {}

    def run(self) -> None:
        """Check everything."""
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
                lefts = self._queue.run(commands.retries_left(self._keys, ids))
                self._look([id for id, left in zip(ids, lefts, strict=True) if left is None])
        self._settle_suspicions()
        self._report_what_stays()
        self._check_keys()
        self._check_account()

    def _check_types(self) -> bool:
        """Check the types of the queue's keys; return whether scripts can run."""
        can_run = True
        for name, wanted in TYPES.items():
            found = self._queue.run(Command(("TYPE", getattr(self._keys, name)), bytes.decode))
            if found not in (wanted, "none"):
                # Scripts refuse to touch a key of the wrong type: it is still the same key.
                mended = self._repair and self._put_aside(name)
                example = f"{getattr(self._keys, name)} is a {found}, not a {wanted}"
                self._found.add("wrong-type", example, mended=mended)
                can_run = can_run and mended
        return can_run

    def _put_aside(self, name: str) -> bool:
        """Rename a key of the queue; return whether the new name was free."""
        aside = self._keys.aside(name, time.time_ns() // 1_000_000)
        return self._queue.run(Command(("RENAMENX", getattr(self._keys, name), aside), bool))

    def _check_fence(self) -> None:
        """Compare the fence of the shard with the map."""
        if self._keys.bare:
            return
        known = self._queue.map
        fenced = self._queue.run(fence(self._keys))
        if fenced is None:
            mended = self._repair and self._put_aside("epoch")
            if mended:
                ShardChange(self._queue, self._keys).restore()
            self._found.add("bad-fence", self._keys.epoch, mended=mended)
        elif fenced.epoch > known.epoch or (known.is_lost and self._keys.shard == 0):
            change = ShardChange(self._queue, self._keys)
            if change.map.is_lost:  # otherwise it was changed since the check began
                example = f"{self._keys.of_shard(0).map}: {change.map.n} shards, epoch {change.map.epoch}"
                if self._repair:
                    change.restore()
                self._found.add("lost-map", example, mended=self._repair)

    def _pieces(self, spot: List | KeyQueueState, start: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Yield the ids of a list, a piece at a time, each with the index of its first."""
        while True:
            self._tell("lines" if isinstance(spot, KeyQueueState) else spot)
            ids = self._queue.run(calls.newest_ids(self._keys, spot, start, BATCH))
            if not ids:
                return
            yield start, ids
            start += len(ids)

    def _line_pieces(self) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """Yield the ids of key queues, each with its key: pieces of one long queue, or the starts of several queues."""
        keys = self._keys
        if not self._queue.run(Command(("EXISTS", keys.limits, keys.ring, keys.held, keys.asleep), int)):
            return  # without message keys, spare the walk
        for found in self._scanned("lines", calls.names_of, "line", count=SCANNED_KEYS):
            for names in chunked(found, BATCH):
                self._key_names.update(names)
                starts = self._queue.run_all([calls.newest_ids(keys, KeyQueueState(key), 0, BATCH) for key in names])
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
        """Check pieces of a list, from the end where ids come in: new ids hide no others."""
        for start, rows in pieces:
            times = Counter(id for id, _ in rows)
            again = {id for id in times if times[id] > 1 or id in self._known}
            self._suspects |= again
            fresh = {id: key for id, key in rows if id not in again}
            if part == "line":
                self._lines |= fresh
            self._look([*fresh], part, (max(0, start - MARGIN), start + BATCH + MARGIN))
            for id, key in rows:
                if key and id in again:  # note this key queue, unless it belongs to the id's own key
                    before = self._lines.get(id, "")
                    self._lines[id] = key
                    self._states([id])
                    if before:
                        self._lines.setdefault(id, before)

    def _scanned(
        self, what: str, step: Callable[..., Command[tuple[int, list[T]]]], *of: str, count: int = BATCH
    ) -> Iterator[list[T]]:
        """Yield the findings of each step of a walk; report progress before each step."""

        def next_step(at: int) -> Command[tuple[int, list[T]]]:
            self._tell(what)
            return step(self._keys, *of, at, count)

        return self._queue.scan(next_step)

    def _unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that were not checked yet, each once."""
        return [id for id in dict.fromkeys(ids) if id not in self._known]

    def _tell(self, what: str) -> None:
        self._progress(what, self._found.looked_at)

    def _look(self, ids: Sequence[str], part: Part = "", piece: tuple[int, int] = (1, 0)) -> None:
        """Check ids that were read in one place; note faults, and suspected faults."""
        if not ids:
            return
        self._known.update(ids)
        self._found.looked_at += len(ids)
        now_ms, states = self._states(ids, part, piece)
        wrong = []
        for state in states:
            is_wrong = bool(self._faults(state, now_ms))
            # Whether such an id has a fault depends on lists that were not searched.
            needs_proof = state.listed > 0 if state.scored else not part and not state.is_empty
            if needs_proof or (is_wrong and not state.places):
                self._suspects.add(state.id)
            elif is_wrong:
                wrong.append(state)
        self._note(wrong, now_ms, part, piece)

    def _settle_suspicions(self) -> None:
        """Search all lists for every suspect, and note the faults that remain."""
        length = self._length_of_lists()
        for _ in range(ROUNDS if length > SHORT_LISTS else 0):
            self._drop_what_only_moved()
        if length > LONGEST_LISTS:
            self._found.unproved += len(self._suspects)
            return
        for now_ms, states in self._searched(self._suspects, length):
            self._note([state for state in states if self._faults(state, now_ms)], now_ms, "both")

    def _drop_what_only_moved(self) -> None:
        """Read the lists again, and drop the suspects that are in one place now, or have ended."""
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
        """Check the faults of a queue of the Go original again, and report those that are unchanged."""
        if not self._passing:
            return
        self._tell("what was wrong, once more")
        self._wait()
        length = self._length_of_lists()
        if length > LONGEST_LISTS:
            self._found.unproved += len(self._passing)
            return
        for now_ms, states in self._searched(self._passing, length):
            stayed = [one for one in states if one.is_as(self._passing[one.id]) and self._faults(one, now_ms)]
            self._report(stayed, now_ms, "both")

    def _length_of_lists(self) -> int:
        """Return with how many ids the script compares an id for which it searches all lists."""
        sizes: list[int] = self._queue.run_all([calls.size(self._keys, part) for part in LISTS])
        return sum(sizes) + self._longest_line

    def _searched(self, ids: Iterable[str], length: int) -> Iterator[tuple[int, list[IdState]]]:
        """Yield the states of `ids`, some at a time; all lists are searched."""
        for some in chunked(sorted(ids), max(1, min(BATCH, COMPARISONS // max(1, length)))):
            self._tell("suspects")
            yield self._states(some, "both")

    def _check_keys(self) -> None:
        """Check every message key, and every place of a key that a message has or should have."""
        in_turn = (self._scanned(name, calls.keys_among, name) for name in ("ring", "asleep"))
        found = chain([sorted(self._leases)], self._scanned("places", _places_scanned))
        names = chain([sorted(self._key_names)], *in_turn)
        places, keys = chain.from_iterable(found), chain.from_iterable(names)
        for items in chunked(chain(places, ((key, "") for key in keys)), BATCH):
            faults = self._queue.run(check_keys(self._keys, items, repair=self._repair))
            for (key, id), fault in zip(items, faults, strict=True):
                if fault:
                    self._found.add(fault, id or key, mended=self._repair)

    def _check_account(self) -> None:
        """Compare the published messages with those that ended or are alive, at one moment."""
        totals: list[bytes] = self._queue.run(Command(("HGETALL", self._keys.totals), list))
        numbers = {name: whole_number(number) for name, number in zip(totals[::2], totals[1::2], strict=True)}
        bad = [name for name, number in numbers.items() if number is None or number < 0]
        for name in bad:
            self._found.add("bad-total", id_text(name))
        if bad or self._keys.bare:  # the Go original keeps no account
            return
        counts = self._queue.run(transitions.counts(self._keys))
        until = counts.keyed and self._queue.run(transitions.key_queues(self._keys)).asleep_until
        if until:
            self._found.add("asleep", f"until unix time {until:.0f}")
        if missing := counts.missing:
            self._found.add("account", f"{abs(missing)} too {'few' if missing > 0 else 'many'}", abs(missing))

    def _note(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int] = (1, 0)) -> None:
        """Report faulty ids; in a queue of the Go original, note them: their moves may not have ended."""
        if self._keys.bare:
            self._passing |= {state.id: state for state in states}
        else:
            self._report(states, now_ms, part, piece)

    def _report(self, states: Sequence[IdState], now_ms: int, part: Part, piece: tuple[int, int] = (1, 0)) -> None:
        """Report faulty ids; with `repair`, repair the ids whose state is still the same."""
        mended = set()
        repairs = {one.id: (one, repair_of(one, now_ms, bare=self._keys.bare)) for one in states if self._repair}
        wishes = {id: (state.digest, *repair) for id, (state, repair) in repairs.items() if repair}
        if wishes:
            lines = {state.id: state.at for state in states}
            call = check_ids(self._keys, [*wishes], part=part, piece=piece, lines=lines, wishes=wishes)
            mended = {id for id, row in zip(wishes, self._queue.run(call)[1], strict=True) if row == b"mended"}
        for state in states:
            for name in self._faults(state, now_ms):
                self._found.add(name, state.id, mended=state.id in mended)

    def _faults(self, state: IdState, now_ms: int) -> list[str]:
        return faults_of(state, now_ms, bare=self._keys.bare)

    def _states(
        self, ids: Sequence[str], part: Part = "", piece: tuple[int, int] = (1, 0)
    ) -> tuple[int, list[IdState]]:
        """Read the state of ids, and note their key queues and leases."""
        lines = self._lines
        now_ms, rows = self._queue.run(check_ids(self._keys, ids, part=part, piece=piece, lines=lines))
        states = [read_state(id, row, lines.get(id, "")) for id, row in zip(ids, rows, strict=True)]
        for state in states:
            if state.at and state.at == state.key:
                del lines[state.id]
            if state.key and state.lease_ms is not None:
                self._leases.add((state.key, state.id))
        return now_ms, states
