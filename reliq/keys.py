"""
The names of all Redis keys of reliq, the layouts of these names, and message ids.

All Redis keys of a shard have the same hash tag, so they are in one slot of a Redis Cluster. A generated message id
consists of the time of its creation, 84 random bits and the number of its shard.
"""

import os
import re
import time
from binascii import b2a_base64, crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import count
from typing import ClassVar
from uuid import UUID

from reliq.errors import ConfigurationError
from reliq.message import Duration, Header
from reliq.settings import milliseconds

CLUSTER_SLOTS = 16_384
#: The maximum number of shards of a queue. The eight bits of a shard's number select its range of slots in a Cluster.
SHARDS_LIMIT = 256
_BITS = 8
_SLOTS_OF_PLACE = CLUSTER_SLOTS // SHARDS_LIMIT


QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
#: The maximum length of the name of a queue that is shared with Go programs. The Go library itself has no limit.
LONGEST_FOREIGN_NAME = 512

#: The Redis key of the queue registry: a hash with the unix time at which a worker or publisher last wrote each queue.
#: In a Cluster, this key is not in the slots of the queues, because all queues share it.
QUEUES_KEY = "reliq:queues"

#: The Redis key of the worker registry: a sorted set with the unix time at which each worker process last wrote its
#: record. All queues share this key.
WORKERS_KEY = "reliq:workers"

_PREFIX = re.compile(r"[^\s,]{1,128}")
_GLOB = re.compile(r"[*?\[\]\\^]")

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_TIME_LENGTH = 8
_TOKEN_LENGTH = 14
#: The number of message ids for which random bytes are read at a time, because reading them for each id would be slow.
_STOCK_TOKENS = 128
_ID_LENGTH = 22
_PERIODIC = "cron."
_STORED = "plan."
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_OF_SHARD = re.compile(r"[A-Za-z0-9]{8}[A-Za-z0-9_-]{14}~([1-9][0-9]{0,2})")
#: Generated ids contain a time from 2020 to 2100, in unix ms. An id that a publisher chose can have the same form by
#: chance. Only 1 in 86 of such ids would contain a time in this range.
_FIRST_MS = 1_577_836_800_000
_LAST_MS = 4_102_444_800_000
_URL_SAFE = bytes.maketrans(b"+/", b"-_")

#: Random tokens that are not used yet, by process id. uWSGI can fork without Python's fork hooks,
#: and a child process must not use the tokens of its parent process.
_stock: dict[int, list[str]] = {}
#: The time of the last generated id, in unix ms and as the text that the id contains.
_last: tuple[int, str] = (0, "0" * _TIME_LENGTH)


def slot_of(tag: str) -> int:
    """Return the Cluster slot of the Redis keys with the hash tag `tag`."""
    return crc_hqx(tag.encode(), 0) % CLUSTER_SLOTS


