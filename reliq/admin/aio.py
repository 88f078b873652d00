"""`AsyncAdmin`: the methods of `Admin` as coroutines that run in threads."""

from __future__ import annotations

import asyncio
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from reliq.admin.admin import Admin
from reliq.keys import Layout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from reliq.redis.url import Target

P = ParamSpec("P")
T = TypeVar("T")

#: Names of the callback parameters to which bulk methods report their progress.
PROGRESS = ("on_step", "progress")
_END = object()


def _twin(method: Callable[Concatenate[Admin, P], T]) -> Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a method of `Admin` in a thread, and has the same parameters."""
    progress = next((name for name in PROGRESS if name in signature(method).parameters), None)

    @wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **options: P.kwargs) -> T:
        if progress is None:
            return await asyncio.to_thread(method, self._admin, *args, **options)
        report: Any = options.get(progress)
        loop = asyncio.get_running_loop()
        is_cancelled = False

        def step(*seen: Any) -> None:
            if is_cancelled:
                raise asyncio.CancelledError
            if report is not None:
                loop.call_soon_threadsafe(report, *seen)

        options[progress] = step
        work = asyncio.ensure_future(asyncio.to_thread(method, self._admin, *args, **options))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            is_cancelled = True
            await asyncio.wait([work])
            raise

    return call


def _each(
    method: Callable[Concatenate[Admin, P], Iterator[T]],
) -> Callable[Concatenate[AsyncAdmin, P], AsyncIterator[T]]:
    """Return an async generator function that runs a generator method of `Admin`, and has the same parameters."""

    @wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        items = await asyncio.to_thread(method, self._admin, *args, **options)
        while (item := await asyncio.to_thread(next, items, _END)) is not _END:
            yield cast("T", item)

    return call


class AsyncAdmin:
    """
    `Admin` for async code: its methods, except `watch`, as coroutines that run in threads.

    If you cancel the task of a bulk method, the task ends when the method has finished its current step. No message is
    lost, and you can call the method again to process the remaining messages. If you cancel the task of another method,
    the method still runs to its end in its thread. Callbacks such as `on_step` are called on the event loop.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the Redis keys of the queues are spelled.
        shard: number of the only shard to read and change; None to use all shards of a queue together.

    Raises:
        ConfigurationError: no Redis URL is set, or reliq cannot use this Redis.
    """

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ, shard: int | None = None) -> None:
        self._admin = Admin(url, layout=layout, shard=shard)

    @property
    def place(self) -> str:
        """The URL of Redis without its password, or the class of the redis-py client that was passed as `url`."""
        return self._admin.place

    async def aclose(self) -> None:
        """
        Close the connections to Redis; the next method call opens new connections.

        Before you call this, await or cancel the methods that are running.
        """
        await asyncio.to_thread(self._admin.close)

    check = _twin(Admin.check)
    delete_queue = _twin(Admin.delete_queue)
    acl = _twin(Admin.acl)
    load_scripts = _twin(Admin.load_scripts)
    doctor = _twin(Admin.doctor)
    queues = _twin(Admin.queues)
    history = _twin(Admin.history)
    histories = _twin(Admin.histories)
    limits = _twin(Admin.limits)
    set_limits = _twin(Admin.set_limits)
    shared_limits = _twin(Admin.shared_limits)
    keys = _twin(Admin.keys)
    key = _twin(Admin.key)
    each_key = _each(Admin.each_key)
    pause_key = _twin(Admin.pause_key)
    resume_key = _twin(Admin.resume_key)
    shards = _twin(Admin.shards)
    resize = _twin(Admin.resize)
    finish_resize = _twin(Admin.finish_resize)
    crons = _twin(Admin.crons)
    run_cron = _twin(Admin.run_cron)
    pause_cron = _twin(Admin.pause_cron)
    resume_cron = _twin(Admin.resume_cron)
    delete_cron = _twin(Admin.delete_cron)
    schedules = _twin(Admin.schedules)
    pause_schedule = _twin(Admin.pause_schedule)
    resume_schedule = _twin(Admin.resume_schedule)
    delete_schedule = _twin(Admin.delete_schedule)
    workers = _twin(Admin.workers)
    worker = _twin(Admin.worker)
    ask_stacks = _twin(Admin.ask_stacks)
    stacks = _twin(Admin.stacks)
    running = _twin(Admin.running)
    account = _twin(Admin.account)
    show = _twin(Admin.show)
    messages = _each(Admin.messages)
    page = _twin(Admin.page)
    count = _twin(Admin.count)
    publish = _twin(Admin.publish)
    publish_lines = _twin(Admin.publish_lines)
    cancel = _twin(Admin.cancel)
    cancel_where = _twin(Admin.cancel_where)
    purge = _twin(Admin.purge)
    move = _twin(Admin.move)
    dead_groups = _twin(Admin.dead_groups)
    redrive = _twin(Admin.redrive)
    reschedule = _twin(Admin.reschedule)
    pause = _twin(Admin.pause)
    resume = _twin(Admin.resume)
    paused = _twin(Admin.paused)
