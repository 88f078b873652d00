"""arq: an event loop; a job stays in its sorted set until it has run."""

from datetime import UTC, datetime, timedelta

from arq import create_pool
from arq.connections import RedisSettings

from benchmarks.peers import kit


async def handle(ctx, body):
    """Do this run's work."""
    await kit.ado()


async def note(ctx, body):
    """Write how late this is."""
    kit.note(body["sent"])


class Settings:
    """What `arq` reads."""

    functions = [handle, note]  # noqa: RUF012  arq's form
    redis_settings = RedisSettings.from_dsn(kit.URL)
    max_jobs = kit.SLOTS
    poll_delay = 0.01
    keep_result = 0


async def one(count):
    pool = await create_pool(Settings.redis_settings)
    await pool.enqueue_job("handle", kit.BODY)

    async def loop():
        for _ in range(count):
            await pool.enqueue_job("handle", kit.BODY)

    return await kit.atimed(loop())


async def late(rate, seconds, lead):
    pool = await create_pool(Settings.redis_settings)
    for due in kit.dues(rate, seconds, lead):
        when = datetime.fromtimestamp(due, UTC)
        await pool.enqueue_job("note", {**kit.BODY, "sent": due}, _defer_until=when)


async def delayed(count):
    pool = await create_pool(Settings.redis_settings)
    for _ in range(count):
        await pool.enqueue_job("handle", kit.BODY, _defer_by=timedelta(hours=1))


async def slow(count):
    pool = await create_pool(Settings.redis_settings)
    await kit.aslowly(lambda body: pool.enqueue_job("note", body), count)


def work(processes):
    kit.processes(processes, "-m", "arq", f"{__name__}.Settings")
