"""The faults that a queue can have: what each means, how it is mended, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.fsck.state import FaultName

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
class FaultTally:
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
