"""All metrics of reliq: name, help text and labels. No other module spells the name of a metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

STATES = ("pending", "ready", "unack", "retry", "garbage")
#: The state of messages in key queues. Only a queue with keys has it.
WAITING = "waiting"

#: The totals that Redis counts for a queue, by their names in `B:totals`; `retried` has one for each cause.
TOTALS = {
    "published": "Messages accepted.",
    "promoted": "Messages that came due.",
    "claimed": "Messages leased to a consumer.",
    "acked": "Messages that ended well.",
    "nacked": "Deliveries that failed or were rejected.",
    "snoozed": "Deliveries that a handler put off.",
    "released": "Messages given back before they had started.",
    "dead": "Messages that became dead letters.",
    "expired": "Messages that were gone before a delivery could start: TTL passed, evicted or deleted.",
    "cancelled": "Messages cancelled.",
    "purged": "Messages deleted by an operator.",
    "redriven": "Dead letters published again.",
    "letters_dropped": "Dead letters dropped by age or number.",
}
#: A further total of a queue with keys.
LIMITED = "limited"
CAUSES = ("nack", "lease")
#: The number of exception classes that a queue has series for. Later classes are counted as `other`.
CLASSES_LIMIT = 20
OTHER = "other"
#: The keys that a queue has series for, the characters of a key in its label, and the label of all other keys together.
KEYS_LIMIT = 10
KEY_LENGTH = 64
REST = "(all others)"

#: Buckets in seconds: from 1 ms to 10 minutes for handlers and publishes, to an hour for the lag. From 0.1 s on a bucket
#: ends at most twice as late as the previous bucket, up to 30 s mostly 1.5 times: the error of a quantile is smaller.
HANDLER_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
LAG_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0),
    *(45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 420.0, 600.0, 900.0, 1800.0, 3600.0),
)
PUBLISH_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, eq=False)
class Spec:
    """
    A metric.

    Attributes:
        source: `queue` for a metric that Redis has for each queue, `process` for a metric that worker processes measure.
        buckets: the upper bounds of a histogram's buckets, without the last bucket, which is unbounded.
        merged: how a sum over processes merges the values of a gauge.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    source: Literal["queue", "process", ""] = ""
    buckets: tuple[float, ...] = ()
    merged: Literal["sum", "max", "min"] = "sum"

    @cached_property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """The type of the metric, as Prometheus names it."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @cached_property
    def size(self) -> int:
        """How many numbers a series has: a histogram has a number for each bucket, the last included, and the sum."""
        return len(self.buckets) + 2 if self.buckets else 1


def _queue(name: str, help: str, *labels: str) -> Spec:
    return Spec(name, help, ("queue", *labels), source="queue")


_measured = partial(Spec, source="process")


MESSAGES = _queue("reliq_messages", "Messages in each state; their sum is alive.", "state")
DEAD_LETTERS = _queue("reliq_dead_letters", "Dead letters that are kept.")
BACKLOG = _queue("reliq_backlog", "Messages that wait for a worker: ready, retry, and pending that is due.")
MISSING = _queue(
    "reliq_messages_unaccounted", "Published + redriven - every end - alive: 0 in a queue whose account is balanced."
)
UNACK = _queue(
    "reliq_unack",
    "Messages in unack: under a lease, or waiting after a nack. Exact up to 200, above estimated from 200.",
    "kind",
)
OLDEST = _queue(
    "reliq_oldest_message_age_seconds",
    "How long ago the first message of a state was due; of unack, how long ago its lease or wait ended. In Go's layout ready and retry have none.",
    "state",
)
KEYS = _queue(
    "reliq_keys", "Keys whose messages wait: `in_turn` for a worker, `asleep` for a rate or a pause.", "state"
)
KEY_WAITING = _queue(
    "reliq_key_waiting", "Messages that wait in the lines of the ten keys with most, and of all others together.", "key"
)
KEY_HELD_UP = _queue(
    "reliq_key_blocked_seconds",
    "For how long nothing has started of the key that waits longest while it sleeps, or its places are taken.",
)
LIMITED_CLAIMS = _queue("reliq_limited_claims_total", "Claims that took less than they could: a rate was used up.")
PAUSED = _queue(
    "reliq_paused", "1 while the queue is paused, or a handler's `RateLimited` has put the whole queue to sleep."
)
MAP_LOST = _queue("reliq_shard_map_lost", "1 while Redis has no map of the queue's shards, or an earlier one.")
SHARED = _queue(
    "reliq_go_layout", "1 in a layout of the Go original: its programs may share the queue, and count nothing."
)
COUNTED = {kind: _queue(f"reliq_{kind}_total", text) for kind, text in TOTALS.items()}
RETRIED = _queue("reliq_retried_total", "Messages to be delivered again, by the cause.", "cause")

CRON_LAST = _queue("reliq_cron_last_timestamp_seconds", "The last tick that was published.", "entry")
CRON_NEXT = _queue(
    "reliq_cron_next_timestamp_seconds",
    "The first tick that is not done; when it lies in the past, no process publishes.",
    "entry",
)
CRON_MISSED = _queue("reliq_cron_missed_total", "Ticks that no process published in time.", "entry")
CRON_SKIPPED = _queue(
    "reliq_cron_skipped_total",
    "Ticks that were skipped: the entry was `paused`, or its last message alive (`overlap`).",
    "entry",
    "why",
)

LEFT_OUT = Spec(
    "reliq_queues_skipped",
    "Queues of the registry that this scrape does not show: `unreadable`, a key of theirs is spoilt; `many`, too many.",
    ("reason",),
)

REDIS_UP = Spec("reliq_redis_up", "1 when Redis answered this scrape.")
REDIS_MEMORY = Spec("reliq_redis_memory_bytes", "Memory that Redis uses.")
REDIS_MEMORY_LIMIT = Spec("reliq_redis_memory_limit_bytes", "Redis' maxmemory, 0 for none.")
REDIS_CLIENTS = Spec("reliq_redis_clients", "Clients connected to Redis.")
REDIS_EVICTED = Spec("reliq_redis_evicted_keys_total", "Keys that Redis evicted since it started.")
REDIS_EVICTION = Spec("reliq_redis_eviction_enabled", "1 when maxmemory-policy lets Redis delete messages.")
REDIS_AOF = Spec("reliq_redis_aof_enabled", "1 when Redis writes an append-only file.")
REDIS_INFO = Spec("reliq_redis_info", "1; the label names the version of Redis.", ("version",))
SCRAPE = Spec("reliq_redis_scrape_seconds", "How long it took to ask Redis for this scrape.")

HANDLER = _measured("reliq_handler_seconds", "How long handlers took.", ("queue", "outcome"), buckets=HANDLER_BUCKETS)
HANDLER_FAILURES = _measured(
    "reliq_handler_failures_total",
    "Failures of handlers by the class of the exception; `other` after 20 classes in a queue.",
    ("queue", "exception"),
)
LAG = _measured("reliq_lag_seconds", "From the due time to the start of the handler.", ("queue",), buckets=LAG_BUCKETS)
INFLIGHT = _measured("reliq_inflight", "Messages in worker processes: running, or held for a slot.", ("phase",))
LONGEST = _measured("reliq_longest_running_seconds", "For how long the oldest running handler has run.", merged="max")
SLOTS = _measured("reliq_slots", "Handlers that may run at once.")
SLOTS_BUSY = _measured("reliq_slots_busy", "Slots that a call of a handler has, hung ones included.")
SLOTS_HUNG = _measured("reliq_slots_hung", "Slots lost to handlers that overran their time and cannot be ended.")
LOST = _measured("reliq_leases_lost_total", "Answers that came too late: the lease was over.", ("queue",))
LATE = _measured("reliq_renewals_late_total", "Renewals of leases that came late: a process was held up.")
LAST_CLAIM = _measured(
    "reliq_last_claim_timestamp_seconds", "When the process that is behind most completed a claim round.", merged="min"
)
REDIS_ERRORS = _measured(
    "reliq_redis_errors_total",
    "Rounds of a worker's parts that failed: Redis was `away`, or `refused` a command.",
    ("reason",),
)
RECONNECTS = _measured("reliq_redis_reconnects_total", "How often Redis was away for a process and answered it again.")

OUTBOX_ROWS = _measured(
    "reliq_outbox_rows", "Rows of the outbox that wait for a relay, counted up to 100,000.", merged="max"
)
OUTBOX_OLDEST = _measured(
    "reliq_outbox_oldest_seconds",
    "Age of the oldest row that waits; while the database fails, at least since the last count.",
    merged="max",
)
OUTBOX_ERRORS = _measured(
    "reliq_outbox_database_errors_total", "Rounds of relays that failed: the database was away or refused."
)

WORKERS = Spec("reliq_workers", "Worker processes that run.")
RESTARTS = Spec("reliq_restarts_total", "Worker processes that ended and were replaced.", ("reason",))
BUILD = Spec("reliq_build_info", "1; the labels name the versions that run.", ("version", "python", "redis_py"))
CPU = Spec("process_cpu_seconds_total", "Processor time of a process of the worker.", ("process",))
MEMORY = Spec("process_resident_memory_bytes", "Memory of a process of the worker.", ("process",))
OPEN_FDS = Spec("process_open_fds", "Files and connections that a process of the worker has.", ("process",))
STARTED = Spec("process_start_time_seconds", "When a process of the worker started.", ("process",))

PUBLISH = Spec(
    "reliq_publish_seconds", "How long calls of publish took, failed ones too.", ("queue",), buckets=PUBLISH_BUCKETS
)
PUBLISHED = Spec(
    "reliq_publish_messages_total", "Messages of calls of publish, by what became of them.", ("queue", "outcome")
)

#: Every metric of this module by its name. PUBLISH and PUBLISHED are in the registry of the publishing application.
ALL: Mapping[str, Spec] = {
    spec.name: spec for spec in (*globals().values(), *COUNTED.values()) if isinstance(spec, Spec)
}
#: The metrics of queues.
QUEUES = [spec for spec in ALL.values() if spec.source == "queue"]
#: The metrics that worker processes measure, by name.
MEASURED = {name: spec for name, spec in ALL.items() if spec.source == "process"}
