"""
Who is compared: what to install, how to see that a queue is empty, and what each promises.

Versions are pinned, so that a figure says what it is of. No peer is imported here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import redis

from benchmarks.works import Tries, processes, tasks, threads
from reliq.bench.bench import KINDS

Backlog = Callable[[redis.Redis], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """
    One queue in the comparison.

    Attributes:
        module: its file in `peers`.
        requirements: what pip, or npm, installs for it; none means this interpreter.
        guarantee: what becomes of a message whose worker dies, in a few words.
        settings: what was set beside the defaults and what is tried.
        tries: the settings that it is tried with, for each kind of work that it does; the fastest is measured.
        backlog: counts what is not done yet, by one command a key.
        drained: how many messages are put into the queue to be drained.
        timed: the setting for lateness and pickup, where the fastest is not for work that comes now and then.
        lacks: steps that it has nothing for, with why.
        worker: the step that starts its worker.
        of: the peer whose other figures it shares, if only its worker is another.
        kind: `ours`, the `limit` that nothing can pass, or `theirs`.
        is_acked: whether a message is acked after its work, and comes back when its worker dies.
    """

    name: str
    module: str
    requirements: tuple[str, ...] = ()
    guarantee: str
    settings: str
    backlog: Backlog
    drained: int = 15_000
    tries: Tries = field(default_factory=dict)
    timed: str = ""
    lacks: dict[str, str] = field(default_factory=dict)
    worker: str = "work"
    of: str = ""
    kind: Literal["ours", "limit", "theirs"] = "theirs"
    is_acked: bool = True

    @property
    def is_node(self) -> bool:
        """Whether it runs on Node."""
        return self.module.endswith(".mjs")


def sizes(*commands: str) -> Backlog:
    """Return what adds up the answers of these commands."""

    def count(client: redis.Redis) -> int:
        answers: list[int] = [_asked(client, command) for command in commands]
        return sum(answers)

    return count


def _asked(client: redis.Redis, command: str) -> int:
    ask: Callable[..., int] = client.execute_command
    return ask(*command.split())


def _stream_backlog(client: redis.Redis) -> int:
    """Return what a consumer group has not read, and what it has read and not acked."""
    if not client.exists("taskiq"):
        return 0
    groups = client.xinfo_groups("taskiq")
    return sum(int(group["lag"] or 0) + int(group["pending"]) for group in groups)


RELIQ_BACKLOG = sizes(
    *(f"{command} {{reliq:work}}:{key}" for command, key in (("LLEN", "ready"), ("ZCARD", "unack"))),
    *(
        f"{command} {{reliq:note}}:{key}"
        for command, key in (("LLEN", "ready"), ("ZCARD", "unack"), ("ZCARD", "pending"))
    ),
)
RELIQ_GUARANTEE = (
    "at least once; a receipt on every ack; leases renewed apart from handlers; every message accounted for"
)
NO_BULK = "no bulk publish"

PEERS = (
    Peer(
        name="bare scripts",
        module="bare",
        kind="limit",
        is_acked=False,
        guarantee="those of reliq's scripts alone: no handler, no renewal",
        settings="one redis-py client, 100 messages a call, which sleeps until a due time; one by one is a bare SET, "
        "pickup an LPUSH to a client that waits in BLPOP",
        backlog=sizes(),
        drained=50_000,
        lacks={"memory": "the same as reliq"},
    ),
    Peer(
        name="reliq",
        module="reliq",
        kind="ours",
        guarantee=RELIQ_GUARANTEE,
        settings="plain handler",
        tries=threads(),
        backlog=RELIQ_BACKLOG,
        drained=100_000,
    ),
    Peer(
        name="reliq, async handler",
        module="reliq",
        kind="ours",
        guarantee=RELIQ_GUARANTEE,
        settings="async handler",
        tries=tasks(),
        backlog=RELIQ_BACKLOG,
        drained=100_000,
        worker="work_async",
        of="reliq",
    ),
    *(
        Peer(
            name="reliq, batch handler",
            module="reliq",
            kind="ours",
            guarantee=RELIQ_GUARANTEE,
            settings="plain handler with batch=100, linger=0.05",
            tries={"nothing": threads()["nothing"]},
            backlog=RELIQ_BACKLOG,
            drained=100_000,
            worker="work_batch",
            of="reliq",
        )
        for kind in KINDS
        if kind == "batch"
    ),
    Peer(
        name="dramatiq",
        module="dramatiq",
        requirements=("dramatiq[redis]==2.2.1", "hiredis"),
        guarantee="at least once; acked after the actor; a dead worker's messages come back by its heartbeat",
        settings="no middleware; looks for messages every 10 ms also when idle (its default is 1,000)",
        tries=threads(),
        backlog=sizes("HLEN dramatiq:default.msgs", "HLEN dramatiq:default.DQ.msgs"),
        lacks={"bulk": NO_BULK},
    ),
    Peer(
        name="taskiq (streams)",
        module="taskiq",
        requirements=("taskiq-redis==1.2.4", "hiredis", "uvloop"),
        guarantee="at least once; acked after the task, claimed from the dead after 10 minutes; entries stay in the stream",
        settings="RedisStreamBroker, which reads 100 at a time, uvloop, no result backend",
        tries=tasks(),
        backlog=_stream_backlog,
        drained=20_000,
        lacks={"bulk": NO_BULK, "late": "no delay in the broker (a scheduler process polls)", "delayed": "no delay"},
    ),
    Peer(
        name="streaq",
        module="streaq",
        requirements=("streaq==7.2.0", "hiredis", "uvloop"),
        guarantee="at least once; tasks of a dead worker are taken over after an idle time",
        settings="uvloop, results not kept, reads twice as many as run at once",
        tries=tasks(),
        backlog=sizes("XLEN streaq:bench:queues:normal", "ZCARD streaq:bench:queues:delayed:normal"),
        drained=20_000,
    ),
    Peer(
        name="SAQ",
        module="saq",
        requirements=("saq[redis,hiredis]==0.26.4", "hiredis", "typing_extensions"),
        guarantee="at least once with retries set; a sweep finds stuck jobs",
        settings="polls for due jobs every second (its least)",
        tries=tasks(),
        backlog=sizes("ZCARD saq:bench:incomplete"),
        drained=6000,
        lacks={"bulk": NO_BULK},
    ),
    Peer(
        name="arq",
        module="arq",
        requirements=("arq==0.28.0", "hiredis"),
        guarantee="at least once; a dead worker's job runs again after its time-out",
        settings="polls every 10 ms also when idle (its default is 500), results not kept",
        tries=tasks(),
        backlog=sizes("ZCARD arq:queue"),
        drained=5000,
        lacks={"bulk": NO_BULK},
    ),
    Peer(
        name="Celery",
        module="celery",
        requirements=("celery[redis]==5.7.0", "hiredis"),
        guarantee="at least once with late acks; redelivered after a visibility time-out of an hour",
        settings="acks_late, prefetch 64 each, results ignored, no rate limits, events, gossip or mingle; "
        "lateness and pickup with 16 threads",
        tries=threads("solo", "prefork"),
        timed="16 threads",
        backlog=sizes("LLEN celery", "HLEN unacked"),
        drained=6000,
        lacks={"bulk": NO_BULK},
    ),
    Peer(
        name="RQ",
        module="rq",
        requirements=("rq==3.0.0", "hiredis"),
        guarantee="a job of a dead worker is marked failed, and retried if retries are set",
        settings="SimpleWorker (no fork for each job), results not kept",
        tries=processes(),
        backlog=sizes("LLEN rq:queue:bench", "ZCARD rq:wip:bench", "ZCARD rq:scheduled:bench"),
        drained=3000,
    ),
    Peer(
        name="huey (no acks)",
        module="huey",
        is_acked=False,
        requirements=("huey[redis]==3.5.4", "hiredis"),
        guarantee="at most once: a task is popped before it runs, nothing is acked",
        settings="results not kept, scheduler every second (its least)",
        tries=threads(),
        backlog=sizes("LLEN huey.redis.bench", "ZCARD huey.schedule.bench"),
        drained=10_000,
        lacks={"bulk": NO_BULK},
    ),
    Peer(
        name="BullMQ (Python)",
        module="bullmq_python",
        requirements=("bullmq==3.4.4", "hiredis"),
        guarantee="at least once; a lock for each job, a stalled one comes back after 30 s",
        settings="removeOnComplete",
        tries=tasks(),
        backlog=sizes(
            "LLEN bull:bench:wait", "LLEN bull:bench:active", "ZCARD bull:bench:delayed", "ZCARD bull:bench:prioritized"
        ),
        drained=6000,
    ),
    Peer(
        name="BullMQ (Node)",
        module="bullmq.mjs",
        requirements=("bullmq@6.7.0", "ioredis@6.0.0"),
        guarantee="at least once; a lock for each job, a stalled one comes back after 30 s",
        settings="removeOnComplete",
        tries=tasks(),
        backlog=sizes(
            "LLEN bull:bench:wait", "LLEN bull:bench:active", "ZCARD bull:bench:delayed", "ZCARD bull:bench:prioritized"
        ),
        drained=60_000,
    ),
)
