"""All metrics of reliq: name, help text and labels. Other modules use these constants."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

STATES = ("pending", "ready", "unack", "retry", "garbage")
#: The state of messages that wait in key queues; only queues with message keys have this state.
WAITING = "waiting"

#: The fields of the Redis hash `totals` of a queue, each with the help text of its metric.
#: The total `retried` is missing here, because the hash has one field for each cause in CAUSES, such as `retried_nack`.
TOTALS = {
    "published": "Messages that were published.",
    "replaced": "Messages that replaced a waiting message, or follow a running message.",
    "promoted": "Messages that came due.",
    "claimed": "Messages that were leased to a worker.",
    "acked": "Messages that handlers finished successfully.",
    "nacked": "Attempts that failed or were rejected.",
    "snoozed": "Attempts that handlers snoozed.",
    "released": "Messages that workers returned before they started.",
    "dead": "Messages that became dead letters.",
    "expired": "Messages without a body when an attempt should start: TTL expired, evicted or deleted.",
    "cancelled": "Messages that were cancelled.",
    "purged": "Messages that an operator deleted.",
    "redriven": "Dead letters that were published again.",
    "letters_dropped": "Dead letters that were dropped because of their age or number.",
    "results_dropped": "Results that were not kept because Redis refused them, for example at maxmemory.",
}
#: A field of the hash `totals` that only queues with message keys have: how often a rate limit made a claim smaller.
LIMITED = "limited"
CAUSES = ("nack", "lease")
#: Each queue has series for at most this many exception classes. All further classes share the label OTHER.
CLASSES_LIMIT = 20
OTHER = "other"
#: Each queue has series for its KEYS_LIMIT largest message keys. A label has at most KEY_LENGTH characters of the key.
#: All other keys share the label REST.
KEYS_LIMIT = 10
KEY_LENGTH = 64
REST = "(all others)"

#: The upper bounds of histogram buckets, in seconds: up to 10 minutes for the duration of handlers, and up to 1 hour
#: for the lag, which is the time from the due time of a message to the start of its handler.
#: From 0.1 s to 30 s, the bounds are close together (mostly factor 1.5), so that quantiles are accurate.
HANDLER_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
LAG_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0),
    *(45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 420.0, 600.0, 900.0, 1800.0, 3600.0),
)
PUBLISH_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, eq=False)
class Spec:
    """
    The definition of a metric.

    Attributes:
        source: `queue` for a metric that is read from Redis for each queue, `process` for a metric that worker
            processes measure, empty for other metrics.
        buckets: the upper bounds of a histogram's buckets, without the last bound, +Inf; empty for other metrics.
        merged: how the values of several processes become one value; always `sum` for counters and histograms.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    source: Literal["queue", "process", ""] = ""
    buckets: tuple[float, ...] = ()
    merged: Literal["sum", "max", "min"] = "sum"

    @cached_property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """The Prometheus type of the metric."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @cached_property
    def size(self) -> int:
        """How many numbers a series has. A histogram has a number for each bucket, including +Inf, and the sum."""
        return len(self.buckets) + 2 if self.buckets else 1


def _queue(name: str, help: str, *labels: str) -> Spec:
    return Spec(name, help, ("queue", *labels), source="queue")


_measured = partial(Spec, source="process")


MESSAGES = _queue("reliq_messages", "Messages by state; the sum is the number of living messages.", "state")
DEAD_LETTERS = _queue("reliq_dead_letters", "Dead letters that are kept.")
BACKLOG = _queue(
    "reliq_backlog", "Messages that wait for a worker: ready, retry, due pending messages, and messages in key queues."
)
MISSING = _queue(
    "reliq_messages_unaccounted",
    "Published + redriven - ended - living messages: 0 when no message is missing. Absent in Go's layout.",
)
UNACK = _queue(
    "reliq_unack",
    "Messages in unack: `running`, or in `backoff` after a nack. Above 200 messages, estimated from a sample.",
    "kind",
)
OLDEST = _queue(
    "reliq_oldest_message_age_seconds",
    "Time since the oldest message of a state was due; in unack, since its lease or backoff expired. Absent for ready and retry in Go's layout.",
    "state",
)
KEYS = _queue(
    "reliq_keys", "Message keys with waiting messages: `in_turn`, or `asleep` while throttled or paused.", "state"
)
KEY_WAITING = _queue(
    "reliq_key_waiting",
    "Waiting messages of the ten largest message keys, and of all other keys together as `(all others)`.",
    "key",
)
KEY_HELD_UP = _queue(
    "reliq_key_blocked_seconds",
    "How long no message of the longest-blocked message key has started, because of a limit or a pause.",
)
LIMITED_CLAIMS = _queue("reliq_limited_claims_total", "Claims that took fewer messages because of a rate limit.")
PAUSED = _queue("reliq_paused", "1 while an operator or a handler's `RateLimited` pauses the whole queue.")
MAP_LOST = _queue("reliq_shard_map_lost", "1 while Redis has no map of the queue's shards, or an outdated map.")
SHARED = _queue(
    "reliq_go_layout", "1 for a queue in Go's layout, which Go programs may share; they do not update the counters."
)
COUNTED = {kind: _queue(f"reliq_{kind}_total", text) for kind, text in TOTALS.items()}
RETRIED = _queue("reliq_retried_total", "Messages to be redelivered, by cause.", "cause")

CRON_LAST = _queue("reliq_cron_last_timestamp_seconds", "Time of the last published tick.", "entry")
CRON_NEXT = _queue(
    "reliq_cron_next_timestamp_seconds",
    "Time of the next tick; while it is in the past, no process publishes this periodic job.",
    "entry",
)
CRON_MISSED = _queue("reliq_cron_missed_total", "Ticks that no process published in time.", "entry")
CRON_SKIPPED = _queue(
    "reliq_cron_skipped_total",
    "Ticks that were skipped: the periodic job was `paused`, or its last message was alive (`overlap`).",
    "entry",
    "why",
)

UNREADABLE = Spec(
    "reliq_queue_unreadable",
    "1 while the queue or a shard of it cannot be read: a Redis key is damaged, or a server is away or too slow.",
    ("queue",),
)
LEFT_OUT = Spec("reliq_queues_skipped", "Registered queues without metrics, because there are more than 2,000 queues.")

_server = partial(Spec, labels=("server",))
REDIS_UP = _server("reliq_redis_up", "1 when the Redis server answered this scrape.")
REDIS_MEMORY = _server("reliq_redis_memory_bytes", "Memory that the server uses.")
REDIS_MEMORY_LIMIT = _server("reliq_redis_memory_limit_bytes", "maxmemory of the server; 0 for no limit.")
REDIS_CLIENTS = _server("reliq_redis_clients", "Clients connected to the server.")
REDIS_EVICTED = _server("reliq_redis_evicted_keys_total", "Keys that the server evicted since it started.")
REDIS_EVICTION = _server("reliq_redis_eviction_enabled", "1 when maxmemory-policy lets the server delete messages.")
REDIS_AOF = _server("reliq_redis_aof_enabled", "1 when the server writes an append-only file.")
REDIS_INFO = Spec("reliq_redis_info", "1; a label names the version of the server.", ("server", "version"))
SCRAPE = _server("reliq_redis_scrape_seconds", "Time that the server took to answer INFO for this scrape.")

HANDLER = _measured(
    "reliq_handler_seconds", "Duration of handler calls.", ("queue", "task", "outcome"), buckets=HANDLER_BUCKETS
)
HANDLER_FAILURES = _measured(
    "reliq_handler_failures_total",
    "Failed handler calls by exception class; `other` after 20 classes in a queue.",
    ("queue", "task", "exception"),
)
LAG = _measured(
    "reliq_lag_seconds", "Time from the due time to the start of the handler.", ("queue",), buckets=LAG_BUCKETS
)
INFLIGHT = _measured(
    "reliq_inflight", "Messages in worker processes: `running`, or `prefetched` for a slot.", ("phase",)
)
LONGEST = _measured("reliq_longest_running_seconds", "Running time of the handler that started first.", merged="max")
SLOTS = _measured("reliq_slots", "Handlers that can run concurrently.")
SLOTS_BUSY = _measured("reliq_slots_busy", "Slots in use, including hung slots.")
SLOTS_HUNG = _measured("reliq_slots_hung", "Slots of handlers that exceeded their timeout and cannot be ended.")
LOST = _measured(
    "reliq_leases_lost_total", "Renewals and outcomes that Redis refused because the lease had expired.", ("queue",)
)
LATE = _measured("reliq_renewals_late_total", "Lease renewals that were late because the process was delayed.")
LAST_CLAIM = _measured(
    "reliq_last_claim_timestamp_seconds",
    "Time of the last claim; of several processes, the earliest of these times.",
    merged="min",
)
REDIS_ERRORS = _measured(
    "reliq_redis_errors_total",
    "Failed calls of Redis in workers: Redis was `away`, or `refused` a command.",
    ("reason",),
)
RECONNECTS = _measured("reliq_redis_reconnects_total", "How often Redis answered a process again after an outage.")

OUTBOX_ROWS = _measured(
    "reliq_outbox_rows", "Rows of the outbox that wait for a relay, counted up to 100,000.", merged="max"
)
OUTBOX_OLDEST = _measured(
    "reliq_outbox_oldest_seconds",
    "Age of the oldest waiting row of the outbox; while the database fails, a lower bound.",
    merged="max",
)
OUTBOX_ERRORS = _measured(
    "reliq_outbox_database_errors_total", "Failed rounds of relays: the database was away or refused a command."
)

WORKERS = Spec("reliq_workers", "Running worker processes.")
RESTARTS = Spec("reliq_restarts_total", "Worker processes that ended and were replaced, by reason.", ("reason",))
BUILD = Spec("reliq_build_info", "1; the labels name the versions that run.", ("version", "python", "redis_py"))
CPU = Spec("process_cpu_seconds_total", "Processor time of a process of the worker.", ("process",))
MEMORY = Spec("process_resident_memory_bytes", "Memory of a process of the worker.", ("process",))
OPEN_FDS = Spec("process_open_fds", "Open files and connections of a process of the worker.", ("process",))
STARTED = Spec("process_start_time_seconds", "Start time of a process of the worker.", ("process",))

PUBLISH = Spec(
    "reliq_publish_seconds", "Duration of publish calls, including failed calls.", ("queue",), buckets=PUBLISH_BUCKETS
)
PUBLISHED = Spec("reliq_publish_messages_total", "Messages in publish calls, by outcome.", ("queue", "outcome"))

#: Every metric by its name. Only an application that uses `PublishMetrics` exports PUBLISH and PUBLISHED.
ALL: Mapping[str, Spec] = {
    spec.name: spec for spec in (*globals().values(), *COUNTED.values()) if isinstance(spec, Spec)
}
#: The metrics that are read from Redis for each queue.
QUEUES = [spec for spec in ALL.values() if spec.source == "queue"]
#: The metrics that worker processes measure, by name.
MEASURED = {name: spec for name, spec in ALL.items() if spec.source == "process"}
