"""`ReadOnlyAdmin` shows the queues of one Redis to an operator; `Admin` changes them too."""

from __future__ import annotations

from reliq.admin.acl import AclActions
from reliq.admin.bulk import MessageActions
from reliq.admin.check import CheckActions
from reliq.admin.crons import CronActions, CronReads
from reliq.admin.doctor import DoctorReads
from reliq.admin.keys import KeyActions, KeyReads
from reliq.admin.messages import MessageReads
from reliq.admin.publish import PublishActions
from reliq.admin.queues import QueueActions, QueueReads
from reliq.admin.shards import ShardActions
from reliq.admin.show import ShowReads
from reliq.admin.watch import HistoryReads
from reliq.admin.workers import WorkerActions, WorkerReads


class ReadOnlyAdmin(QueueReads, HistoryReads, MessageReads, ShowReads, KeyReads, CronReads, WorkerReads, DoctorReads):
    """
    An operator's view of the queues of one Redis, which changes nothing there.

    A method that takes a queue raises ConfigurationError when there is no such queue, and for an argument that is not
    allowed. Any method raises RedisUnavailableError or RedisRefusedError. Threads may share it.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the keys of its queues are spelled.
        shard: look at this shard of a sharded queue alone; by default at all of them as one queue.

    Raises:
        ConfigurationError: no Redis is named, or reliq cannot use it.
    """


class Admin(
    ReadOnlyAdmin,
    QueueActions,
    MessageActions,
    KeyActions,
    CronActions,
    WorkerActions,
    AclActions,
    ShardActions,
    PublishActions,
    CheckActions,
):
    """
    An operator's view of the queues of one Redis, and every change of them.

    A bulk method works in bounded steps while the queue is in use, and calls `on_step` after each with how many ids the
    step looked at, and the sum so far. When it is cut off, nothing is lost; called again, it goes on with the rest.
    """
