"""`Reader`: everything that an operator sees of queues, for programs; it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from reliq import commands
from reliq.admin import dead, remove
from reliq.admin.account import Account, account_of, accounts_of
from reliq.admin.crons import CronView, crons_of
from reliq.admin.discover import chosen
from reliq.admin.ends import End, check_ends, ends_of
from reliq.admin.filters import EVERY_LETTER, EVERYTHING, Filter, LetterFilter, ignore
from reliq.admin.groups import DeadGroups, GroupBy, dead_groups
from reliq.admin.history import Minute, histories_of, overview_by_notes
from reliq.admin.limits import limits_of
from reliq.admin.list import Entry, OnLook, messages_of, size_of
from reliq.admin.message_keys import KeyPage, KeysView, key_of, key_page_of, keys_of
from reliq.admin.page import MessagePage, SearchResult, page_of, search_in
from reliq.admin.queues import Overview, overview, with_rates
from reliq.admin.session import Sessions
from reliq.admin.show import MessageView, view_of
from reliq.admin.story import Story, story_of
from reliq.admin.watch import Watcher
from reliq.admin.workers import Running, WorkerView, running_in, worker_view, workers_alive
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout
from reliq.settings import seconds
from reliq.snapshot.shard_maps import ShardMaps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reliq.limits import Limits
    from reliq.message import Duration, Letter, Pause
    from reliq.roster import Worker
    from reliq.transitions import KeyLine
    from reliq.transport.target import Target


class Reader:
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

    def history(self, queue: str, *, minutes: int = 60) -> list[Minute]:
        """Return a queue's last minutes, up to 180, the oldest first, as its workers noted them."""
        session = self._redis.queue(queue)
        return histories_of(session, [session.keys], minutes, self._maps())[session.keys]

    def histories(self, names: Sequence[str] = (), *, minutes: int = 60) -> dict[str, list[Minute]]:
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

    def story(self, queue: str, id: str) -> Story:
        """Return what happened to a message, the oldest first, as far as it is known; raise when nothing is."""
        return story_of(self.show(queue, id))

    def ends(self, queue: str, *, kind: str | None = None, limit: int = 100) -> list[End]:
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

    def key(self, queue: str, key: str) -> KeyLine:
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
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: remove.OnStep = ignore
    ) -> int:
        """Count the messages of a state, except dead, that `where` means."""
        return remove.count(self._redis.queue(queue), state, where, on_step)

    def letters(
        self, queue: str, where: LetterFilter = EVERY_LETTER, *, without: Collection[int] = ()
    ) -> Iterator[Letter]:
        """Yield the dead letters that `where` means, oldest first; `without` leaves shards out, such as `shards(queue).away`."""
        return dead.letters_of(self._redis.queue(queue), where, without)

    def count_letters(self, queue: str, where: LetterFilter = EVERY_LETTER, *, on_step: dead.OnLetters = ignore) -> int:
        """Count the dead letters that `where` means."""
        return dead.count(self._redis.queue(queue), where, on_step)

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
