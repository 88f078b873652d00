"""`ReadOnlyAdmin` reads the queues of one Redis for an operator; `Admin` also changes them."""

from __future__ import annotations

from reliq.admin.acl import AclActions
from reliq.admin.bulk import MessageActions
from reliq.admin.check import CheckActions
from reliq.admin.crons import CronActions, CronReads
from reliq.admin.doctor import DoctorReads
from reliq.admin.keys import KeyActions, KeyReads
from reliq.admin.messages import MessageReads
from reliq.admin.queues import QueueActions, QueueReads
from reliq.admin.show import ShowReads
from reliq.admin.watch import HistoryReads
from reliq.admin.workers import WorkerActions, WorkerReads


class ReadOnlyAdmin(QueueReads, HistoryReads, MessageReads, ShowReads, KeyReads, CronReads, WorkerReads, DoctorReads):
    """
    An operator's view of the queues of one Redis, without the methods that change them.

    A method with a queue argument raises ConfigurationError for an unknown queue or an argument that is not allowed.
    Every method raises RedisUnavailableError if Redis does not answer, and RedisRefusedError if Redis refuses a
    command. Threads may share an instance.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the Redis keys of the queues are spelled.
        shard: number of the only shard to read; None to read all shards of a queue together.

    Raises:
        ConfigurationError: no Redis URL is set, or reliq cannot use this Redis.
    """


class Admin(
    ReadOnlyAdmin, QueueActions, MessageActions, KeyActions, CronActions, WorkerActions, AclActions, CheckActions
):
    """
    An operator's view of the queues of one Redis, with the methods that change them.

    A bulk method works in bounded steps, so it can run while the queue is in use. After each step, it calls `on_step`
    with the number of ids that the step read, and with the result of all steps so far. An interrupted bulk method loses
    no message; call it again to process the remaining messages.
    """
