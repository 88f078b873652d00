"""`Admin`: everything the command line can see and do, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from reliq.admin import dead, remove
from reliq.admin.acl.rule import acl_roles, acl_rule
from reliq.admin.doctor.probe import examine
from reliq.admin.filters import EVERYTHING, Filter, LetterFilter, ignore
from reliq.admin.forget import forget
from reliq.admin.fsck.check import check
from reliq.admin.move import MoveResult, OnMoved, move
from reliq.admin.publish import publish
from reliq.admin.publish_file import FilePublished, OnBytes, OnError, publish_file
from reliq.admin.queue_admin import QueueAdmin
from reliq.admin.redrive import redrive
from reliq.admin.scripts import load_scripts
from reliq.admin.workers import ask_stacks, stacks_of
from reliq.control import rescheduling
from reliq.ids import check_id
from reliq.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from pathlib import Path

    from reliq.admin.acl.rule import AclRule
    from reliq.admin.doctor.facts import Finding
    from reliq.admin.fsck.reading import OnProgress
    from reliq.admin.fsck.report import CheckReport
    from reliq.admin.redrive import OnRedriven, RedriveOptions, RedriveResult
    from reliq.admin.remove import RemoveResult
    from reliq.message import CancelStatus, Duration, Receipt, RescheduleStatus
    from reliq.outgoing import PublishOptions
    from reliq.stacks import StackReport


class Admin(QueueAdmin):
    """
    All that an operator sees and does in one Redis.

    A bulk method works in bounded steps beside those who use the queue, and calls `on_step` after each: with how many
    ids the step looked at, and the sum so far. Cut off at any point nothing is lost; called again it goes on with the
    rest.
    """

    def check(
        self, queue: str, *, repair: bool = False, patience: Duration = 5.0, progress: OnProgress = ignore
    ) -> CheckReport:
        """
        Look at every id of a queue for what contradicts the model.

        Args:
            repair: set right what can be without guessing; move the rest to the dead letters with a reason.
            patience: seconds for which a fault must last to be told, in a layout of the Go original: a program in Go
                moves a message by several commands.
            progress: is called with the name of what is read, and how many ids were looked at so far.
        """
        return check(self._redis.queue(queue, mends=True), repair=repair, patience=patience, progress=progress)

    def forget(self, queue: str, *, letters: bool = False) -> int:
        """
        Remove a queue and its name in the registry; return how many dead letters went with it.

        Raises:
            ConfigurationError: it has messages, dead letters (without `letters`) or a worker, or was in use less than a
                minute ago.
        """
        return forget(self._redis.queue(queue), self.workers(), letters=letters)

    def ask_stacks(self, worker: str) -> None:
        """
        Ask a worker process where its handlers stand; `worker` has the answer, within 5 s.

        It holds files, lines and functions, and no values. A process whose interpreter is held does not answer.

        Raises:
            ConfigurationError: there is no such worker, or it has said nothing for 15 s.
        """
        ask_stacks(self._redis.session(), worker)

    def stacks(self, workers: Collection[str], *, for_seconds: Duration = 10.0) -> dict[str, StackReport]:
        """Ask worker processes where their handlers stand, and return what came within `for_seconds`, at most a minute."""
        return stacks_of(self._redis.session(), workers, seconds("for_seconds", for_seconds, most=60))

    def acl(
        self,
        roles: Sequence[str],
        queues: Sequence[str],
        *,
        user: str = "",
        without_eval: bool = False,
    ) -> AclRule:
        """
        Return the least ACL rule, in the form this server knows, for a user who plays `roles` on `queues`.

        Args:
            roles: of `producer`, `consumer`, `operator`, `viewer`, `exporter`.
            user: its name, by default reliq-ROLE.
            without_eval: whether it may run no scripts but those that `load_scripts` has loaded.
        """
        session, keys = self._redis.session(), [self.redis_keys(queue) for queue in queues]
        selectors = not session.version().is_before((7, 0))
        address = self._redis.connection.address
        return acl_rule(
            roles,
            keys,
            user=user,
            selectors=selectors,
            select=address.database != 0,
            in_cluster=address.is_cluster,
            without_eval=without_eval,
        )

    def load_scripts(self) -> list[str]:
        """
        Load the scripts of this version, for users who may not EVAL; return their names.

        Redis forgets them when it restarts, and a promoted replica may not have them; in a Cluster every node and every
        replica gets them.
        """
        return load_scripts(self._redis.session())

    def doctor(self, *, roles: Sequence[str] = (), queue: str = "reliq-doctor") -> list[Finding]:
        """
        Say whether this Redis is fit for queues: a finding for each thing that was looked at.

        Args:
            roles: check that this user has the rights of each role on the keys of `queue`, which need not exist.
        """
        known = acl_roles(roles)
        return examine(self._redis.session(), self._redis.connection.address, known, self.redis_keys(queue))

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """Publish a body as it is, as `Queue.publish` does; without `raw` it must be JSON, or BodyError is raised."""
        return publish(self._redis.publisher(queue), body, raw=raw, options=options)

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
        Publish each line of a file; called again it publishes no line twice. `on_step` gets the bytes that are done.

        At a malformed line `stop` raises BodyError and publishes nothing; `skip` publishes the others. The options are
        those of `Queue.publish`; ids are made from the file and the line's number.
        """
        target = self._redis.publisher(queue)
        goal = f"{target.keys.pending} at {self.place}"
        return publish_file(target, path, goal, options, raw=raw, on_error=on_error, on_step=on_step)

    def cancel(self, queue: str, ids: Sequence[str], *, tombstone: Duration | None = None) -> dict[str, CancelStatus]:
        """
        Cancel messages; return for each `cancelled`, `running` (its handler is told) or `not_found`.

        The id of a `cancelled` message is free at once; with `tombstone` a publish of it is refused for that many
        seconds. The id of a `running` one stays taken until its end, and for its `dedup` then.
        """
        return remove.cancel_each(self._redis.queue(queue), ids, tombstone)

    def cancel_where(
        self,
        queue: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        tombstone: Duration | None = None,
        on_step: remove.OnStep = ignore,
    ) -> RemoveResult:
        """Cancel the messages of a state that `where` means."""
        return remove.cancel(self._redis.queue(queue), state, where, on_step, tombstone=tombstone)

    def purge(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: remove.OnStep = ignore
    ) -> RemoveResult:
        """Delete the messages of a state, except dead, that `where` means."""
        return remove.purge(self._redis.queue(queue), state, where, on_step)

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
        source, target = self._redis.queue(queue), self._redis.other(queue, to)
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

    def delete_letters(self, queue: str, where: LetterFilter, *, on_step: dead.OnLetters = ignore) -> int:
        """Delete dead letters; return how many."""
        return dead.delete(self._redis.queue(queue), where, on_step)

    def reschedule(self, queue: str, id: str, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        known: RescheduleStatus = "not_found"
        for home in self._redis.queue(queue).homes(check_id(id)):
            known = home.run(rescheduling(home.keys, id, delay, at))[0]
            if known != "not_found":
                break
        return known