@cache
def end_of_tag(tag: str, shard: int) -> str:
    """
    Return the text at the end of a shard's hash tag, for example `#3.52` for shard 3; empty for shard 0.

    The number after the dot is chosen so that the shards are distributed evenly over the slots of a Cluster. If the
    slots are divided into 2 ** n equal ranges, each range has one of 2 ** n shards. So nodes with equally many slots
    have equally many shards.
    """
    if shard == 0:
        return ""
    # The slots are divided into 256 numbered ranges. Shard 0 has the range of the slot of `tag`. Shard n has the range
    # whose number is the number of shard 0's range XOR the number n with its eight bits reversed.
    place = slot_of(tag) // _SLOTS_OF_PLACE ^ int(f"{shard:0{_BITS}b}"[::-1], 2)
    ends = (f"#{shard}.{number}" for number in count())
    return next(end for end in ends if slot_of(tag + end) // _SLOTS_OF_PLACE == place)


def check_layout(layout: object) -> None:
    """Raise ConfigurationError if `layout` is not a `Layout` object, for example if it is a text."""
    if not isinstance(layout, Layout):
        raise ConfigurationError(
            f"layout must be Layout.RELIQ, Layout.hdt3213() or Layout.parse(TEXT), not {str(layout)[:80]!r}"
        )


def worker_key(id: str) -> str:
    """Return the Redis key of the record of a worker process: a string that expires if it is not written again."""
    return f"reliq:worker:{id}"


def stack_request_key(id: str) -> str:
    """Return the Redis key that exists while a command waits for a stack report of worker process `id`."""
    return f"reliq:stack-request:{id}"


def stacks_key(id: str) -> str:
    """Return the Redis key of the last stack report of worker process `id`: a string with an expiry."""
    return f"reliq:stacks:{id}"


def limit_key(name: str) -> str:
    """Return the Redis key of a shared limit, a hash. No queue has this key, because queue names contain no colon."""
    return f"{{reliq:limit:{name}}}"


def pattern(key: str) -> str:
    """Return the pattern for SCAN and ACL rules that matches only the Redis key `key`."""
    return _GLOB.sub(r"\\\g<0>", key)


@dataclass(frozen=True, slots=True)
class Layout:
    """
    How the Redis keys of a queue are named and how bodies are stored: `Layout.RELIQ` or `Layout.hdt3213()`.

    `str(layout)` returns the layout as text, such as `reliq`, `hdt3213` or `hdt3213:tag,prefix=shop`. `Layout.parse`
    converts this text to a layout.

    Attributes:
        prefix: the text before the queue's name in a Redis key.
        hash_tag: whether prefix and name are in braces, so that the keys are in the same slot of a Redis Cluster.
        bare: whether bodies are stored without reliq's header line, like in HDT3213/delayqueue.

    Raises:
        ConfigurationError: the prefix is not 1 to 128 printable characters without space or comma, or the layout does
            not exist.
    """

    prefix: str = "reliq"
    hash_tag: bool = True
    bare: bool = False

    RELIQ: ClassVar["Layout"]

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix) or not self.prefix.isprintable():
            raise ConfigurationError(
                f"a layout's prefix must be 1 to 128 printable characters without space or comma, not {self.prefix!r}"
            )
        if not self.bare and (self.prefix, self.hash_tag) != ("reliq", True):
            raise ConfigurationError("a layout is Layout.RELIQ or Layout.hdt3213(hash_tag=, prefix=), and no other")

    def __str__(self) -> str:
        options = ["tag"] * self.hash_tag + [f"prefix={self.prefix}"] * (self.prefix != "dp")
        if not self.bare:
            return "reliq"
        return f"hdt3213:{','.join(options)}" if options else "hdt3213"

    @classmethod
    def hdt3213(cls, *, hash_tag: bool = False, prefix: str = "dp") -> "Layout":
        """
        Return the layout of the Go library HDT3213/delayqueue, which stores bodies without a header.

        Args:
            hash_tag: True if the Go program uses `NewQueueOnCluster` or `UseHashTagKey`, False for `NewQueue`. Default:
                False.
            prefix: the prefix that the Go program passes to `UseCustomPrefix`. The Redis keys of bodies do not have
                this prefix. Default: "dp".
        """
        return cls(prefix, hash_tag, bare=True)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """
        Convert a text to a layout.

        The text is `reliq`, or `hdt3213` with options after a colon, for example `hdt3213:tag,prefix=shop`. The options
        are `tag` or `no-tag` (the default), and `prefix=NAME`.

        Raises:
            ConfigurationError: the text is not a layout.
        """
        if text == "reliq":
            return cls.RELIQ
        kind, colon, rest = text.partition(":")
        options = rest.split(",") if colon else []
        tags = [option for option in options if option in ("tag", "no-tag")]
        prefixes = [option.removeprefix("prefix=") for option in options if option.startswith("prefix=")]
        is_known = len(tags) + len(prefixes) == len(options) and len(tags) <= 1 and len(prefixes) <= 1
        if kind != "hdt3213" or not is_known:
            raise ConfigurationError(
                "layout must be reliq, hdt3213, hdt3213:tag, hdt3213:no-tag, hdt3213:prefix=NAME or several of these "
                f"combined by commas, not {text[:80]!r}"
            )
        return cls.hdt3213(hash_tag=tags == ["tag"], prefix=prefixes[0] if prefixes else "dp")

    @property
    def body_prefix(self) -> str:
        """The prefix of the Redis keys of bodies. In the Go layout it is always `dp`."""
        return "dp" if self.bare else self.prefix

    @property
    def is_in_one_slot(self) -> bool:
        """Whether all keys of a queue are in one slot of a Redis Cluster."""
        return self.hash_tag and self.prefix == self.body_prefix


