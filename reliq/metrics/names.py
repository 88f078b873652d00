"""Every metric of reliq: its name, its labels and its meaning. No other module names one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

STATES = ("pending", "ready", "unack", "retry", "garbage", "dead")

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
CAUSES = ("nack", "lease")

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
#: Buckets in seconds: from 1 ms to 10 minutes for handlers, to an hour for the lag.
HANDLER_BUCKETS = _SHORT
LAG_BUCKETS = (*_SHORT, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric, by the name that is scraped."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names that its samples have."""
        return (
            tuple(self.name + end for end in ("_bucket", "_sum", "_count"))
            if self.kind == "histogram"
            else (self.name,)
        )


MESSAGES = Spec("reliq_messages", "gauge", "Messages in each state; `dead` are letters.", ("queue", "state"))
UNACK = Spec(
    "reliq_unack",
    "gauge",
    "Messages in unack: under a lease, or waiting after a nack. Exact up to 200, above estimated from 200.",
    ("queue", "kind"),
)
OLDEST = Spec(
    "reliq_oldest_seconds",
    "gauge",
    "How long ago the first message of a state was due; of unack, how long ago its lease or wait ended.",
    ("queue", "state"),
)
PAUSED = Spec("reliq_paused", "gauge", "1 while the queue is paused.", ("queue",))
SHARED = Spec(
    "reliq_shared",
    "gauge",
    "1 in a layout of the Go original: its programs may share the queue, and count nothing.",
    ("queue",),
)
COUNTED = {kind: Spec(f"reliq_{kind}_total", "counter", text, ("queue",)) for kind, text in TOTALS.items()}
RETRIED = Spec("reliq_retried_total", "counter", "Messages to be delivered again, by the cause.", ("queue", "cause"))

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
SCRAPE = Spec("reliq_redis_scrape_seconds", "gauge", "How long it took to ask Redis for this scrape.")

HANDLER = Spec("reliq_handler_seconds", "histogram", "How long handlers took.", ("queue", "outcome"))
LAG = Spec("reliq_lag_seconds", "histogram", "From the due time to the start of the handler.", ("queue",))
INFLIGHT = Spec("reliq_inflight", "gauge", "Messages in worker processes: running, or held for a slot.", ("phase",))
LONGEST = Spec("reliq_longest_running_seconds", "gauge", "For how long the oldest running handler has run.")
SLOTS = Spec("reliq_slots", "gauge", "Handlers that may run at once.")
SLOTS_HUNG = Spec("reliq_slots_hung", "gauge", "Slots lost to handlers that overran their time and cannot be ended.")
LOST = Spec("reliq_lost_total", "counter", "Answers that came too late: the lease was over.", ("queue",))
LATE = Spec("reliq_renewals_late_total", "counter", "Renewals of leases that came late: a process was held up.")
LAST_CLAIM = Spec(
    "reliq_last_claim_timestamp_seconds", "gauge", "When the process that is behind most completed a claim round."
)

WORKERS = Spec("reliq_workers", "gauge", "Worker processes that run.")
RESTARTS = Spec("reliq_restarts_total", "counter", "Worker processes that ended and were replaced.", ("reason",))
BUILD = Spec("reliq_build_info", "gauge", "1; the labels name the versions that run.", ("version", "python"))

_OF_QUEUES = (MESSAGES, UNACK, OLDEST, PAUSED, SHARED, *COUNTED.values(), RETRIED, LEFT_OUT)
_OF_REDIS = (
    REDIS_UP,
    REDIS_MEMORY,
    REDIS_MEMORY_LIMIT,
    REDIS_CLIENTS,
    REDIS_EVICTED,
    REDIS_EVICTION,
    REDIS_AOF,
    SCRAPE,
)
_OF_PROCESSES = (HANDLER, LAG, INFLIGHT, LONGEST, SLOTS, SLOTS_HUNG, LOST, LATE, LAST_CLAIM)
_OF_WORKERS = (WORKERS, RESTARTS, BUILD)

#: Every metric by its name.
ALL: Mapping[str, Spec] = {one.name: one for one in (*_OF_QUEUES, *_OF_REDIS, *_OF_PROCESSES, *_OF_WORKERS)}
