"""`Reliq`, the kit as a test has it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from reliq.client.client import Client
from reliq.commands import drop_watch, push_wake_token
from reliq.keywords import check_keywords
from reliq.outbox.tables import DEFAULT_PREFIX
from reliq.shardmap import shard_map
from reliq.snapshot.snapshot import registered
from reliq.testing.calls import AsyncCalls, Calls
from reliq.testing.drain import Drain, DrainResult
from reliq.testing.outbox import amove, move
from reliq.testing.perform import JobOptions, Performance
from reliq.testing.published import Match, Published, Wanted, messages, shown
from reliq.transport.connection import Connection

if TYPE_CHECKING:
    from reliq.consumer.consumer import Consumer
    from reliq.keys import Keys
    from reliq.message import Duration
    from reliq.queue import Queue
    from reliq.testing.travel import TestClock

B = TypeVar("B")

#: A reply is awaited for this many seconds.
KIT_REPLY_SECONDS = 5.0
#: A drain has at most this many deliveries, unless it is told another number.
MOST_DELIVERIES = 1000
_MATCH_KEYWORDS = frozenset({"body", *Match.__annotations__})
_JOB_KEYWORDS = frozenset({"state", *JobOptions.__annotations__})


class Reliq:
    """
    A Redis for one test, and time in it.

    Attributes:
        url: of that Redis; other processes need it, for only this process and its forks are redirected.
        connection: what every target means meanwhile.
    """

    def __init__(self, url: str, clock: TestClock) -> None:
        self.url, self._clock, self._began_us = url, clock, time.time_ns() // 1000
        self.connection = connection = Connection(url, clock)
        self._client = Client.to(connection, KIT_REPLY_SECONDS)

    def published(
        self,
        queue: Queue[B],
        body: B | None = None,
        **match: Unpack[Match],
    ) -> list[Published[B]]:
        """
        Return the messages of `queue` that have not ended, those first that are delivered first.

        Args:
            body, state, id, key, priority: what they must have; None is any.
            headers: those that they must have; there may be more.
            due: unix seconds or an aware datetime, met within a second.
        """
        check_keywords("Reliq.published", match, _MATCH_KEYWORDS)
        wanted = Wanted(body=body, **match)
        return [message for message in messages(self._client, queue) if wanted.meets(message)]

    def assert_published(
        self,
        queue: Queue[B],
        body: B | None = None,
        **match: Unpack[Match],
    ) -> Published[B]:
        """Return the first message that `published` finds; raise AssertionError, which shows the others, for none."""
        __tracebackhide__ = True
        check_keywords("Reliq.assert_published", match, _MATCH_KEYWORDS)
        if found := self.published(queue, body, **match):
            return found[0]
        wanted = Wanted(body=body, **match)
        raise AssertionError(f"no message in {queue.name!r} with {wanted}: {shown(self.published(queue))}")

    def refute_published(
        self,
        queue: Queue[B],
        body: B | None = None,
        **match: Unpack[Match],
    ) -> None:
        """Raise AssertionError, which shows them, when `published` finds messages."""
        __tracebackhide__ = True
        check_keywords("Reliq.refute_published", match, _MATCH_KEYWORDS)
        if found := self.published(queue, body, **match):
            raise AssertionError(f"expected no such message in {queue.name!r}, and {shown(found)}")

    def perform(
        self,
        consumer: Consumer,
        queue: Queue[B],
        body: B,
        *,
        state: Any = None,
        **options: Unpack[JobOptions],
    ) -> Any:
        """
        Call the handler of `queue` with `body` here and now, and return its answer; Redis is not asked.

        The body goes through the queue's codec, the handler gets a real `Job`, and middleware, observers and error hooks
        are called as in a worker. A batch handler gets a batch of one.

        Args:
            state: `job.state`; None enters the consumer's lifespan.
            id: the message's id.
            attempt: the number of the delivery, 1 for the first.
            retries: deliveries after the first, None for the queue's.
            headers, incarnation, key, priority: those of its publish.

        Raises:
            ConfigurationError, BodyError: as `publish`, or there is no handler.
            Exception: whatever the handler raised, `Nack`, `Reject` and `Snooze` too.
        """
        __tracebackhide__ = True
        check_keywords("Reliq.perform", options, _JOB_KEYWORDS)
        performance = Performance(consumer, queue, body, **options)
        with Calls() as calls, calls.lifespan(consumer.lifespan if state is None else None) as entered:
            performance.enter(state, entered)
            return performance.answer(calls.run(performance.runner, performance.call))

    async def aperform(
        self,
        consumer: Consumer,
        queue: Queue[B],
        body: B,
        *,
        state: Any = None,
        **options: Unpack[JobOptions],
    ) -> Any:
        """As `perform`, in async code; a plain handler is called on the event loop."""
        __tracebackhide__ = True
        check_keywords("Reliq.aperform", options, _JOB_KEYWORDS)
        performance = Performance(consumer, queue, body, **options)
        async with AsyncCalls().lifespan(consumer.lifespan if state is None else None) as entered:
            performance.enter(state, entered)
            return performance.answer(await AsyncCalls().run(performance.runner, performance.call))

    def drain(
        self,
        consumer: Consumer,
        *,
        scheduled: bool = False,
        fail_fast: bool = True,
        most: int = MOST_DELIVERIES,
        state: Any = None,
        outbox: Any = None,
    ) -> DrainResult:
        """
        Deliver what is due in the queues of `consumer`, and what comes of it, in this thread, until nothing is due.

        Ticks of periodic jobs that have passed since the test began, or the last drain, are published first.

        Args:
            scheduled: travel to the next due time, a backoff's included, until nothing is left.
            fail_fast: raise the first failure here, with the handler's own traceback: an exception that is no answer, or
                a body that does not decode. Without it a message is retried, and dies, as ever.
            most: deliveries after which a drain that does not end is given up.
            state: `job.state`; None enters the consumer's lifespan.
            outbox: moved in each round, as `relay` does.

        Raises:
            AssertionError: there were more deliveries than `most`.
        """
        __tracebackhide__ = True
        drain = self._drain(consumer, scheduled=scheduled, fail_fast=fail_fast, most=most)
        runner = drain.calls.runner
        with Calls() as calls, calls.lifespan(consumer.lifespan if state is None else None) as entered:
            runner.state = entered if state is None else state
            for call in drain.steps():
                if call is not None:
                    calls.run(runner, call)
                elif outbox is not None:
                    self.relay(outbox)
        return drain.done

    async def adrain(
        self,
        consumer: Consumer,
        *,
        scheduled: bool = False,
        fail_fast: bool = True,
        most: int = MOST_DELIVERIES,
        state: Any = None,
        outbox: Any = None,
    ) -> DrainResult:
        """As `drain`, in async code; plain handlers are called on the event loop."""
        __tracebackhide__ = True
        drain = self._drain(consumer, scheduled=scheduled, fail_fast=fail_fast, most=most)
        runner = drain.calls.runner
        async with AsyncCalls().lifespan(consumer.lifespan if state is None else None) as entered:
            runner.state = entered if state is None else state
            for call in drain.steps():
                if call is not None:
                    await AsyncCalls().run(runner, call)
                elif outbox is not None:
                    await self.arelay(outbox)
        return drain.done

    def relay(self, outbox: Any, *, prefix: str = DEFAULT_PREFIX) -> int:
        """
        Move the messages of `publish_in` to the test's Redis, and return how many.

        Args:
            outbox: the test's own transaction, as `publish_in` takes it: what it sees is moved, and nothing committed;
                or a `Relay`, which moves what is committed.
            prefix: of the tables' names; a `Relay` has its own.

        Raises:
            ConfigurationError: it is neither, or its database has no such tables.
        """
        return move(outbox, prefix)

    async def arelay(self, outbox: Any, *, prefix: str = DEFAULT_PREFIX) -> int:
        """As `relay`, in async code, with an AsyncSession or AsyncConnection of SQLAlchemy too."""
        return await amove(outbox, prefix)

    @property
    def now(self) -> float:
        """The time in this test, in unix seconds: Python's, and that of its Redis."""
        return time.time()

    def travel(self, by: Duration) -> None:
        """
        Move time on, in seconds or a timedelta: in Python, in Redis' scripts, and for all that expires there.

        What comes due wakes workers of this process; other processes do not see it.

        Raises:
            ConfigurationError: time would go backwards, time-machine is not installed, or freezegun holds the clock.
        """
        self._clock.travel(by)
        for keys in registered(self._client, list).queues:
            for shard in self._shards(keys):
                self._client.run_all([drop_watch(shard), *push_wake_token(shard)])

    def hold(self) -> None:
        """Hold the clock: from now on time passes by `travel` alone."""
        self._clock.hold()

    def _shards(self, keys: Keys) -> list[Keys]:
        served = 1 if keys.bare else self._client.run(shard_map(keys)).served
        return [keys.of_shard(shard) for shard in range(served)]

    def _drain(self, consumer: Consumer, *, scheduled: bool, fail_fast: bool, most: int) -> Drain:
        client = Client.to(self.connection, KIT_REPLY_SECONDS, consumer.observers)
        travel = self.travel if scheduled else None
        self._began_us = min(self._began_us, time.time_ns() // 1000)  # a test may have moved the clock back since
        began = Client(self.connection.wire(KIT_REPLY_SECONDS), clock=lambda: self._began_us)
        return Drain(consumer, client, began, travel=travel, fail_fast=fail_fast, most=most)