Layout.RELIQ = Layout()


def is_name(name: object, layout: Layout = Layout.RELIQ) -> bool:
    """Return whether `name` is a valid name for a queue in `layout`."""
    if not isinstance(name, str):
        return False
    if layout.bare:
        return 0 < len(name) <= LONGEST_FOREIGN_NAME and name.isprintable()
    return QUEUE_NAME.fullmatch(name) is not None


class Keys:
    """
    The Redis keys of one shard of a queue. A queue without sharding has only shard 0.

    Raises:
        ConfigurationError: the name is not 1 to 128 characters of A-Z a-z 0-9 _ . - (in the Go layout 1 to 512
            printable characters), or a queue with the Go layout would have several shards.
    """

    def __init__(self, name: str, layout: Layout = Layout.RELIQ, shard: int = 0) -> None:  # noqa: PLR0915  a list of keys
        check_layout(layout)
        if not is_name(name, layout):
            is_gos = not layout.bare and isinstance(name, str) and ":" in name and is_name(name, Layout.hdt3213())
            hint = "; a queue in Go may have this name: --layout hdt3213, or Layout.hdt3213()" if is_gos else ""
            wanted = (
                f"1 to {LONGEST_FOREIGN_NAME} printable characters" if layout.bare else "1 to 128 of A-Z a-z 0-9 _ . - "
            )
            raise ConfigurationError(f"queue name must be {wanted}, not {name!r}{hint}")
        if type(shard) is not int or not 0 <= shard < SHARDS_LIMIT:
            raise ConfigurationError(f"a shard is a number from 0 to {SHARDS_LIMIT - 1}, not {shard!r}")
        if shard and layout.bare:
            raise ConfigurationError(
                f"a queue in the layout {layout} has one shard: the Go library does not support more"
            )
        self.name = name
        self.layout = layout
        self.shard = shard
        self.bare = layout.bare
        base = _base(layout.prefix, name + end_of_tag(f"{layout.prefix}:{name}", shard), layout.hash_tag)
        bodies = base if shard else _base(layout.body_prefix, name, layout.hash_tag)
        self.msg_start = bodies + ":msg:"  # the Redis key of a body begins with this text
        self._aside = base + ":aside:"
        self._dedup = base + ":dd:"
        self.result_start = base + ":result:"  # the Redis key of a result begins with this text
        self._lane = base + ":lane:"
        self.pending = base + ":pending"  # sorted set of scheduled messages: id -> due time
        self.ready = base + ":ready"  # list: ids of due messages; LPUSH adds ids, RPOP claims them
        self.unack = base + ":unack"  # sorted set of leased or nacked messages: id -> lease deadline or redelivery time
        self.retry = base + ":retry"  # list: ids of messages to be delivered again
        self.garbage = base + ":garbage"  # set: ids of failed messages that are not yet dead letters
        self.retries_left = base + ":retry:cnt"  # hash: id -> retries left
        self.lease = base + ":lease"  # hash: id -> the message's state, such as `nacked`, or the nonce of its lease
        self.errors = base + ":errors"  # hash: id -> reason, attempt and error of the message's last failures
        self.dead = base + ":dead"  # stream: the dead letters
        self.ends = base + ":ends"  # stream: the last messages that ended without an ack
        self.history = base + ":history"  # stream: the last acked messages, if the queue keeps them
        self.token = base + ":token"  # string: the last fencing token
        self.totals = base + ":totals"  # hash: event, such as `acked` -> how many messages had this event so far
        self.minutes = base + ":minutes"  # hash: minute modulo 180 -> `totals` as a worker read it in this minute
        self.wake = base + ":wake"  # list: at most one token, which wakes a process that waits for messages
        self.watch = base + ":watch"  # string: the process that currently waits for the next due time
        self.windows = base + ":windows"  # hash: chosen id -> its `dedup` in ms
        self.paused = base + ":paused"  # string: exists while the queue is paused

        # Only some queues have the following Redis keys.

        self.cron = base + ":cron"  # hash: the state of the periodic jobs, see reliq.schedule
        self.plans = base + ":plans"  # hash: the schedules created with `Queue.schedule`, see reliq.schedules
        self.plans_due = base + ":plans:due"  # sorted set: name of a schedule in `plans` -> its next tick
        self.map = base + ":map"  # string, only in shard 0: how many shards the queue has
        self.epoch = base + ":epoch"  # string: version of the shard map; a publish with an older shard map is refused
        self.leaving = base + ":leaving"  # hash: id -> the message, for messages that are moving to another shard
        self.arrived = base + ":arrived"  # hash: shard -> number and result of the last batch that was moved from there
        self.line_start = base + ":line:"  # the Redis key of a key queue begins with this text

        # hash: the limits of the queue, see `Limits.fields`. It exists only if the queue uses message keys or limits.
        self.limits = base + ":limits"
        self.ring = base + ":ring"  # sorted set: message key -> its position in the order in which keys take turns

        # sorted set: `key NUL id` of the messages that count against the limit of their key, all with the score 0
        self.held = base + ":held"
        self.asleep = base + ":asleep"  # sorted set: throttled or paused message key -> when messages may start again
        self.rates = base + ":rates"  # sorted set: message key -> when its rate allows a full burst again, in unix us

    @classmethod
    def registered(cls, entry: str) -> "Keys | None":
        """Return the Redis keys of the queue in an entry of the queue registry; None if the entry is invalid."""
        layout, space, name = entry.partition(" ")
        try:
            return cls(name, Layout.parse(layout)) if space else cls(entry)
        except ConfigurationError:
            return None

    @property
    def entry(self) -> str:
        """The entry of the queue in the queue registry: its name, in the Go layout after the text of the layout."""
        return self.name if self.layout == Layout.RELIQ else f"{self.layout} {self.name}"

    def of_shard(self, shard: int) -> "Keys":
        """Return the Redis keys of another shard of the same queue."""
        return self if shard == self.shard else Keys(self.name, self.layout, shard)

    def msg(self, id: str) -> str:
        """Return the Redis key of the body of message `id`."""
        return self.msg_start + id

    def msgs(self, ids: Iterable[str]) -> list[str]:
        """Return the Redis keys of the bodies of messages."""
        prefix = self.msg_start
        return [prefix + id for id in ids]

    def dedup(self, id: str) -> str:
        """Return the deduplication key of the message id `id`, with which `dedup` or a tombstone blocks the id."""
        return self._dedup + id

    def result(self, id: str) -> str:
        """Return the Redis key of the kept result of message `id`: a string that expires."""
        return self.result_start + id

    def lane(self, lane: str) -> str:
        """
        Return the Redis key of one call sequence (lane) of a client.

        It stores the number and the result of the last script call in this sequence.
        """
        return self._lane + lane

    def line(self, key: str) -> str:
        """Return the Redis key of the key queue of `key`: a list of message ids, of which the last is claimed first."""
        return self.line_start + key

    def aside(self, key: str, stamp: int) -> str:
        """Return the name to which Redis key `key` is renamed after another program has written to it."""
        return f"{self._aside}{stamp}:{key}"


