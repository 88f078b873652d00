"""Tasks of an app, in the module that workers import at their start."""

import time
from pathlib import Path

from reliq import Reject, Snooze

try:
    from django.tasks import TaskContext, task
except ImportError:  # before Django 6
    from django_tasks import TaskContext, task

#: Records of the tasks, in order.
SEEN = []
SNOOZES = []


@task()
def noop(*args, **kwargs):
    SEEN.append((args, kwargs))


@task
def noop_from_bare_decorator(*args, **kwargs):
    SEEN.append((args, kwargs))


@task()
async def noop_async(*args, **kwargs):
    SEEN.append((args, kwargs))


@task()
def meaning_of_life():
    return 42


@task()
async def meaning_of_life_async():
    return 42


@task()
def value_error():
    raise ValueError("This task failed due to ValueError")


@task()
async def value_error_async():
    raise ValueError("This task failed due to ValueError")


@task()
def system_exit():
    raise SystemExit("This task failed due to SystemExit")


@task()
def complex_exception():
    raise ValueError(ValueError("This task failed"))


@task()
def long_exception():
    raise ValueError('\x01"\n\ud800ü' * 2000)


@task()
def complex_return_value():
    return {1: lambda: None}


@task()
def large_return_value(size):
    return "x" * size


@task(takes_context=True)
def task_id(context):
    SEEN.append(context.task_result.id)
    return context.task_result.id


@task(takes_context=True)
async def async_context(context, *, word):
    SEEN.append((type(context) is TaskContext, context.attempt, word))


@task(takes_context=True)
def fails_until(context, attempt):
    SEEN.append(
        (context.attempt, context.task_result.worker_ids, [one.traceback for one in context.task_result.errors])
    )
    if context.attempt < attempt:
        raise ValueError(f"attempt {context.attempt}")
    return context.attempt


@task()
def snoozed_once():
    if not SNOOZES:
        SNOOZES.append(None)
        raise Snooze(60)
    return "done"


@task()
def rejected():
    raise Reject("no such order")


@task()
def waits_for(path):
    while not Path(path).exists():
        time.sleep(0.01)
