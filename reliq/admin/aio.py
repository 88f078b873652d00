"""`AsyncAdmin`: what `Admin` does, for async code: each call runs in a thread of its own pool."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from reliq.admin.admin import Admin
from reliq.admin.filters import ignore
from reliq.keys import Layout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from reliq.redis.url import Target

P = ParamSpec("P")
T = TypeVar("T")

#: Calls that one AsyncAdmin makes at a time; further ones wait.
THREADS = 16
#: The parameters by which a long call tells how far it is.
_PROGRESS = ("on_step", "on_look", "progress")
_END = object()


def _twin(method: Callable[Concatenate[Admin, P], T]) -> Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]]:
    """Return a method of `Admin` as a coroutine with the same parameters."""
    progress = next((name for name in _PROGRESS if name in signature(method).parameters), None)

    @wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **options: P.kwargs) -> T:
        stop = threading.Event()
        if progress is not None:
            options[progress] = _reporting(cast("Callable[..., Any]", options.get(progress, ignore)), stop)
        return await self._call(lambda admin: method(admin, *args, **options), stop, in_steps=progress is not None)

    call.__doc__ = f"Do as `Admin.{method.__name__}`, in a thread."
    return call


def _each(
    method: Callable[Concatenate[Admin, P], Iterator[T]],
) -> Callable[Concatenate[AsyncAdmin, P], AsyncIterator[T]]:
    """Return a method of `Admin` that yields as one for `async for`."""

    @wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        stop = threading.Event()
        items = await self._call(lambda admin: method(admin, *args, **options), stop, in_steps=False)
        while (item := await self._call(lambda _: next(items, _END), stop, in_steps=False)) is not _END:
            yield cast("T", item)

    call.__doc__ = f"Yield as `Admin.{method.__name__}`, each item read in a thread."
    return call


class AsyncAdmin:
    """
    `Admin` for async code: the same methods, as coroutines, but for `watch`, whose looks go with one thread.

    At most 16 calls run at a time. A task that is cancelled ends a bulk method between two of its steps, and is over
    when the step is: nothing is lost, and the same call goes on with the rest. `on_step` and its like are called on the
    event loop.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the keys of its queues are spelled.
        shard: look at this shard of a sharded queue alone; by default at all of them as one queue.

    Raises:
        ConfigurationError: no Redis is named, or reliq cannot use it.
    """

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ, shard: int | None = None) -> None:
        self._admin = Admin(url, layout=layout, shard=shard)
        self._threads = ThreadPoolExecutor(THREADS, "reliq-admin")
        self._running = set[threading.Event]()

    @property
    def place(self) -> str:
        """The URL without its password, or the kind of client."""
        return self._admin.place

    async def aclose(self) -> None:
        """End what runs between two steps, and close the connections."""
        for stop in list(self._running):
            stop.set()
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._admin.close)

    check = _twin(Admin.check)
    forget = _twin(Admin.forget)
    acl = _twin(Admin.acl)
    load_scripts = _twin(Admin.load_scripts)
    doctor = _twin(Admin.doctor)
    queues = _twin(Admin.queues)
    overview = _twin(Admin.overview)
    history = _twin(Admin.history)
    histories = _twin(Admin.histories)
    limits = _twin(Admin.limits)
    set_limits = _twin(Admin.set_limits)
    keys = _twin(Admin.keys)
    key = _twin(Admin.key)
    key_page = _twin(Admin.key_page)
    pause_key = _twin(Admin.pause_key)
    resume_key = _twin(Admin.resume_key)
    shards = _twin(Admin.shards)
    resize = _twin(Admin.resize)
    finish_resize = _twin(Admin.finish_resize)
    crons = _twin(Admin.crons)
    run_cron = _twin(Admin.run_cron)
    pause_cron = _twin(Admin.pause_cron)
    resume_cron = _twin(Admin.resume_cron)
    forget_cron = _twin(Admin.forget_cron)
    workers = _twin(Admin.workers)
    worker = _twin(Admin.worker)
    ask_stacks = _twin(Admin.ask_stacks)
    stacks = _twin(Admin.stacks)
    running = _twin(Admin.running)
    account = _twin(Admin.account)
    accounts = _twin(Admin.accounts)
    show = _twin(Admin.show)
    story = _twin(Admin.story)
    ends = _twin(Admin.ends)
    messages = _twin(Admin.messages)
    page = _twin(Admin.page)
    search = _twin(Admin.search)
    size = _twin(Admin.size)
    publish = _twin(Admin.publish)
    publish_lines = _twin(Admin.publish_lines)
    cancel = _twin(Admin.cancel)
    count_messages = _twin(Admin.count_messages)
    cancel_where = _twin(Admin.cancel_where)
    purge = _twin(Admin.purge)
    move = _twin(Admin.move)
    letters = _each(Admin.letters)
    count_letters = _twin(Admin.count_letters)
    dead_groups = _twin(Admin.dead_groups)
    redrive = _twin(Admin.redrive)
    delete_letters = _twin(Admin.delete_letters)
    reschedule = _twin(Admin.reschedule)
    pause = _twin(Admin.pause)
    resume = _twin(Admin.resume)
    paused = _twin(Admin.paused)

    async def _call(self, call: Callable[[Admin], T], stop: threading.Event, *, in_steps: bool) -> T:
        """Make a call in a thread; a task that is cancelled has one `in_steps` end, and waits for that."""
        self._running.add(stop)
        try:
            job = self._threads.submit(copy_context().run, call, self._admin)
            try:
                return await asyncio.shield(asyncio.wrap_future(job))
            except asyncio.CancelledError:
                stop.set()
                if in_steps and not job.cancel():
                    await asyncio.wait([asyncio.wrap_future(job)])
                raise
        finally:
            self._running.discard(stop)


def _reporting(report: Callable[..., Any], stop: threading.Event) -> Callable[..., None]:
    """Return what a thread calls after each step: it has `report` called on the running loop, until it is to stop."""
    loop = asyncio.get_running_loop()

    def step(*seen: Any) -> None:
        if stop.is_set():
            raise RuntimeError("this call was ended between two steps, for its task was cancelled or the admin closed")
        loop.call_soon_threadsafe(report, *seen)

    return step