def _base(prefix: str, name: str, hash_tag: bool) -> str:
    return f"{{{prefix}:{name}}}" if hash_tag else f"{prefix}:{name}"


def new_id(shard: int = 0) -> str:
    """Generate a unique id for a message in a shard."""
    return f"{_time_part()}{token()}~{shard}" if shard else _time_part() + token()


def of_shard(id: str, shard: int) -> str:
    """Change the shard in a generated id, and return the changed id; its time and random part stay the same."""
    return f"{id[:_ID_LENGTH]}~{shard}" if shard else id[:_ID_LENGTH]


def home(id: str, shards: int) -> int:
    """
    Return the number of the shard that a message belongs to.

    A generated id contains this number. Messages of periodic jobs and schedules belong to shard 0, where the jobs and
    schedules are stored. For other ids, a hash of the id selects the shard. If the number of shards is reduced from N
    to a divisor M of N, the messages of shard h move to shard h mod M. If the number is doubled, each message stays in
    its shard or moves to a new shard.

    Args:
        id: the message id.
        shards: how many shards the queue has.
    """
    if shards == 1 or id.startswith((_PERIODIC, _STORED)):
        return 0
    if generated := _OF_SHARD.fullmatch(id):
        return int(generated[1]) % shards
    made = made_at(id)
    if made is not None and _FIRST_MS <= made < _LAST_MS:
        return 0
    return int.from_bytes(sha256(id.encode("utf-8", "surrogateescape")).digest()[:8]) % shards


