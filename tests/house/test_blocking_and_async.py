"""A blocking method and its async twin have the same signature."""

import asyncio
import inspect
import re

from reliq.admin import Admin, AsyncAdmin
from reliq.queue import Queue

#: Methods without a twin: a watcher reads in one thread, and `redis_keys`, `in_layout` and `in_shard` ask no server.
ALONE = {Admin: {"watch", "redis_keys", "in_layout", "in_shard", "close"}, AsyncAdmin: {"aclose"}}


def public(kind):
    names = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    return names - ALONE.get(kind, set())


def signature(function):
    """Return parameters and return type, without the words that mark an async type."""
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


def test_admin_methods_have_async_twins_that_are_awaited():
    assert public(Admin) == public(AsyncAdmin)
    blocking = []
    for name in public(Admin):
        plain, twin = getattr(Admin, name), inspect.getattr_static(AsyncAdmin, name)
        code = inspect.unwrap(twin, stop=lambda one, plain=plain: one.__wrapped__ is plain)
        if not (inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)):
            blocking.append(name)

    assert blocking == []
