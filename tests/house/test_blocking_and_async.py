"""A blocking method and its async twin have one signature."""

import asyncio
import importlib
import inspect
import pkgutil
import re

import reliq
from reliq.admin import Admin, AsyncAdmin
from reliq.publish.publisher import Sender
from reliq.queue import Queue
from reliq.redis.client import AsyncClient, Client
from reliq.redis.cluster import ClusterTransport
from reliq.redis.connection import PooledConnection

#: Methods without a twin: a watcher reads in one thread, and `redis_keys`, `in_layout` and `in_shard` ask no server. A worker waits at
#: many servers in threads, as an operator asks each; async code publishes by a batcher, which makes `run_once_sent` of many.
ALONE = {Admin: {"watch", "redis_keys", "in_layout", "in_shard", "close"}, AsyncAdmin: {"aclose"}}
ALONE |= {Client: {"place", "wake_tokens", "run_everywhere", "run_once_sent"}}
ALONE |= {
    kind: {"lone_connection", "place", "node_for", "each", "everywhere", "note"}
    for kind in (PooledConnection, ClusterTransport)
}


def public(kind):
    names = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    return names - ALONE.get(kind, set())


def signature(function):
    """Parameters and the returned type, without the words that mark an async kind."""
    found = inspect.signature(function)
    returned = re.sub(r"^Awaitable\[(.*)\]$", r"\1", str(found.return_annotation)).replace("Async", "")
    taken = [one.replace(annotation=str(one.annotation).replace("Async", "")) for one in found.parameters.values()]
    return found.replace(parameters=taken, return_annotation=returned)


def is_async(function):
    return asyncio.iscoroutinefunction(function) or inspect.isasyncgenfunction(inspect.unwrap(function))


def test_queue_methods_have_async_twins_of_one_signature():
    methods = public(Queue) - {"connection"}
    blocking = {name for name in methods if f"a{name}" in methods}
    pairs = {name: (getattr(Queue, name), getattr(Queue, f"a{name}")) for name in blocking}

    assert methods == blocking | {f"a{name}" for name in blocking}
    assert [name for name, (plain, twin) in pairs.items() if signature(plain) != signature(twin)] == []
    assert [name for name, (plain, twin) in pairs.items() if is_async(plain) or not is_async(twin)] == []
    assert signature(Sender.send) == signature(Sender.asend)


def test_classes_and_their_async_twins_have_the_same_methods():
    """Twins are `X` and `AsyncX`, wherever they are defined."""
    names = [one.name for one in pkgutil.walk_packages(reliq.__path__, "reliq.") if one.name != "reliq.__main__"]
    found = [kind for name in names for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)]
    classes = {kind.__name__: kind for kind in found if kind.__module__.startswith("reliq.")}
    twins = {(classes[name[5:]], kind) for name, kind in classes.items() if name[:5] == "Async" and name[5:] in classes}
    different = set()
    for pair in twins:
        plain, twin = ({(name, str(signature(getattr(kind, name)))) for name in public(kind)} for kind in pair)
        different |= {f"{pair[0].__name__}.{name}" for name, _ in plain ^ twin}

    assert {(Client, AsyncClient), (Admin, AsyncAdmin)} <= twins
    assert different == set()


def test_async_admin_methods_are_awaited():
    blocking = []
    for name in public(Admin):
        plain, twin = getattr(Admin, name), inspect.getattr_static(AsyncAdmin, name)
        code = inspect.unwrap(twin, stop=lambda one, plain=plain: one.__wrapped__ is plain)
        if not (inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)):
            blocking.append(name)

    assert blocking == []