def tick_id(entry: str, at: int) -> str:
    """Return the id of the message that a periodic job publishes at a due time (tick), in unix seconds."""
    return f"{_PERIODIC}{entry}.{at}"


def plan_id(name: str, at: int) -> str:
    """Return the id of the message that a stored schedule publishes at a due time (tick), in unix seconds."""
    return f"{_STORED}{name}.{at}"


def run_id(entry: str, asked_ms: int) -> str:
    """Return the id of the message that is published when an operator runs a periodic job."""
    return f"{_PERIODIC}{entry}.run.{asked_ms}"


def token() -> str:
    """Return a unique random text of 14 characters (84 bits), for example for a message id or a client."""
    try:
        return _stock[os.getpid()].pop()
    except (KeyError, IndexError):
        chance = b2a_base64(os.urandom(_STOCK_TOKENS * _TOKEN_LENGTH * 6 // 8), newline=False)
        text = chance.translate(_URL_SAFE).decode("ascii")
        first, *others = (text[at : at + _TOKEN_LENGTH] for at in range(0, len(text), _TOKEN_LENGTH))
        _stock.clear()
        _stock[os.getpid()] = others
        return first


def made_at(id: str) -> int | None:
    """Return the time at which an id was generated, in unix ms by the publisher's clock; None for other ids."""
    if len(id) > _ID_LENGTH and _OF_SHARD.fullmatch(id):
        id = id[:_ID_LENGTH]
    if len(id) != _ID_LENGTH or not all(digit in _VALUES for digit in id[:_TIME_LENGTH]):
        return None
    ms = 0
    for digit in id[:_TIME_LENGTH]:
        ms = ms * 62 + _VALUES[digit]
    return ms


def check_id(id: str | UUID) -> str:
    """
    Check a message id, and return it as text.

    Raises:
        ConfigurationError: the id is neither a generated id nor 1 to 128 characters of `A-Z a-z 0-9 _ . : -`.
    """
    if isinstance(id, UUID):
        return str(id)
    if not isinstance(id, str):
        raise ConfigurationError(f"id must be a str or a UUID, not {type(id).__name__}: give str(…)")
    generated = _OF_SHARD.fullmatch(id)
    if _ID.fullmatch(id) is None and not (generated and int(generated[1]) < SHARDS_LIMIT):
        raise ConfigurationError(f"id must be 1 to 128 of A-Z a-z 0-9 _ . : - , not {id[:40]!r}")
    return id


def first_published(queue: str, id: str, header: Header) -> tuple[str, str, int]:
    """
    Return the queue, the id and the publication_id of the first publication of a message.

    They stay the same when the message is copied to another queue. Without a publication_id, the publish time is used
    instead, and 0 if this time is not known.
    """
    publication_id = header.publication_id if header.publication_id is not None else header.enqueued
    if publication_id is None:
        publication_id = made_at(id) or 0
    return *(header.origin or (queue, id)), publication_id


def chosen_window_ms(id: str, dedup: Duration) -> int | None:
    """Convert `dedup`, the time for which the end of a message blocks its id, to ms; None for a generated id."""
    return None if made_at(id) is not None else milliseconds(dedup)


def _time_part() -> str:
    global _last  # noqa: PLW0603  one value for a whole millisecond
    ms = time.time_ns() // 1_000_000
    if ms == _last[0]:
        return _last[1]
    digits = ""
    rest = ms
    for _ in range(_TIME_LENGTH):
        rest, value = divmod(rest, 62)
        digits = _DIGITS[value] + digits
    _last = (ms, digits)
    return digits
