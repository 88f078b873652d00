"""
`get_result` and `refresh` of `ReliqBackend`, under the cases of other backends of `django.tasks`.

The cases have the names of Django's tests (tests/tasks/test_tasks.py, test_immediate_backend.py) and of the tests of
django-tasks and django-tasks-rq.
"""

import asyncio
import re
import sys
from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import SuspiciousOperation
from django.db import connection, transaction
from django.test import override_settings
from waiting import eventually

from reliq import Queue

BACKEND = "reliq.contrib.django.tasks.ReliqBackend"


@pytest.fixture
def exceptions(project):
    return sys.modules[f"{project}.exceptions"]


def finished(result, status):
    assert (result.status, result.is_finished, result.attempts) == (status, True, 1)
    assert result.enqueued_at <= result.started_at + timedelta(seconds=1)
    assert result.started_at <= result.last_attempted_at <= result.finished_at
    assert all(":" in worker for worker in result.worker_ids)


def unfinished(result):
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    assert [result.started_at, result.last_attempted_at, result.finished_at] == [None] * 3


def test_backend_supports_get_result(backend):
    assert backend.supports_get_result


def test_get_result(tasks, backend):
    result = backend.enqueue(tasks.noop, (1,), {"two": [3]})

    assert backend.get_result(result.id) == result
    assert tasks.noop.get_result(result.id) == result


def test_get_result_async(tasks, backend):
    async def both():
        result = await backend.aenqueue(tasks.noop, (), {})
        return result, await backend.aget_result(result.id), await tasks.noop.aget_result(result.id)

    first, *others = asyncio.run(both())
    assert others == [first, first]


@pytest.mark.parametrize("name", ["meaning_of_life", "meaning_of_life_async"])
def test_refresh_result(tasks, run_worker, name):
    result = getattr(tasks, name).enqueue()
    run_worker()

    unfinished(result)
    result.refresh()
    finished(result, "SUCCESSFUL")
    assert (result.return_value, result.errors) == (42, [])


def test_refresh_result_async(tasks, run_worker):
    result = asyncio.run(tasks.meaning_of_life.aenqueue())
    run_worker()
    asyncio.run(result.arefresh())

    finished(result, "SUCCESSFUL")
    assert result.return_value == 42


def test_refresh_of_a_waiting_task_changes_nothing(tasks):
    result = tasks.noop.enqueue(1)
    before = repr(result)
    result.refresh()

    assert repr(result) == before


@pytest.mark.parametrize(
    ("name", "exception"), [("value_error", ValueError), ("value_error_async", ValueError), ("system_exit", SystemExit)]
)
def test_catches_exception(tasks, run_worker, name, exception):
    task = getattr(tasks, name)
    result = task.enqueue()
    run_worker()
    result.refresh()

    finished(result, "FAILED")
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018  the attribute raises
    [error] = result.errors
    assert error.exception_class is exception
    assert error.traceback.endswith(f"{exception.__name__}: This task failed due to {exception.__name__}\n")
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert (result.task, result.args, result.kwargs) == (task, [], {})


def test_complex_exception(tasks, run_worker):
    result = tasks.complex_exception.enqueue()
    run_worker()
    result.refresh()

    finished(result, "FAILED")
    assert result.errors[0].exception_class is ValueError
    assert 'ValueError(ValueError("This task failed"))' in result.errors[0].traceback


def test_complex_return_value(tasks, run_worker):
    result = tasks.complex_return_value.enqueue()
    run_worker()
    result.refresh()

    finished(result, "FAILED")
    assert result.errors[0].exception_class is TypeError
    assert "Unsupported type" in result.errors[0].traceback


def test_long_tracebacks_are_cut_at_their_start(tasks, run_worker):
    result = tasks.long_exception.using(backend="retried").enqueue()
    run_worker("retried", scheduled=True)
    result.refresh()

    assert (result.status, result.attempts, len(result.errors)) == ("FAILED", 3, 2)
    assert {one.exception_class for one in result.errors} == {ValueError}
    assert all(one.traceback.endswith("\\ud800ü\n") for one in result.errors)


@pytest.mark.parametrize(
    "id",
    ["123", "8e6d5f0a-9b1c-4c59-8f0e-2a8a3b1c7d11", "default:", "default:x y", "other:1", 123, "default:" + "a" * 22],
)
def test_get_missing_result(tasks, backend, exceptions, id):
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        backend.get_result(id)
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        asyncio.run(backend.aget_result(id))
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.noop.get_result(id)


def test_get_incorrect_result(tasks, exceptions):
    result = tasks.noop_async.enqueue()

    with pytest.raises(exceptions.TaskResultMismatch, match="Task does not match"):
        tasks.noop.get_result(result.id)
    with pytest.raises(exceptions.TaskResultMismatch, match="Task does not match"):
        asyncio.run(tasks.noop.aget_result(result.id))


def test_get_result_from_different_request(tasks):
    """The id fits into the path of a URL: `path("result/<str:result_id>", …)`."""
    from django.urls.converters import StringConverter

    result = tasks.meaning_of_life.enqueue()

    assert re.fullmatch(StringConverter.regex, result.id)
    assert len(result.id) <= 64


def test_invalid_task_path(tasks, backend):
    receipt = Queue("django-default").publish(
        {"args": ["exit"], "kwargs": {}}, headers={"reliq-task": "subprocess.check_output"}
    )

    with pytest.raises(SuspiciousOperation, match="subprocess.check_output is not a task"):
        backend.get_result(f"default:{receipt.id}")


