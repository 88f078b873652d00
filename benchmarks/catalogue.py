"""
The peers that are compared: what to install, how each is set, and what each promises.

Versions are pinned, so that a figure says what it is of. No peer is imported here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """
    One queue in the comparison.

    Attributes:
        module: its file in `peers`.
        backlog: Redis commands whose answers add up to the messages that are not done, or a function of a client.
        guarantee: what becomes of a message whose worker dies.
        settings: what is set besides the defaults.
        requirements: what pip, or npm, installs for it; none means this interpreter.
        slots: how many handlers run at once in a process.
        drained: how many messages are put into the queue to be drained.
        lacks: steps that it has nothing for.
        worker: the step that starts its worker.
    """

    name: str
    module: str
    backlog: tuple[str, ...] | Callable[[Any], int]
    guarantee: str
    settings: str
    requirements: tuple[str, ...] = ()
    slots: int = 16
    drained: int = 15_000
    lacks: tuple[str, ...] = ()
    worker: str = "work"


def count_taskiq(client: Any) -> int:
    """Return what the consumer group has not read, and what it has read and not acked."""
    if not client.exists("taskiq"):
        return 0
    return sum(int(group["lag"] or 0) + int(group["pending"]) for group in client.xinfo_groups("taskiq"))


RELIQ_BACKLOG = ("LLEN {reliq:work}:ready", "ZCARD {reliq:work}:unack")
RELIQ_GUARANTEE = "at least once; a receipt on every ack; leases renewed apart from handlers"

PEERS = (
    Peer(
        name="bare scripts",
        module="bare",
        backlog=(),
        guarantee="those of reliq's scripts alone: no handler, no renewal",
        settings="one client, 100 messages a call; one by one is a bare SET, pickup an LPUSH to a waiting BLPOP",
        drained=50_000,
        lacks=("late",),
    ),
    Peer(
        name="reliq",
        module="reliq",
        backlog=RELIQ_BACKLOG,
        guarantee=RELIQ_GUARANTEE,
        settings="plain handler",
        drained=100_000,
    ),
    Peer(
        name="reliq, async handler",
        module="reliq",
        backlog=RELIQ_BACKLOG,
        guarantee=RELIQ_GUARANTEE,
        settings="async handler",
        slots=64,
        drained=100_000,
        lacks=("one", "bulk", "late", "slow"),
        worker="work_async",
    ),
    Peer(
        name="dramatiq",
        module="dramatiq",
        backlog=("HLEN dramatiq:default.msgs",),
        guarantee="at least once; acked after the actor; a dead worker's messages come back by its heartbeat",
        settings="no middleware; looks for messages every 10 ms also when idle (its default is 1,000)",
        requirements=("dramatiq[redis]==2.2.1", "hiredis"),
        slots=32,
        lacks=("bulk",),
    ),
    Peer(
        name="taskiq (streams)",
        module="taskiq",
        backlog=count_taskiq,
        guarantee="at least once; acked after the task, claimed from the dead after 10 minutes",
        settings="RedisStreamBroker, which reads 100 at a time; uvloop; no result backend",
        requirements=("taskiq-redis==1.2.4", "hiredis", "uvloop"),
        slots=64,
        drained=20_000,
        lacks=("bulk", "late"),
    ),
    Peer(
        name="docket",
        module="docket",
        backlog=("XLEN bench:stream", "ZCARD bench:queue"),
        guarantee="at least once; acked after the task; redelivered after 5 minutes",
        settings="looks for due tasks every 250 ms, its default; results not kept",
        requirements=("pydocket==0.27.0", "hiredis"),
        slots=64,
        drained=5000,
        lacks=("bulk",),
    ),
    Peer(
        name="Celery",
        module="celery",
        backlog=("LLEN celery", "HLEN unacked"),
        guarantee="at least once with late acks; redelivered after a visibility time-out of an hour",
        settings="threads, acks_late, prefetch 64 each, results ignored, no rate limits, events, gossip or mingle",
        requirements=("celery[redis]==5.7.0", "hiredis"),
        drained=6000,
        lacks=("bulk",),
    ),
    Peer(
        name="RQ",
        module="rq",
        backlog=("LLEN rq:queue:bench", "ZCARD rq:wip:bench", "ZCARD rq:scheduled:bench"),
        guarantee="a job of a dead worker is marked failed, and retried if retries are set",
        settings="SimpleWorker (no fork for each job), results not kept; due times are whole seconds",
        requirements=("rq==3.0.0", "hiredis"),
        slots=1,
        drained=3000,
    ),
    Peer(
        name="BullMQ (Node)",
        module="bullmq.mjs",
        backlog=("LLEN bull:bench:wait", "LLEN bull:bench:active", "ZCARD bull:bench:delayed"),
        guarantee="at least once; a lock for each job, a stalled one comes back after 30 s",
        settings="removeOnComplete",
        requirements=("bullmq@6.7.0", "ioredis@6.0.0"),
        slots=128,
        drained=60_000,
    ),
)
