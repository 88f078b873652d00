"""Every metric of reliq: its name, its labels and its meaning. No other module spells the name of a metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

STATES = ("pending", "ready", "unack", "retry", "garbage")
#: The state of messages in key queues, which only a queue with keys has.
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
#: Classes of exceptions that a queue has series for; those that come after them are `other`.
CLASSES_LIMIT = 20
OTHER = "other"
#: The keys that a queue has series for, the characters of a key in its label, and the label of all other keys together.
KEYS_LIMIT = 10
KEY_LENGTH = 64
REST = "(all others)"

#: Buckets in seconds: from 1 ms to 10 minutes for handlers and publishes, to an hour for the lag. From 0.1 s on a bucket
#: ends at most twice as late as the one before it, from 30 s down mostly half as late again: a quantile is off by less.
HANDLER_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
LAG_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0),
    *(45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 420.0, 600.0, 900.0, 1800.0, 3600.0),
)
PUBLISH_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """
    One metric, by the name that is scraped.

    Attributes:
        buckets: of a histogram, the upper bounds of its buckets but the last, which has none.
        merged: how the values of several processes become one, of a gauge.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    merged: Literal["sum", "max", "min"] = "sum"

    @property
    def size(self) -> int:
        """How many numbers a series has: of a histogram one for each bucket, the last included, and the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


MESSAGES = Spec("reliq_messages", "gauge", "Messages in each state; their sum is alive.", ("queue", "state"))
DEAD_LETTERS = Spec("reliq_dead_letters", "gauge", "Dead letters that are kept.", ("queue",))
BACKLOG = Spec(
    "reliq_backlog", "gauge", "Messages that wait for a worker: ready, retry, and pending that is due.", ("queue",)
)
MISSING = Spec(
    "reliq_account_missing",
    "gauge",
    "Published + redriven - every end - alive: 0 in a queue whose account is balanced.",
    ("queue",),
)
UNACK = Spec(
    "reliq_unack",
    "gauge",
    "Messages in unack: under a lease, or waiting after a nack. Exact up to 200, above estimated from 200.",
    ("queue", "kind"),
)
OLDEST = Spec(
    "reliq_oldest_seconds",
    "gauge",
    "How long ago the first message of a state was due; of unack, how long ago its lease or wait ended. In Go's layout ready and retry have none.",
    ("queue", "state"),
)
KEYS = Spec(
    "reliq_keys",
    "gauge",
    "Keys whose messages wait: `in_turn` for a worker, `asleep` for a rate or a pause.",
    ("queue", "state"),
)
KEY_WAITING = Spec(
    "reliq_key_waiting",
    "gauge",
    "Messages that wait in the lines of the ten keys with most, and of all others together.",
    ("queue", "key"),
)
KEY_HELD_UP = Spec(
    "reliq_key_held_up_seconds",
    "gauge",
    "For how long nothing has started of the key that waits longest while it sleeps, or its places are taken.",
    ("queue",),
)
LIMITED_CLAIMS = Spec(
    "reliq_limited_claims_total", "counter", "Claims that took less than they could: a rate was used up.", ("queue",)
)
PAUSED = Spec(
    "reliq_paused",
    "gauge",
    "1 while the queue is paused, or a handler's `RateLimited` has put the whole queue to sleep.",
    ("queue",),
)
MAP_LOST = Spec(
    "reliq_shard_map_lost", "gauge", "1 while Redis has no map of the queue's shards, or an earlier one.", ("queue",)
)
SHARED = Spec(
    "reliq_shared",
    "gauge",
    "1 in a layout of the Go original: its programs may share the queue, and count nothing.",
    ("queue",),
)
COUNTED = {kind: Spec(f"reliq_{kind}_total", "counter", text, ("queue",)) for kind, text in TOTALS.items()}
RETRIED = Spec("reliq_retried_total", "counter", "Messages to be delivered again, by the cause.", ("queue", "cause"))

CRON_LAST = Spec("reliq_cron_last_timestamp_seconds", "gauge", "The last tick that was published.", ("queue", "entry"))
CRON_NEXT = Spec(
    "reliq_cron_next_timestamp_seconds",
    "gauge",
    "The first tick that is not done; when it lies in the past, no process publishes.",
    ("queue", "entry"),
)
CRON_MISSED = Spec("reliq_cron_missed_total", "counter", "Ticks that nobody published in time.", ("queue", "entry"))
CRON_SKIPPED = Spec(
    "reliq_cron_skipped_total",
    "counter",
    "Ticks that were skipped: the entry was `paused`, or its last message alive (`overlap`).",
    ("queue", "entry", "why"),
)

LEFT_OUT = Spec(
    "reliq_queues_left_out",
    "gauge",
    "Queues of the registry that this scrape does not show: `unreadable`, a key of theirs is spoilt; `many`, too many.",
    ("reason",),
)

REDIS_UP = Spec("reliq_redis_up", "gauge", "1 when Redis answered this scrape.")
REDIS_MEMORY = Spec("reliq_redis_memory_bytes", "gauge", "Memory that Redis uses.")
REDIS_MEMORY_LIMIT = Spec("reliq_redis_memory_limit_bytes", "gauge", "Redis' maxmemory, 0 for none.")
REDIS_CLIENTS = Spec("reliq_redis_clients", "gauge", "Clients connected to Redis.")
REDIS_EVICTED = Spec("reliq_redis_evicted_keys_total", "counter", "Keys that Redis evicted since it started.")
REDIS_EVICTION = Spec("reliq_redis_eviction_enabled", "gauge", "1 when maxmemory-policy lets Redis delete messages.")
REDIS_AOF = Spec("reliq_redis_aof_enabled", "gauge", "1 when Redis writes an append-only file.")
REDIS_INFO = Spec("reliq_redis_info", "gauge", "1; the label names the version of Redis.", ("version",))
SCRAPE = Spec("reliq_redis_scrape_seconds", "gauge", "How long it took to ask Redis for this scrape.")

HANDLER = Spec(
    "reliq_handler_seconds", "histogram", "How long handlers took.", ("queue", "outcome"), buckets=HANDLER_BUCKETS
)
HANDLER_FAILURES = Spec(
    "reliq_handler_failures_total",
    "counter",
    "Failures of handlers by the class of the exception; `other` after 20 classes in a queue.",
    ("queue", "exception"),
)
LAG = Spec(
    "reliq_lag_seconds",
    "histogram",
    "From the due time to the start of the handler.",
    ("queue",),
    buckets=LAG_BUCKETS,
)
INFLIGHT = Spec("reliq_inflight", "gauge", "Messages in worker processes: running, or held for a slot.", ("phase",))
LONGEST = Spec(
    "reliq_longest_running_seconds", "gauge", "For how long the oldest running handler has run.", merged="max"
)
SLOTS = Spec("reliq_slots", "gauge", "Handlers that may run at once.")
SLOTS_BUSY = Spec("reliq_slots_busy", "gauge", "Slots that a call of a handler has, hung ones included.")
SLOTS_HUNG = Spec("reliq_slots_hung", "gauge", "Slots lost to handlers that overran their time and cannot be ended.")
LOST = Spec("reliq_leases_lost_total", "counter", "Answers that came too late: the lease was over.", ("queue",))
LATE = Spec("reliq_renewals_late_total", "counter", "Renewals of leases that came late: a process was held up.")
LAST_CLAIM = Spec(
    "reliq_last_claim_timestamp_seconds",
    "gauge",
    "When the process that is behind most completed a claim round.",
    merged="min",
)
REDIS_ERRORS = Spec(
    "reliq_redis_errors_total",
    "counter",
    "Rounds of a worker's parts that failed: Redis was `away`, or `refused` a command.",
    ("reason",),
)
RECONNECTS = Spec(
    "reliq_redis_reconnects_total", "counter", "How often Redis was away for a process and answered it again."
)

OUTBOX_ROWS = Spec(
    "reliq_outbox_rows", "gauge", "Rows of the outbox that wait for a relay, counted up to 100,000.", merged="max"
)
OUTBOX_OLDEST = Spec(
    "reliq_outbox_oldest_seconds",
    "gauge",
    "Age of the oldest row that waits; while the database fails, at least since the last count.",
    merged="max",
)
OUTBOX_ERRORS = Spec(
    "reliq_outbox_database_errors_total", "counter", "Rounds of relays that failed: the database was away or refused."
)

WORKERS = Spec("reliq_workers", "gauge", "Worker processes that run.")
RESTARTS = Spec("reliq_restarts_total", "counter", "Worker processes that ended and were replaced.", ("reason",))
BUILD = Spec(
    "reliq_build_info", "gauge", "1; the labels name the versions that run.", ("version", "python", "redis_py")
)
CPU = Spec("process_cpu_seconds_total", "counter", "Processor time of a process of the worker.", ("process",))
MEMORY = Spec("process_resident_memory_bytes", "gauge", "Memory of a process of the worker.", ("process",))
OPEN_FDS = Spec("process_open_fds", "gauge", "Files and connections that a process of the worker has.", ("process",))
STARTED = Spec("process_start_time_seconds", "gauge", "When a process of the worker started.", ("process",))

PUBLISH = Spec(
    "reliq_publish_seconds",
    "histogram",
    "How long calls of publish took, failed ones too.",
    ("queue",),
    buckets=PUBLISH_BUCKETS,
)
PUBLISHED = Spec(
    "reliq_publish_messages_total",
    "counter",
    "Messages of calls of publish, by what became of them.",
    ("queue", "outcome"),
)

_MEASURED = (
    *(HANDLER, HANDLER_FAILURES, LAG, INFLIGHT, LONGEST, SLOTS, SLOTS_BUSY, SLOTS_HUNG, LOST, LATE, LAST_CLAIM),
    *(REDIS_ERRORS, RECONNECTS, OUTBOX_ROWS, OUTBOX_OLDEST, OUTBOX_ERRORS),
)
#: The metrics that the processes of a worker measure themselves, by name.
MEASURED: Mapping[str, Spec] = {spec.name: spec for spec in _MEASURED}
#: Every metric of this module, by name; PUBLISH and PUBLISHED are in the registry of the publishing application.
ALL: Mapping[str, Spec] = {
    spec.name: spec for spec in (*globals().values(), *COUNTED.values()) if isinstance(spec, Spec)
}
