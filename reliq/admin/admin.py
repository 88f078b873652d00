"""`ReadOnlyAdmin` shows the queues of one Redis to an operator; `Admin` changes them too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from reliq.admin import bulk, messages
from reliq.admin.acl import AclActions
from reliq.admin.bulk import MoveResult, OnMoved, move
from reliq.admin.crons import CronActions, CronReads
from reliq.admin.dead import DeadGroups, GroupBy, dead_groups, redrive
from reliq.admin.filters import EVERY_LETTER, EVERYTHING, Filter, LetterFilter, ignore
from reliq.admin.keys import KeyActions, KeyReads
from reliq.admin.messages import (
    Entry,
    MessagePage,
    OnLetters,
    OnLook,
    SearchResult,
    messages_of,
    page_of,
    search_in,
    size_of,
)
from reliq.admin.queues import QueueActions, QueueReads
from reliq.admin.shards import ShardActions
from reliq.admin.show import FinishedMessage, MessageView, Timeline, check_ends, ends_of, story_of, view_of
from reliq.admin.watch import HistoryReads
from reliq.admin.workers import WorkerActions, WorkerReads
from reliq.errors import BodyError
from reliq.keys import check_id
from reliq.queue import rescheduling

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from reliq.admin.bulk import RemoveResult
    from reliq.admin.check import CheckReport, OnProgress
    from reliq.admin.dead import OnRedriven, RedriveOptions, RedriveResult
    from reliq.admin.doctor import Finding
    from reliq.admin.publish import FilePublished, OnBytes, OnError
    from reliq.message import CancelStatus, Duration, Letter, PublishOptions, Receipt, RescheduleStatus


class ReadOnlyAdmin(QueueReads, HistoryReads, KeyReads, CronReads, WorkerReads):
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

    def show(self, queue: str, id: str) -> MessageView:
        """Return the state, content and worker of a message, or how it ended; raise when nothing is known of it."""
        return view_of(self._redis.queue(queue), id)

    def story(self, queue: str, id: str) -> Timeline:
        """Return the timeline of a message, the oldest event first, as far as it is known; raise when nothing is."""
        return story_of(self.show(queue, id))

    def ends(self, queue: str, *, kind: str | None = None, limit: int = 100) -> list[FinishedMessage]:
        """Return how the last messages ended, newest first: all that were not acked, or those of one kind."""
        check_ends(kind, limit)
        return ends_of(self._redis.queue(queue), kind=kind, limit=limit)

    def messages(
        self,
        queue: str,
        state: str,
        *,
        limit: int = 20,
        offset: int = 0,
        where: Filter = EVERYTHING,
        on_look: OnLook = ignore,
    ) -> list[Entry]:
        """Return messages of a state, the next one first; call `on_look` with how many ids each step looked at."""
        return messages_of(self._redis.queue(queue), state, where, limit=limit, offset=offset, on_look=on_look)

    def page(self, queue: str, state: str, *, after: str | None = None, limit: int = 50, key: str = "") -> MessagePage:
        """
        Return the next messages of a state, the next one first; of dead letters the newest first.

        The place is kept while the queue moves: a message that does not move is in one page only. A message that comes
        into the state before the place of the page is not returned. A message that moves back, as a renewed lease does, is
        returned again; so may be a message of a list when many were claimed meanwhile, and of garbage at any time.

        Args:
            after: the `after` of the page before; None for the first page.
            limit: the most messages, up to 200. Letters of large bodies are fewer, messages in garbage may be.
            key: of the state waiting, whose messages are paged key by key.
        """
        return page_of(self._redis.queue(queue), state, after, limit, key)

    def search(
        self,
        queue: str,
        state: str,
        where: Filter,
        *,
        after: str | None = None,
        limit: int = 50,
        for_seconds: float = 1.0,
    ) -> SearchResult:
        """
        Search a state for messages that `where` chooses, in the order of `page`, for a limited time.

        Args:
            where: a LetterFilter for the state dead; for the state waiting it names the key.
            after: the `after` of the search that this one continues.
            limit: the search ends when it has found this many messages, up to 200.
            for_seconds: the search ends after this time, at most a minute.
        """
        return search_in(self._redis.queue(queue), state, where, after, limit, for_seconds)

    def dead_groups(
        self,
        queue: str,
        *,
        where: LetterFilter = EVERY_LETTER,
        by: Sequence[GroupBy] = ("reason", "raised"),
        for_seconds: float = 1.0,
        without: Collection[int] = (),
    ) -> DeadGroups:
        """Group the newest dead letters by cause, reading for `for_seconds` up to 60; `without` leaves shards out."""
        return dead_groups(self._redis.queue(queue), where, by, for_seconds, without)

    def size(self, queue: str, state: str, *, key: str = "") -> int:
        """Return how many messages a state has; of the state waiting with `key`, how many of that key."""
        return size_of(self._redis.queue(queue), state, key)

    def count_messages(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: bulk.OnStep = ignore
    ) -> int:
        """Count the messages of a state, except dead, that `where` chooses."""
        return bulk.count(self._redis.queue(queue), state, where, on_step)

    def letters(
        self, queue: str, where: LetterFilter = EVERY_LETTER, *, without: Collection[int] = ()
    ) -> Iterator[Letter]:
        """Yield the dead letters that `where` chooses, oldest first; `without` leaves shards out, as `shards(queue).away`."""
        return messages.letters_of(self._redis.queue(queue), where, without)

    def count_letters(self, queue: str, where: LetterFilter = EVERY_LETTER, *, on_step: OnLetters = ignore) -> int:
        """Count the dead letters that `where` chooses."""
        return messages.count(self._redis.queue(queue), where, on_step)


class Admin(ReadOnlyAdmin, QueueActions, KeyActions, CronActions, WorkerActions, AclActions, ShardActions):
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

    def doctor(self, *, roles: Sequence[str] = (), queue: str = "reliq-doctor") -> list[Finding]:
        """
        Check whether this Redis is fit for queues; return a finding for each check.

        Args:
            roles: check that this user has the rights of each role on the keys of `queue`, which need not exist.
        """
        from reliq.admin.acl import check_roles  # noqa: PLC0415  other methods need none of it
        from reliq.admin.doctor import examine  # noqa: PLC0415

        wanted = check_roles(roles)
        return examine(self._redis.session(), self._redis.connection.address, wanted, self.redis_keys(queue))

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """Publish a body as it is, as `Queue.publish` does; without `raw` it must be JSON, or BodyError is raised."""
        from reliq.admin.publish import is_json  # noqa: PLC0415  other methods need none of it

        target = self._redis.publisher(queue)
        if not raw and not is_json(body):
            raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
        return target.publish(body, **options)

    def publish_lines(
        self,
        queue: str,
        path: Path,
        *,
        raw: bool = False,
        on_error: OnError = "stop",
        on_step: OnBytes = ignore,
        **options: Unpack[PublishOptions],
    ) -> FilePublished:
        """
        Publish each line of a file; called again, it publishes no line twice. `on_step` gets the bytes that are done.

        At a malformed line `stop` raises BodyError and publishes nothing; `skip` publishes the others. The options are
        those of `Queue.publish`; ids are made from the file and the line's number.
        """
        from reliq.admin.publish import LinesPublisher  # noqa: PLC0415  other methods need none of it

        target = self._redis.publisher(queue)
        goal = f"{target.keys.pending} at {self.place}"
        return LinesPublisher(target, path, goal, options, raw=raw).publish(on_error, on_step)

    def cancel(self, queue: str, ids: Sequence[str], *, tombstone: Duration | None = None) -> dict[str, CancelStatus]:
        """
        Cancel messages; return for each `cancelled`, `running` (its handler is notified) or `not_found`.

        The id of a `cancelled` message is free at once; with `tombstone` a publish of it is refused for that many
        seconds. The id of a `running` one stays taken until its end, and for its `dedup` then.
        """
        return bulk.cancel_each(self._redis.queue(queue), ids, tombstone)

    def cancel_where(
        self,
        queue: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        tombstone: Duration | None = None,
        on_step: bulk.OnStep = ignore,
    ) -> RemoveResult:
        """Cancel the messages of a state that `where` chooses."""
        return bulk.cancel(self._redis.queue(queue), state, where, on_step, tombstone=tombstone)

    def purge(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: bulk.OnStep = ignore
    ) -> RemoveResult:
        """Delete the messages of a state, except dead, that `where` chooses."""
        return bulk.purge(self._redis.queue(queue), state, where, on_step)

    def move(
        self,
        queue: str,
        to: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        limit: int | None = None,
        on_step: OnMoved = ignore,
    ) -> MoveResult:
        """Move messages of a state to another queue; raise for a move to a third queue that was cut off before."""
        source = self._redis.queue(queue)
        target = self._redis.other(queue, to)
        return move(source, target, self._redis.publisher(to), state, where, limit, on_step)

    def redrive(
        self,
        queue: str,
        where: LetterFilter,
        options: RedriveOptions,
        *,
        to: str | None = None,
        on_step: OnRedriven = ignore,
    ) -> RedriveResult:
        """Publish dead letters again, oldest first, in their queue or in the queue `to`."""
        if to is not None:
            self._redis.other(queue, to)
        return redrive(self._redis.queue(queue), where, options, self._redis.publisher(to or queue), on_step)

    def delete_letters(self, queue: str, where: LetterFilter, *, on_step: OnLetters = ignore) -> int:
        """Delete dead letters; return how many."""
        return messages.delete(self._redis.queue(queue), where, on_step)

    def reschedule(self, queue: str, id: str, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        status: RescheduleStatus = "not_found"
        for home in self._redis.queue(queue).homes(check_id(id)):
            status = home.run(rescheduling(home.keys, id, delay, at))[0]
            if status != "not_found":
                break
        return status
