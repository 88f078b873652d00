"""`AsyncAdmin`: no method blocks the event loop, and a cancelled bulk method stops between two steps."""

import asyncio
import threading

import pytest

from reliq.admin import AsyncAdmin
from reliq.errors import ConfigurationError


@pytest.fixture
def ask(url):
    """Run async code with an AsyncAdmin on the test's Redis."""

    def run(code):
        async def main():
            desk = AsyncAdmin(url)
            try:
                return await asyncio.wait_for(code(desk), 60)
            finally:
                await desk.aclose()

        return asyncio.run(main())

    return run


def test_async_admin_answers_and_raises_like_admin(ask, admin, url, die):
    die("a", "b", "c")

    async def code(twin):
        with pytest.raises(ConfigurationError, match="there is no queue"):
            await twin.count("none", "dead")
        with pytest.raises(ConfigurationError, match="no shard 1"):
            await AsyncAdmin(url, shard=1).account("q")
        groups, *sizes = await asyncio.gather(
            twin.dead_groups("q", for_seconds=60), *(twin.count("q", "dead") for _ in range(60))
        )
        return groups, {*sizes}, [entry.id async for entry in twin.messages("q", "dead")], await twin.account("q")

    assert ask(code) == (admin.dead_groups("q", for_seconds=60), {3}, ["c", "b", "a"], admin.account("q"))


def test_progress_is_reported_on_the_event_loop(ask, die):
    die(*(f"m{number}" for number in range(20)))

    async def code(twin):
        seen = []
        report = lambda *step: seen.append((threading.get_ident(), *step))  # noqa: E731
        await twin.redrive("q", on_step=report)
        return seen

    seen = ask(code)

    assert {thread for thread, *_ in seen} == {threading.get_ident()}
    assert (sum(looked for _, looked, _ in seen), seen[-1][2].done) == (20, 20)


async def begun(twin, rate):
    """Start a redrive; return its task after the first step."""
    step = asyncio.Event()
    task = asyncio.create_task(twin.redrive("q", rate=rate, on_step=lambda *_: step.set()))
    await step.wait()
    return task


@pytest.mark.parametrize("rate", [None, 0.5], ids=["without a rate", "with a rate"])
def test_cancelled_redrive_ends_between_two_steps_and_can_be_continued(ask, queue, die, rate):
    die(*(f"m{number}" for number in range(40)))

    async def code(twin):
        task = await begun(twin, rate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        first = queue.counts()
        rest = await twin.redrive("q")
        return first, rest.done

    first, rest = ask(code)

    assert (first.missing, first.dead + first.ready, rest) == (0, 40, first.dead)
    assert 0 < first.ready <= (40 if rate is None else 10)
    assert queue.counts().ready == 40
