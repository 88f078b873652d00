"""Calls of many tasks share round trips: the size of a batch, and the results of waiting and cancelled tasks."""

import asyncio
import os
import signal

import pytest

from reliq import Queue
from reliq.publish import Batcher
from reliq.redis.commands import Command

#: The timeout for a frozen server is this much longer than delays of a busy machine.
PATIENCE_SECONDS = 32.0


class Rounds:
    """Records the calls of the running event loop, and the number of started round trips."""

    def __init__(self, queue):
        self.begun = 0
        self.fourth = asyncio.Event()
        self._queue = queue
        self.batcher = Batcher(self._client, for_seconds=1.0)

    def make(self, count, weight=0):
        echo = (Command(("ECHO", str(n)), int) for n in range(count))
        return [asyncio.create_task(self.batcher.run(one, weight)) for one in echo]

    def _client(self):
        self.begun += 1
        if self.begun == 4:
            self.fourth.set()
        return self._queue._clients.asynchronous(PATIENCE_SECONDS)


def test_round_trip_has_at_most_the_bytes_of_a_call(queue):
    async def run():
        rounds = Rounds(queue)
        answers = await asyncio.gather(*rounds.make(30, weight=2**20))
        large = await asyncio.gather(*rounds.make(3, weight=2**24))
        await queue.aclose()
        return answers, large, rounds.begun

    answers, large, begun = asyncio.run(run())

    assert (answers, large) == (list(range(30)), list(range(3)))
    assert begun == 4 + 3


def test_round_trip_that_hangs_does_not_block_others(own_server):
    server = own_server()
    queue = Queue("q", url=server.url)

    async def run():
        rounds = Rounds(queue)
        await asyncio.gather(*rounds.make(1))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            tasks = rounds.make(1200)
            async with asyncio.timeout(30):
                await rounds.fourth.wait()
            done = [task.done() for task in tasks]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        answers = await asyncio.gather(*tasks)
        await queue.aclose()
        return answers, done

    answers, done = asyncio.run(run())

    assert answers == list(range(1200))
    assert not any(done)


@pytest.mark.parametrize("turns", [0, 1, 2], ids="after {} turns".format)
def test_waiting_tasks_are_answered_when_the_batching_task_is_cancelled(queue, turns):
    async def run():
        rounds = Rounds(queue)
        tasks = rounds.make(600)
        await asyncio.sleep(0)  # they have called; the other task has not started
        for _ in range(turns):
            await asyncio.sleep(0)
        rounds.batcher._task.cancel()
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*tasks)
            answers += await asyncio.gather(*rounds.make(1))
        await queue.aclose()
        return answers

    assert asyncio.run(run()) == [*range(600), 0]
