"""`ReadOnlyAdmin` shows the queues of one Redis to an operator; `Admin` changes them too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Unpack

from reliq.admin import bulk, calls, messages
from reliq.admin.acl import acl_roles, acl_rule, load_scripts
from reliq.admin.bulk import MoveResult, OnMoved, move
from reliq.admin.check import check
from reliq.admin.crons import CronView, cron_state, crons_of
from reliq.admin.dead import DeadGroups, GroupBy, dead_groups, redrive
from reliq.admin.doctor import examine
from reliq.admin.filters import EVERY_LETTER, EVERYTHING, Filter, LetterFilter, ignore
from reliq.admin.keys import PAGE_KEYS, KeyPage, KeysView, key_page_of, read_limits, set_limits
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
from reliq.admin.publish import FilePublished, LinesPublisher, OnBytes, OnError, is_json
from reliq.admin.queues import (
    Account,
    MinuteStats,
    Overview,
    Watcher,
    accounts_of,
    balance,
    chosen,
    forget,
    histories_of,
    overview,
    overview_by_notes,
    with_rates,
)
from reliq.admin.resharding import PendingMigration, ShardChange, shards_of
from reliq.admin.session import AdminBase
from reliq.admin.show import FinishedMessage, MessageView, Timeline, check_ends, ends_of, story_of, view_of
from reliq.admin.workers import Running, WorkerView, running_in, workers_alive
from reliq.errors import BodyError, ConfigurationError
from reliq.keys import check_id, run_id
from reliq.lua import transitions
from reliq.message import Counts
from reliq.metrics.crons import UNSERVED_SECONDS
from reliq.queue import pause_by, pausing, rescheduling
from reliq.redis import commands
from reliq.redis.commands import answered, of_every_shard
from reliq.settings import check_int, milliseconds, seconds
from reliq.text import shell_command
from reliq.wire_format import check_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from reliq.admin.acl import AclRule
    from reliq.admin.bulk import RemoveResult
    from reliq.admin.check import CheckReport, OnProgress
    from reliq.admin.dead import OnRedriven, RedriveOptions, RedriveResult
    from reliq.admin.doctor import Finding
    from reliq.admin.resharding import ShardsView
    from reliq.lua.transitions import KeyQueue
    from reliq.message import CancelStatus, Duration, Letter, Pause, PublishOptions, Receipt, RescheduleStatus
    from reliq.redis.commands import Call, StackReport, Worker
    from reliq.settings import Limits

#: A run that was asked for is polled this often until a worker has published it.
RUN_POLL_SECONDS = 0.1
#: A wait for stacks polls this often.
STACK_POLL_SECONDS = 0.2
#: One call of a resume counts at most this many skipped ticks.
TICKS_TOGETHER = 100_000


class ReadOnlyAdmin(AdminBase):
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

    def queues(self, names: Sequence[str] = (), *, scan: bool = False, interval: Duration = 0.5) -> Overview:
        """
        Return the queues named, or all of the registry, with their counts, lateness, rates and workers.

        Args:
            names: in this admin's layout.
            scan: also find queues that no registry names, in any layout, by a walk over all keys in short steps.
            interval: seconds over which the rates are counted; 0 for no rates and no wait.
        """
        over = seconds("interval", interval, most=60)
        session = self._redis.session()
        queues = chosen(session, self._named(names), scan=scan)
        return with_rates(session, queues, self._maps(), over) if over else overview(session, queues, self._maps())

    def overview(self, names: Sequence[str] = ()) -> Overview:
        """Return the queues named, or all of the registry, at once; rates are those since a note of about a minute ago."""
        session = self._redis.session()
        return overview_by_notes(session, chosen(session, self._named(names)), self._maps())

    def history(self, queue: str, *, minutes: int = 60) -> list[MinuteStats]:
        """Return the last minutes of a queue, up to 180, the oldest first, as its workers noted them."""
        session = self._redis.queue(queue)
        return histories_of(session, [session.keys], minutes, self._maps())[session.keys]

    def histories(self, names: Sequence[str] = (), *, minutes: int = 60) -> dict[str, list[MinuteStats]]:
        """Return the last minutes of the queues named, or of all in the registry, by the queue's name."""
        session = self._redis.session()
        queues = chosen(session, [self.redis_keys(name) for name in names]).queues
        histories = histories_of(session, queues, minutes, self._maps())
        return {keys.name: history for keys, history in histories.items()}

    def watch(self, names: Sequence[str] = ()) -> Watcher:
        """Return a watcher of the queues named, or of all in the registry."""
        named = self._named(names)
        session = self._redis.session()
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
        requests = [*calls.worker_records([id]), *calls.asked_stacks(id)]
        record, waits_ms, report, is_known = self._redis.session().read_each(requests, None)
        if record is None and not is_known:
            raise ConfigurationError(
                f"no worker {id[:40]!r} was alive within the last hour; `reliq workers` lists them"
            )
        return WorkerView(id, record, None if waits_ms is None else waits_ms / 1000, report)

    def running(self, queue: str, *, longer_than: Duration = 0.0) -> list[Running]:
        """Return the handlers of a queue that have run for `longer_than` seconds, the longest running first."""
        least = seconds("longer_than", longer_than)
        session = self._redis.queue(queue)
        rows = running_in(workers_alive(session), queue, least)
        return [row for row in rows if session.has(row.id)]

    def account(self, queue: str) -> Account:
        """Return how many messages came in, ended and are alive: at one moment in each shard."""
        session = self._redis.queue(queue)
        answers = session.try_all([transitions.counts(keys) for keys in session.counted])
        return balance(session.keys, Counts.sum(*answered(answers)))

    def accounts(self, names: Sequence[str] = ()) -> tuple[list[Account], Mapping[str, str]]:
        """Return the account of each queue named, or of all in the registry, and the unreadable ones with the reason."""
        session = self._redis.session()
        return accounts_of(session, chosen(session, [self.redis_keys(name) for name in names]).queues, self._maps())

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

    def keys(self, queue: str, *, limit: int = 20) -> KeysView:
        """Return the keys of a queue with most waiting messages, and how many keys and messages are in which state."""
        session = self._redis.queue(queue)
        most = check_int("limit", limit, least=1, most=PAGE_KEYS)
        requests: list[Call[Any]] = [transitions.counts(session.keys), transitions.key_queues(session.keys, most=most)]
        counts, queues = session.run_all(requests)
        return KeysView(
            queues.largest,
            counts.waiting,
            queues.in_turn,
            queues.asleep,
            queues.running,
            queues.is_full,
            asleep_until=queues.asleep_until,
        )

    def key(self, queue: str, key: str) -> KeyQueue:
        """Return how many messages of one key wait and run, and why they wait."""
        session = self._redis.queue(queue)
        return session.run(transitions.key_queues(session.keys, of=[check_key(key)])).largest[0]

    def key_page(self, queue: str, *, after: str | None = None, limit: int = 100) -> KeyPage:
        """
        Return a page of the keys that have waiting or running messages, or that sleep; in no order.

        A key that does not change while you page is in a page, and may be in several.

        Args:
            after: the `after` of the page before; None for the first page.
            limit: about so many keys, up to 200.
        """
        return key_page_of(self._redis.queue(queue), after, limit)

    def limits(self, queue: str) -> Limits:
        """Return the limits of a queue as they hold now: those that a worker declared, or that were set since."""
        session = self._redis.queue(queue)
        stored = session.run(calls.limit_fields(session.keys))
        return read_limits(queue, stored)

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

    def paused(self, queue: str) -> Pause | None:
        """Return who paused a queue, when and why; None when it is not paused."""
        return self._redis.session().run(calls.paused(self.redis_keys(queue)))


