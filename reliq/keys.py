"""The Redis keys of one queue. No other module spells a key."""

import re
from dataclasses import dataclass
from typing import ClassVar, Self

from reliq.errors import ConfigurationError

QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

#: A hash, queue -> when a worker or producer last named it, in unix seconds. Not in any queue's slot.
QUEUES_KEY = "reliq:queues"

#: A sorted set, worker process -> when it last wrote its record, in unix seconds. Not in any queue's slot.
WORKERS_KEY = "reliq:workers"


def worker_key(id: str) -> str:
    """Return the key of the record of worker process `id`: a string that expires when it is not written again."""
    return f"reliq:worker:{id}"


@dataclass(frozen=True, slots=True)
class Layout:
    """
    How a queue's keys are spelled and whether its bodies carry a header.

    Attributes:
        prefix: what stands before the queue's name.
        body_prefix: the same for the bodies (the Go original always says `dp`).
        hash_tag: whether prefix and name stand in braces, so that one queue lies in one Cluster slot.
        bare: whether a body is stored as it is, without reliq's header line.
    """

    prefix: str = "reliq"
    body_prefix: str = "reliq"
    hash_tag: bool = True
    bare: bool = False

    RELIQ: ClassVar["Layout"]

    @classmethod
    def hdt3213(cls, *, hash_tag: bool = True, prefix: str = "dp") -> Self:
        """
        Return the layout of HDT3213/delayqueue, with bare bodies.

        `hash_tag=True` is that of `NewQueueOnCluster` and `UseHashTagKey`, False that of `NewQueue`;
        `prefix` is that of `UseCustomPrefix`, which the original leaves out of the bodies' keys.
        """
        return cls(prefix, "dp", hash_tag, bare=True)


Layout.RELIQ = Layout()


def is_name(name: object) -> bool:
    """Say whether a queue may be called so."""
    return isinstance(name, str) and QUEUE_NAME.fullmatch(name) is not None


class Keys:
    """
    The keys of the queue `name` in `layout`.

    Raises:
        ConfigurationError: the name is not 1 to 128 of A-Z a-z 0-9 _ . -
    """

    __slots__ = (
        "_aside",
        "_dd",
        "_lane",
        "_msg",
        "counts",
        "dead",
        "ends",
        "errors",
        "every",
        "garbage",
        "history",
        "layout",
        "lease",
        "moving",
        "name",
        "paused",
        "pending",
        "ready",
        "retry",
        "totals",
        "unack",
        "wake",
        "watch",
    )

    def __init__(self, name: str, layout: Layout = Layout.RELIQ) -> None:
        if not is_name(name):
            raise ConfigurationError(f"queue name must be 1 to 128 of A-Z a-z 0-9 _ . - , not {name!r}")
        self.name, self.layout = name, layout
        base = _base(layout.prefix, name, layout.hash_tag)
        self._msg = _base(layout.body_prefix, name, layout.hash_tag) + ":msg:"
        self.every = base + ":*"  # matches every key but the bodies of another prefix, for SCAN
        self._aside = base + ":aside:"
        self._dd = base + ":dd:"
        self._lane = base + ":lane:"
        self.pending = base + ":pending"  # sorted set: id -> due time
        self.ready = base + ":ready"  # list: LPUSH in, RPOP out
        self.unack = base + ":unack"  # sorted set: id -> lease deadline or redelivery time
        self.retry = base + ":retry"  # list: ids to be delivered again
        self.garbage = base + ":garbage"  # set: ids at their end
        self.counts = base + ":retry:cnt"  # hash: id -> retries left
        self.lease = base + ":lease"  # hash: id -> state word: a claim's nonce, `nacked`, `suspect`, ...
        self.moving = base + ":moving"  # string: the queue to which messages of this one are being moved
        self.errors = base + ":errors"  # hash: id -> reason, attempt and error of its last failure
        self.dead = base + ":dead"  # stream: the dead letters
        self.ends = base + ":ends"  # stream: the last messages that ended otherwise than by an ack
        self.history = base + ":history"  # stream: the last acked ones, for a queue that wants them
        self.totals = base + ":totals"  # hash: kind -> how many ever
        self.wake = base + ":wake"  # list: at most one token
        self.watch = base + ":watch"  # string: the process that waits for the next due time
        self.paused = base + ":paused"  # string: there while the queue is paused

    @property
    def bare(self) -> bool:
        """Whether bodies are stored as they are, without a header line."""
        return self.layout.bare

    def msg(self, id: str) -> str:
        """Return the key of the body of message `id`."""
        return self._msg + id

    def dd(self, id: str) -> str:
        """Return the key that marks the chosen id `id` as taken after its end."""
        return self._dd + id

    def lane(self, lane: str) -> str:
        """Return the key of the last number and answer of `lane`."""
        return self._lane + lane

    def aside(self, key: str, stamp: int) -> str:
        """Return where the key `key` of this queue is put when something else has been written to it."""
        return f"{self._aside}{stamp}:{key}"


def _base(prefix: str, name: str, hash_tag: bool) -> str:
    return f"{{{prefix}:{name}}}" if hash_tag else f"{prefix}:{name}"
