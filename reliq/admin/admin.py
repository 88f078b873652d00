"""`ReadOnlyAdmin` shows the queues of one Redis to an operator; `Admin` changes them too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from reliq.admin.acl import AclActions
from reliq.admin.bulk import MessageActions
from reliq.admin.crons import CronActions, CronReads
from reliq.admin.doctor import DoctorReads
from reliq.admin.filters import ignore
from reliq.admin.keys import KeyActions, KeyReads
from reliq.admin.messages import MessageReads
from reliq.admin.publish import PublishActions, is_json
from reliq.admin.queues import QueueActions, QueueReads
from reliq.admin.shards import ShardActions
from reliq.admin.show import ShowReads
from reliq.admin.watch import HistoryReads
from reliq.admin.workers import WorkerActions, WorkerReads
from reliq.errors import BodyError

if TYPE_CHECKING:
    from reliq.admin.check import CheckReport, OnProgress
    from reliq.message import Duration, PublishOptions, Receipt


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
):
    """
    An operator's view of the queues of one Redis, and every change of them.

    A bulk method works in bounded steps while the queue is in use, and calls `on_step` after each with how many ids the
    step looked at, and the sum so far. When it is cut off, nothing is lost; called again, it goes on with the rest.
    """

    def check(
        self, queue: str, *, repair: bool = False, patience: Duration = 5.0, progress: OnProgress = ignore
    ) -> CheckReport:
        """
        Check every id of a queue for contradictions to the model.

        Args:
            repair: repair what can be without guessing; move the rest to the dead letters with a reason.
            patience: seconds for which a fault must last to be reported, in a layout of the Go original: a program in Go
                moves a message by several commands.
            progress: is called with the name of the part that is read, and how many ids were looked at so far.
        """
        from reliq.admin.check import check  # noqa: PLC0415  other methods need none of it

        return check(self._redis.queue(queue, mends=True), repair=repair, patience=patience, progress=progress)

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """Publish a body as it is, as `Queue.publish` does; without `raw` it must be JSON, or BodyError is raised."""
        target = self._redis.publisher(queue)
        if not raw and not is_json(body):
            raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
        return target.publish(body, **options)
