"""`ReadOnlyAdmin`: everything that an operator sees of queues, for programs; it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, Unpack

from reliq.admin import bulk, messages
from reliq.admin.acl import acl_roles, acl_rule, load_scripts
from reliq.admin.bulk import MoveResult, OnMoved, move
from reliq.admin.check import check
from reliq.admin.crons import CronView, crons_of, forget_cron, pause_cron, resume_cron, run_cron
from reliq.admin.dead import DeadGroups, GroupBy, dead_groups, redrive
from reliq.admin.doctor import examine
from reliq.admin.filters import EVERY_LETTER, EVERYTHING, Filter, LetterFilter, ignore
from reliq.admin.keys import (
    KeyPage,
    KeysView,
    key_of,
    key_page_of,
    keys_of,
    limits_of,
    pause_key,
    resume_key,
    set_limits,
)
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
from reliq.admin.publish import FilePublished, OnBytes, OnError, publish, publish_file
from reliq.admin.queues import (
    Account,
    MinuteStats,
    Overview,
    Watcher,
    account_of,
    accounts_of,
    chosen,
    forget,
    histories_of,
    overview,
    overview_by_notes,
    with_rates,
)
from reliq.admin.session import Sessions
from reliq.admin.shards import Resharder, shards_of
from reliq.admin.show import FinishedMessage, MessageView, Timeline, check_ends, ends_of, story_of, view_of
from reliq.admin.workers import Running, WorkerView, ask_stacks, running_in, stacks_of, worker_view, workers_alive
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout, check_id
from reliq.metrics.snapshot import ShardMaps
from reliq.queue import pausing, rescheduling
from reliq.redis import commands
from reliq.redis.commands import of_every_shard
from reliq.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from reliq.admin.acl import AclRule
    from reliq.admin.bulk import RemoveResult
    from reliq.admin.check import CheckReport
    from reliq.admin.check_state import OnProgress
    from reliq.admin.dead import OnRedriven, RedriveOptions, RedriveResult
    from reliq.admin.doctor import Finding
    from reliq.admin.resharding import PendingMigration
    from reliq.admin.shards import ShardsView
    from reliq.lua.transitions import KeyQueue
    from reliq.message import CancelStatus, Duration, Letter, Pause, PublishOptions, Receipt, RescheduleStatus
    from reliq.redis.commands import StackReport, Worker
    from reliq.redis.url import Target
    from reliq.settings import Limits


class ReadOnlyAdmin:
    """
    An operator's view of one Redis, which changes nothing there.

    A method that takes a queue raises ConfigurationError when there is no such queue, and for an argument that is not
    allowed. Any method raises RedisUnavailableError or RedisRefusedError. Threads may share it.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the keys of its queues are spelled.
        shard: look at this shard of a sharded queue alone; by default at all of them as one queue.

    Raises:
        ConfigurationError: no Redis is named, or reliq cannot use it.
    """

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ, shard: int | None = None) -> None:
        self._redis = Sessions(url, layout, shard)

    @property
    def place(self) -> str:
        """The URL without its password, or the kind of client."""
        return self._redis.connection.name

    def redis_keys(self, queue: str) -> Keys:
        """Return the Redis keys of a queue; raise ConfigurationError for a name that is not allowed."""
        return self._redis.keys(queue)

    def in_layout(self, layout: Layout) -> Self:
        """Return the same for queues whose keys are spelled otherwise."""
        return type(self)(self._redis.target, layout=layout, shard=self._redis.shard)

    def in_shard(self, shard: int | None) -> Self:
        """Return the same for one shard of its queues; None for all of them as one queue."""
        return type(self)(self._redis.target, layout=self._redis.layout, shard=shard)

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        self._redis.connection.close()

    def queues(self, names: Sequence[str] = (), *, scan: bool = False, interval: Duration = 0.5) -> Overview:
        """
        Return the queues named, or all of the registry: what is where, how late, how fast, who works.

        Args:
            names: in this admin's layout.
            scan: also find queues that no registry names, in any layout, by a walk over all keys in short steps.
            interval: seconds over which the rates are counted; 0 for no rates and no wait.
        """
        over, session = seconds("interval", interval, most=60), self._redis.session()
        queues, maps = chosen(session, self._named(names), scan=scan), self._maps()
        return with_rates(session, queues, maps, over) if over else overview(session, queues, maps)

    def overview(self, names: Sequence[str] = ()) -> Overview:
        """Return the queues named, or all of the registry, at once: the rates are those since a worker's last note."""
        session = self._redis.session()
        return overview_by_notes(session, chosen(session, self._named(names)), self._maps())

    def history(self, queue: str, *, minutes: int = 60) -> list[MinuteStats]:
        """Return a queue's last minutes, up to 180, the oldest first, as its workers noted them."""
        session = self._redis.queue(queue)
        return histories_of(session, [session.keys], minutes, self._maps())[session.keys]

    def histories(self, names: Sequence[str] = (), *, minutes: int = 60) -> dict[str, list[MinuteStats]]:
        """Return the last minutes of the queues named, or of all in the registry, each by its queue's name."""
        session = self._redis.session()
        queues = chosen(session, [self.redis_keys(name) for name in names]).queues
        return {keys.name: told for keys, told in histories_of(session, queues, minutes, self._maps()).items()}

    def watch(self, names: Sequence[str] = ()) -> Watcher:
        """Return a watcher of the queues named, or of all in the registry."""
        named, session = self._named(names), self._redis.session()
        return Watcher(session, lambda: chosen(session, named), self._maps())

    def crons(self, names: Sequence[str] = ()) -> list[CronView]:
        """Return the periodic entries of the queues named, or of all in the registry, by name."""
        session = self._redis.session()
        return crons_of(session, chosen(session, [self._redis.queue(name).keys for name in names]).queues)

    def workers(self) -> list[Worker]:
        """Return the record of every worker process that is alive, at most 5 s old."""
        return workers_alive(self._redis.session())

    def worker(self, id: str) -> WorkerView:
        """Return one worker process, and the stacks of its handlers when `Admin.ask_stacks` asked for them."""
        return worker_view(self._redis.session(), id)

    def running(self, queue: str, *, longer_than: Duration = 0.0) -> list[Running]:
        """Return the handlers that have run for `longer_than` seconds, the longest running first."""
        least = seconds("longer_than", longer_than)
        session = self._redis.queue(queue)
        rows = running_in(workers_alive(session), queue, least)
        return [row for row in rows if session.has(row.id)]

    def account(self, queue: str) -> Account:
        """Return what came in, how it ended and what is alive, at one moment."""
        return account_of(self._redis.queue(queue))

    def accounts(self, names: Sequence[str] = ()) -> tuple[list[Account], Mapping[str, str]]:
        """Return the account of each queue named, or of all of the registry, and which cannot be read, with the reason."""
        session = self._redis.session()
        return accounts_of(session, chosen(session, [self.redis_keys(name) for name in names]).queues, self._maps())

    def show(self, queue: str, id: str) -> MessageView:
        """Return where a message is, what it holds and who has it, or how it ended; raise when nothing is known of it."""
        return view_of(self._redis.queue(queue), id)

    def story(self, queue: str, id: str) -> Timeline:
        """Return what happened to a message, the oldest first, as far as it is known; raise when nothing is."""
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
        """Return messages of a state, what comes first first; call `on_look` with how many ids each step looked at."""
        return messages_of(self._redis.queue(queue), state, where, limit=limit, offset=offset, on_look=on_look)

    def keys(self, queue: str, *, limit: int = 20) -> KeysView:
        """Return the keys of a queue with most messages that wait, and how many keys and messages do what."""
        return keys_of(self._redis.queue(queue), limit)

    def key(self, queue: str, key: str) -> KeyQueue:
        """Return how many messages of one key wait and run, and why they wait."""
        return key_of(self._redis.queue(queue), key)

    def key_page(self, queue: str, *, after: str | None = None, limit: int = 100) -> KeyPage:
        """
        Return some of all keys that have messages which wait or run, or that sleep; in no order.

        A key that stays as it is is seen, and may be seen again.

        Args:
            after: the `after` of the page before; None for the first page.
            limit: about so many keys, up to 200.
        """
        return key_page_of(self._redis.queue(queue), after, limit)

    def limits(self, queue: str) -> Limits:
        """Return the limits of a queue as they hold now: those that a worker declared, or that were set since."""
        return limits_of(self._redis.queue(queue))

    def page(self, queue: str, state: str, *, after: str | None = None, limit: int = 50, key: str = "") -> MessagePage:
        """
        Return the next messages of a state, what comes first first, of dead letters the newest.

        The place is kept while the queue moves: a message that stays where it is is in one page alone. One that comes
        into the state before the place of the page is not seen; one that moves back, as a renewed lease does, is seen
        again; one in a list may be seen again when many were claimed meanwhile, and in garbage at any time.

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
        Look through a state for messages that `where` means, in the order of `page`, for a moment.

        Args:
            where: a LetterFilter for the state dead; for the state waiting it says the key.
            after: the `after` of the search that this one goes on with.
            limit: the search ends when it has found so many, up to 200.
            for_seconds: and after this time, at most a minute.
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
        """Group the newest dead letters, but for the shards `without`, by why they died, looking for `for_seconds` up to 60."""
        return dead_groups(self._redis.queue(queue), where, by, for_seconds, without)

    def size(self, queue: str, state: str, *, key: str = "") -> int:
        """Return how many messages a state has; of the state waiting with `key`, how many of that key."""
        return size_of(self._redis.queue(queue), state, key)

    def count_messages(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: bulk.OnStep = ignore
    ) -> int:
        """Count the messages of a state, except dead, that `where` means."""
        return bulk.count(self._redis.queue(queue), state, where, on_step)

    def letters(
        self, queue: str, where: LetterFilter = EVERY_LETTER, *, without: Collection[int] = ()
    ) -> Iterator[Letter]:
        """Yield the dead letters that `where` means, oldest first; `without` leaves shards out, such as `shards(queue).away`."""
        return messages.letters_of(self._redis.queue(queue), where, without)

    def count_letters(self, queue: str, where: LetterFilter = EVERY_LETTER, *, on_step: OnLetters = ignore) -> int:
        """Count the dead letters that `where` means."""
        return messages.count(self._redis.queue(queue), where, on_step)

    def paused(self, queue: str) -> Pause | None:
        """Return who paused a queue, when and why; None when it is not paused."""
        return self._redis.session().run(commands.paused(self.redis_keys(queue)))

    def _named(self, names: Sequence[str]) -> list[Keys]:
        """Return the keys of the queues named, each of which must be known; none of all queues."""
        if self._redis.shard is not None and not names:
            raise ConfigurationError("name the queue whose shard is meant")
        return [self._redis.queue(name).keys for name in names]

    def _maps(self) -> ShardMaps:
        return ShardMaps(whole=self._redis.shard is None)


class QueueAdmin(ReadOnlyAdmin):
    """An operator's changes of a queue as a whole: its pause, shards and periodic entries."""

    def pause(self, queue: str, *, reason: str = "", for_: Duration | None = None, by: str = "") -> None:
        """
        Have consumers stop claiming within a second, for `for_` seconds or until `resume`; running handlers finish.

        Args:
            by: who pauses it; by default user@host of this process.

        Raises:
            RedisUnavailableError: Redis is away; of a queue with several shards it says which are paused all the same.
        """
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([pausing(part.keys, reason, for_, by) for part in parts])
        of_every_shard(queue, "paused", answers)

    def resume(self, queue: str) -> bool:
        """Have consumers claim again; return whether the queue was paused, or put to sleep by `RateLimited`."""
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([request for part in parts for request in commands.resume_queue(part.keys)])
        pauses, sleeps = (of_every_shard(queue, "resumed", answers[at::4]) for at in (0, 1))
        return any(pauses) or any(sleeps)

    def set_limits(
        self,
        queue: str,
        *,
        ordered: bool | None = None,
        per_key: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
        key_rate: str | None = None,
        key_burst: int | None = None,
        concurrency: int | None = None,
        key_weights: Mapping[str, int] | None = None,
        clear: Sequence[str] = (),
    ) -> Limits:
        """
        Change limits while the queue is in use, within a second, for many keys within seconds; return all that hold then.

        They hold until a worker starts whose code declares other limits than the worker before it. A new rate has its usual
        burst unless `burst` says another.

        Args:
            ordered, per_key, rate, burst, key_rate, key_burst, concurrency: as those of `Queue`; None leaves one as it is.
            key_weights: the weights of some keys; those of others stay.
            clear: names of limits that are to hold no more; of one weight `weight:KEY`, of all `key_weights`.

        Raises:
            ConfigurationError: one is not allowed, or the queue can have none, as one of Go's or of several shards.
        """
        changes = {
            "ordered": ordered,
            "per_key": per_key,
            "rate": rate,
            "burst": burst,
            "key_rate": key_rate,
            "key_burst": key_burst,
            "concurrency": concurrency,
            "key_weights": key_weights,
        }
        return set_limits(self._redis.queue(queue), self._redis.publisher(queue), changes, clear)

    def pause_key(self, queue: str, key: str, *, for_: Duration | None = None) -> None:
        """Have no message of one key start, for `for_` seconds or until `resume_key`; what runs goes on."""
        pause_key(self._redis.queue(queue), key, for_)

    def resume_key(self, queue: str, key: str) -> bool:
        """Have a key served again that is paused, or that a handler or its rate put to sleep; return whether it was."""
        return resume_key(self._redis.queue(queue), key)

    def shards(self, queue: str) -> ShardsView:
        """Return how many shards a queue has, and the counts of each that answers."""
        return shards_of(self._redis.queue(queue))

    def resize(self, queue: str, number: int) -> None:
        """
        Begin to have `number` shards, or go on with a change that was cut off; workers end it, or `finish_resize`.

        Publishers and workers go on meanwhile. A chosen id is accepted once, whichever number a publisher knows of.

        Raises:
            ConfigurationError: it is no power of two, or an earlier change is not finished.
        """
        Resharder(self._redis.queue(queue)).resize(number)

    def finish_resize(self, queue: str) -> PendingMigration:
        """End a change of the number of shards, and return nothing; or what only the earlier number finds."""
        return Resharder(self._redis.queue(queue)).finish()

    def run_cron(self, queue: str, name: str, *, wait: Duration = 15.0) -> str:
        """
        Have a worker publish the message of a periodic entry at once, in its pause too; return the message's id.

        Raises:
            ConfigurationError: the queue has no such entry, no worker has it, or none has published within `wait`.
        """
        return run_cron(self._redis.queue(queue), name, seconds("wait", wait))

    def pause_cron(self, queue: str, name: str, *, reason: str = "", by: str = "") -> None:
        """Have the ticks of a periodic entry skipped, and counted, until `resume_cron`; `by` is user@host by default."""
        pause_cron(self._redis.queue(queue), name, reason, by)

    def resume_cron(self, queue: str, name: str) -> bool:
        """Have the next tick of a periodic entry published; return whether it was paused."""
        return resume_cron(self._redis.queue(queue), name)

    def forget_cron(self, queue: str, name: str) -> None:
        """Remove what Redis knows of a periodic entry that is no more in the code; raise while a worker has it."""
        forget_cron(self._redis.queue(queue), name)


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
        """Cancel the messages of a state that `where` means."""
        return bulk.cancel(self._redis.queue(queue), state, where, on_step, tombstone=tombstone)

    def purge(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: bulk.OnStep = ignore
    ) -> RemoveResult:
        """Delete the messages of a state, except dead, that `where` means."""
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

    def delete_letters(self, queue: str, where: LetterFilter, *, on_step: OnLetters = ignore) -> int:
        """Delete dead letters; return how many."""
        return messages.delete(self._redis.queue(queue), where, on_step)

    def reschedule(self, queue: str, id: str, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        known: RescheduleStatus = "not_found"
        for home in self._redis.queue(queue).homes(check_id(id)):
            known = home.run(rescheduling(home.keys, id, delay, at))[0]
            if known != "not_found":
                break
        return known