def test_result_of_another_queue_keeps_its_queue(tasks, run_worker):
    result = tasks.meaning_of_life.using(queue_name="queue-1").enqueue()
    run_worker()
    result.refresh()

    finished(result, "SUCCESSFUL")
    assert tasks.meaning_of_life.get_result(result.id).task.queue_name == "queue-1"


def test_takes_context(tasks, run_worker):
    result = tasks.task_id.enqueue()
    run_worker()
    result.refresh()

    assert result.return_value == result.id


# ---- retries


def test_failed_attempt_with_retries_left_is_ready_with_its_error(tasks, kit, run_worker):
    result = tasks.fails_until.using(backend="retried").enqueue(3)
    run_worker("retried")
    result.refresh()

    assert (result.status, result.attempts, result.finished_at) == ("READY", 1, None)
    assert [one.traceback.splitlines()[-1] for one in result.errors] == ["ValueError: attempt 1"]
    run_worker("retried", scheduled=True)
    result.refresh()
    assert (result.status, result.attempts, result.return_value) == ("SUCCESSFUL", 3, 3)
    assert result.started_at < result.last_attempted_at
    assert [one.traceback.splitlines()[-1] for one in result.errors] == [
        "ValueError: attempt 1",
        "ValueError: attempt 2",
    ]


def test_last_failed_attempt_fails_with_the_last_two_errors(tasks, run_worker):
    result = tasks.fails_until.using(backend="retried").enqueue(9)
    run_worker("retried", scheduled=True)
    result.refresh()

    assert (result.status, result.attempts) == ("FAILED", 3)
    assert [one.traceback.splitlines()[-1] for one in result.errors] == [
        "ValueError: attempt 2",
        "ValueError: attempt 3",
    ]


def test_redriven_task_is_ready_again(tasks, run_worker, backends):
    result = tasks.fails_until.using(backend="retried").enqueue(9)
    run_worker("retried", scheduled=True)
    [handler] = backends["retried"].consumer().handlers
    handler.queue.redrive(handler.queue.dead_letters())
    result.refresh()

    assert (result.status, result.finished_at, len(result.errors)) == ("READY", None, 2)


def test_rejected_task_has_the_reason_as_its_error(tasks, run_worker):
    result = tasks.rejected.enqueue()
    run_worker()
    result.refresh()

    assert result.status == "FAILED"
    assert [one.traceback for one in result.errors] == ["rejected: no such order"]
    assert issubclass(result.errors[0].exception_class, Exception)


# ---- when a result is known


def test_result_exists_once_the_relay_has_run(tasks, exceptions, run_worker):
    with transaction.atomic():
        result = tasks.meaning_of_life.enqueue()
        with pytest.raises(exceptions.TaskResultDoesNotExist):
            result.refresh()
    run_worker(outbox=connection)
    result.refresh()

    assert result.return_value == 42


def test_deferred_task_is_ready(tasks, backend):
    result = tasks.noop.using(run_after=datetime.now(UTC) + timedelta(days=1)).enqueue()

    unfinished(backend.get_result(result.id))


def test_running_task_has_its_worker(tasks, backend, tmp_path):
    """In a real worker: the history is stored within a second after the start of the task."""
    result = tasks.waits_for.enqueue(str(tmp_path / "go"))
    consumer = backend.consumer()
    consumer.start()
    try:
        eventually(lambda: backend.get_result(result.id).started_at, "the history is stored")
        result.refresh()
        assert (result.status, result.attempts, len(result.worker_ids[0]) > 0) == ("RUNNING", 1, True)
        (tmp_path / "go").touch()
        eventually(lambda: backend.get_result(result.id).is_finished, "the task ends")
    finally:
        consumer.stop()
    result.refresh()
    finished(result, "SUCCESSFUL")


def test_task_that_ends_between_two_reads_has_its_result(tasks, run_worker, monkeypatch):
    result = tasks.meaning_of_life.enqueue()
    read = Queue.status

    def then_work(queue, id):
        status = read(queue, id)
        run_worker()
        return status

    monkeypatch.setattr(Queue, "status", then_work)
    result.refresh()

    assert result.return_value == 42


def test_cancelled_task_has_no_result(tasks, backend, exceptions):
    result = tasks.noop.enqueue()
    [queue] = [one.queue for one in backend.consumer().handlers if one.queue_name == "django-default"]
    assert queue.cancel(result.id.partition(":")[2]) == "cancelled"

    with pytest.raises(exceptions.TaskResultDoesNotExist):
        result.refresh()


def test_result_is_kept_for_a_day_or_as_the_handler_says(tasks, kit, run_worker, exceptions):
    result = tasks.meaning_of_life.enqueue()
    run_worker()
    kit.travel(86_390)
    result.refresh()
    assert result.return_value == 42
    kit.travel(20)
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        result.refresh()

    options = {"default": {"BACKEND": BACKEND, "OPTIONS": {"handler": {"keep": 60}}}}
    with override_settings(TASKS=options):
        result = tasks.meaning_of_life.enqueue()
        run_worker()
        kit.travel(70)
        with pytest.raises(exceptions.TaskResultDoesNotExist):
            result.refresh()


def test_task_with_a_result_larger_than_64_kib_succeeds_without_a_result(tasks, run_worker, exceptions):
    result = tasks.large_return_value.enqueue(70_000)

    assert len(run_worker().acked) == 1
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        result.refresh()
