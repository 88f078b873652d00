"""What there is in blocking and in async code has one signature."""

import asyncio
import contextlib
import importlib
import inspect
import pkgutil

import pytest

import reliq
from reliq.admin import Admin, AsyncAdmin
from reliq.client.aio import AsyncClient
from reliq.client.client import Client
from reliq.publish.sender import Sender
from reliq.queue import Queue
from reliq.transport.many import AsyncManyWire, ManyWire
from reliq.transport.wire import AsyncPooledWire, PooledWire

#: Modules that are programs: their import runs something.
NO_IMPORT = {"reliq.__main__"}
#: Methods that only one of two twins has: a watcher's looks go with one thread, `redis_keys`, `in_layout` and `in_shard` ask nobody; a
#: worker, which waits at many servers, and an operator, who asks each, run in threads; async code publishes by a batcher, which makes `run_once_sent` of many.
ALONE = {Admin: {"watch", "redis_keys", "in_layout", "in_shard", "close"}, AsyncAdmin: {"aclose"}}
ALONE |= {Client: {"place", "standing_waits", "run_everywhere", "run_once_sent"}, PooledWire: {"lone_connection"}}
ALONE |= {
    kind: ALONE.get(kind, set()) | {"place", "node_for", "each", "everywhere", "note"}
    for kind in (PooledWire, ManyWire)
}
#: Queue methods that talk to Redis.
BLOCKING = [
    "publish",
    "publish_many",
    "publish_in",
    "shards",
    "cancel",
    "reschedule",
    "counts",
    "receive",
    "pause",
    "resume",
    "letters",
    "redrive",
    "close",
]


def public(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def signature(function):
    """Parameters and what is returned, with the words for the asynchronous kind of a thing made plain."""
    found = inspect.signature(function)
    returned = str(found.return_annotation).replace("Async", "")
    return found.replace(return_annotation=returned)


@pytest.mark.parametrize("name", BLOCKING)
def test_a_method_and_its_twin_have_one_signature(name):
    plain, twin = getattr(Queue, name), getattr(Queue, f"a{name}")

    assert signature(plain) == signature(twin)


@pytest.mark.parametrize("name", BLOCKING)
def test_a_twin_is_for_async_code_and_the_method_for_blocking_code(name):
    plain, twin = getattr(Queue, name), getattr(Queue, f"a{name}")

    assert not asyncio.iscoroutinefunction(plain)
    assert asyncio.iscoroutinefunction(twin) or inspect.isasyncgenfunction(inspect.unwrap(twin))


def test_every_method_that_talks_to_redis_has_a_twin():
    methods = public(Queue)

    assert methods - {"connection"} == {*BLOCKING, *(f"a{name}" for name in BLOCKING)}


def twins():
    """Each class of the package and the one that is called the same with `Async` before it, wherever they are."""
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.walk_packages(reliq.__path__, "reliq.")
        if one.name not in NO_IMPORT
    ]
    classes = {kind.__name__: kind for one in modules for _, kind in inspect.getmembers(one, inspect.isclass)}
    ours = {name: kind for name, kind in classes.items() if kind.__module__.startswith("reliq.")}
    return [
        (ours[name.removeprefix("Async")], kind)
        for name, kind in ours.items()
        if name.startswith("Async") and name.removeprefix("Async") in ours
    ]


@pytest.mark.parametrize(("plain", "twin"), twins(), ids=lambda kind: kind.__name__)
def test_twins_have_the_same_methods(plain, twin):
    ours = {name: signature(getattr(plain, name)) for name in public(plain) - ALONE.get(plain, set())}
    theirs = {name: signature(getattr(twin, name)) for name in public(twin) - ALONE.get(twin, set())}

    assert ours == theirs


def test_the_twins_are_found():
    wires = {(PooledWire, AsyncPooledWire), (ManyWire, AsyncManyWire)}

    assert {(Client, AsyncClient), (Admin, AsyncAdmin), *wires} <= set(twins())


def test_the_sender_has_one_signature():
    assert signature(Sender.send) == signature(Sender.asend)


@pytest.mark.parametrize("name", sorted(public(Admin) - ALONE[Admin]))
def test_a_method_of_the_async_admin_is_awaited(name):
    plain, twin = getattr(Admin, name), inspect.getattr_static(AsyncAdmin, name)

    code = inspect.unwrap(twin, stop=lambda one: one.__wrapped__ is plain)
    assert inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)


def test_receive_is_a_context_manager_in_both_kinds_of_code():
    queue = Queue("q", url="redis://127.0.0.1:1/0")

    assert isinstance(queue.receive(), contextlib.AbstractContextManager)
    assert isinstance(queue.areceive(), contextlib.AbstractAsyncContextManager)