class Admin(ReadOnlyAdmin):
    """
    An operator's view of the queues of one Redis, and every change of them.

    A bulk method works in bounded steps while the queue is in use, and calls `on_step` after each with how many ids the
    step looked at, and the sum so far. When it is cut off, nothing is lost; called again, it goes on with the rest.
    """

    def pause(self, queue: str, *, reason: str = "", for_: Duration | None = None, by: str = "") -> None:
        """
        Have consumers stop claiming within a second, for `for_` seconds or until `resume`; running handlers finish.

        Args:
            by: who pauses it; by default user@host of this process.

        Raises:
            RedisUnavailableError: Redis is away; of a queue with several shards the error names those that are paused.
        """
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([pausing(part.keys, reason, for_, by) for part in parts])
        of_every_shard(queue, "paused", answers)

    def resume(self, queue: str) -> bool:
        """Have consumers claim again; return whether the queue was paused, or put to sleep by `RateLimited`."""
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([request for part in parts for request in commands.resume_queue(part.keys)])
        pauses = of_every_shard(queue, "resumed", answers[0::4])
        sleeps = of_every_shard(queue, "resumed", answers[1::4])
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

        They hold until a worker starts whose code declares other limits than the worker before it. A new rate has its
        default burst unless `burst` is given.

        Args:
            ordered, per_key, rate, burst, key_rate, key_burst, concurrency: as in `Queue`; None leaves a limit as it is.
            key_weights: the weights of some keys; those of others stay.
            clear: names of limits to remove; `weight:KEY` for one weight, `key_weights` for all of them.

        Raises:
            ConfigurationError: a limit is not allowed, or the queue can have none: it has the Go layout or several shards.
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
        """Have no message of one key start, for `for_` seconds or until `resume_key`; running messages go on."""
        session = self._redis.queue(queue)
        if session.keys.bare or session.is_sharded:
            why = "has several shards" if session.is_sharded else "has the Go layout"
            raise ConfigurationError(
                f"queue {queue!r} {why}, and so no keys; "
                f"`{shell_command('pause', queue, layout=session.keys.layout)}` pauses all of it"
            )
        for_ms = None if for_ is None else milliseconds(seconds("for_", for_, least=0.001))
        session.run(transitions.sleep(session.keys, check_key(key), for_ms=for_ms))

    def resume_key(self, queue: str, key: str) -> bool:
        """Resume a key that is paused, or that a handler or its rate put to sleep; return whether it was."""
        session = self._redis.queue(queue)
        return session.run(transitions.sleep(session.keys, check_key(key), for_ms=0))

    def shards(self, queue: str) -> ShardsView:
        """Return how many shards a queue has, and the counts of each that answers."""
        return shards_of(self._redis.queue(queue))

    def resize(self, queue: str, number: int) -> None:
        """
        Begin to have `number` shards, or go on with a change that was cut off; workers or `finish_resize` finish it.

        Publishers and workers go on meanwhile. A chosen id is accepted once, whichever map a publisher has.

        Raises:
            ConfigurationError: it is no power of two, or an earlier change is not finished.
        """
        ShardChange(self._redis.queue(queue)).resize(number)

    def finish_resize(self, queue: str) -> PendingMigration:
        """Finish a change of the number of shards; return the messages that it has to wait for, if any."""
        left = PendingMigration()
        for left in ShardChange(self._redis.queue(queue)).steps(count=True):  # noqa: B007  the last one counts
            pass
        return left

    def run_cron(self, queue: str, name: str, *, wait: Duration = 15.0) -> str:
        """
        Have a worker publish the message of a periodic entry at once, even while it is paused; return the message's id.

        Raises:
            ConfigurationError: the queue has no such entry, no worker has it, or none has published within `wait`.
        """
        for_seconds = seconds("wait", wait)
        session = self._redis.queue(queue)
        now_ms = session.run(commands.server_ms())
        if not cron_state(session, name).is_served(now_ms / 1000):
            raise ConfigurationError(f"no worker has the periodic entry {name!r} now, and who would publish? start one")
        asked_ms = session.run(calls.asked_run(session.keys, name))
        if asked_ms is None:
            asked_ms = now_ms
            session.run(calls.ask_run(session.keys, name, asked_ms))
        until = time.monotonic() + for_seconds
        while session.run(calls.asked_run(session.keys, name)) is not None:
            if time.monotonic() > until and session.run(calls.withdraw_run(session.keys, name)):
                raise ConfigurationError(
                    f"no worker has published the periodic entry {name!r} within {for_seconds:.10g} s; see their logs"
                )
            time.sleep(RUN_POLL_SECONDS)
        return run_id(name, asked_ms)

    def pause_cron(self, queue: str, name: str, *, reason: str = "", by: str = "") -> None:
        """Have the ticks of a periodic entry skipped, and counted, until `resume_cron`; `by` is user@host by default."""
        session = self._redis.queue(queue)
        pause = pause_by(by, reason)
        cron_state(session, name)
        session.run(calls.pause_cron(session.keys, name, pause))

    def resume_cron(self, queue: str, name: str) -> bool:
        """Have the next tick of a periodic entry published; return whether it was paused. Ticks until now are skipped."""
        session = self._redis.queue(queue)
        state = cron_state(session, name)
        now = session.run(commands.server_ms()) // 1000
        counted = -1
        while state.pause and state.last != counted:  # there may be no worker to count the skipped ticks
            counted = state.last
            if ticks := state.ticks(now, most=TICKS_TOGETHER):
                skipped = transitions.Tick(name, state.schedule, ticks[-1], state.last, missed=len(ticks))
                session.run(transitions.tick(session.keys, skipped, ttl_ms=1, retries=0))
                state = cron_state(session, name)
        return session.run(calls.resume_cron(session.keys, name))

    def forget_cron(self, queue: str, name: str) -> None:
        """Remove the state of a periodic entry that is no longer in the code; raise while a worker has it."""
        session = self._redis.queue(queue)
        state = cron_state(session, name)
        if state.is_served(session.run(commands.server_ms()) / 1000):
            raise ConfigurationError(
                f"a worker has the periodic entry {name!r}, and would register it again: take it out of the code, and wait "
                f"{UNSERVED_SECONDS} s after the last worker with it has ended"
            )
        session.run(calls.forget_cron(session.keys, name))

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
        Ask a worker process for the stacks of its handlers; `worker` has the answer, within 5 s.

        It holds files, lines and functions, and no values. A process whose interpreter is blocked does not answer.

        Raises:
            ConfigurationError: there is no such worker, or its record is older than 15 s.
        """
        if self.worker(worker).record is None:
            raise ConfigurationError(
                f"worker {worker} has said nothing for 15 s: it is dead, or a handler holds its interpreter"
            )
        self._redis.session().run_all(calls.ask_stacks(worker))

    def stacks(self, workers: Collection[str], *, for_seconds: Duration = 10.0) -> dict[str, StackReport]:
        """Ask worker processes for their stacks; return the reports that came within `for_seconds`, at most a minute."""
        wait = seconds("for_seconds", for_seconds, most=60)
        session = self._redis.session()
        session.run_all([request for id in workers for request in calls.ask_stacks(id)])
        reports: dict[str, StackReport] = {}
        until = time.monotonic() + wait
        while waiting := [id for id in workers if id not in reports]:
            answers = session.run_all([request for id in waiting for request in calls.asked_stacks(id)])[1::3]
            reports |= {id: report for id, report in zip(waiting, answers, strict=True) if report is not None}
            if time.monotonic() >= until:
                break
            time.sleep(STACK_POLL_SECONDS)
        return reports

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
        address = self._redis.connection.address
        keys = [self.redis_keys(queue) for queue in queues]
        return acl_rule(
            roles,
            keys,
            user=user,
            selectors=not self._redis.session().version().is_before((7, 0)),
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
        Check whether this Redis is fit for queues; return a finding for each check.

        Args:
            roles: check that this user has the rights of each role on the keys of `queue`, which need not exist.
        """
        wanted = acl_roles(roles)
        return examine(self._redis.session(), self._redis.connection.address, wanted, self.redis_keys(queue))

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """Publish a body as it is, as `Queue.publish` does; without `raw` it must be JSON, or BodyError is raised."""
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
