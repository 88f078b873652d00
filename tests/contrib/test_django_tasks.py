"""
`ReliqBackend` under the cases of other backends of `django.tasks`, and its own promises.

The cases have the names of Django's tests (tests/tasks/test_tasks.py, test_immediate_backend.py) and of the tests of
django-tasks and django-tasks-rq.
"""

import asyncio
import sys
import unittest
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.db import connection, connections, transaction
from django.test import TestCase, override_settings

from reliq import Layout, Queue

BACKEND = "reliq.contrib.django.tasks.ReliqBackend"


@pytest.fixture
def framework(project):
    """The package `django.tasks` or `django_tasks`."""
    return sys.modules[project]


@pytest.fixture
def signals(project):
    """The names of all signals with the status, or the value of a successful task, in order."""
    seen = []

    def receive(name, task_result, **_):
        seen.append((name, task_result.return_value if task_result.status == "SUCCESSFUL" else task_result.status))

    module = sys.modules[f"{project}.signals"]
    receivers = {}
    for name in ("task_enqueued", "task_started", "task_finished"):
        receivers[name] = partial(receive, name)
        getattr(module, name).connect(receivers[name])
    yield seen
    for name, receiver in receivers.items():
        getattr(module, name).disconnect(receiver)


def invalid_task(framework):
    exceptions = sys.modules[f"{framework.__name__}.exceptions"]
    return getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError


def ready(result):
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    assert [result.started_at, result.last_attempted_at, result.finished_at] == [None] * 3
    assert abs((datetime.now(UTC) - result.enqueued_at).total_seconds()) < 60
    with pytest.raises(ValueError, match="Task has not finished yet"):
        result.return_value  # noqa: B018  the attribute raises


def outbox_rows(alias="default"):
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM reliq_outbox WHERE sent_ms IS NULL")
        return cursor.fetchone()[0]


@pytest.fixture(autouse=True)
def _empty_outbox(project):
    yield
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM reliq_outbox")


# ---- cases of test_tasks.py, test_immediate_backend.py and of django-tasks-rq: enqueue


def test_using_correct_backend(framework, backends):
    from reliq.contrib.django.tasks import ReliqBackend

    assert framework.default_task_backend == backends["default"]
    assert isinstance(backends["default"], ReliqBackend)
    assert framework.default_task_backend.alias == "default"
    assert framework.default_task_backend.options == {"queue": {"retries": 0}}


def test_backend_supports_all_features(backend):
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_priority


@pytest.mark.parametrize("name", ["noop", "noop_async", "noop_from_bare_decorator"])
def test_enqueue_task(tasks, run_worker, name):
    task = getattr(tasks, name)
    result = task.enqueue(1, two=3)

    ready(result)
    assert (result.task, result.args, result.kwargs) == (task, [1], {"two": 3})
    assert len(run_worker().acked) == 1
    assert tasks.SEEN == [((1,), {"two": 3})]


@pytest.mark.parametrize("name", ["noop", "noop_async"])
def test_enqueue_task_async(tasks, run_worker, name):
    task = getattr(tasks, name)
    result = asyncio.run(task.aenqueue())

    ready(result)
    assert (result.task, result.args, result.kwargs) == (task, [], {})
    run_worker()
    assert tasks.SEEN == [((), {})]


def test_enqueue_with_invalid_argument(tasks):
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.noop.enqueue(datetime.now(UTC))
    with pytest.raises(TypeError, match="Unsupported type"):
        asyncio.run(tasks.noop.aenqueue(datetime.now(UTC)))


def test_using_run_after(tasks, kit, run_worker):
    result = tasks.noop.using(run_after=datetime.now(UTC) + timedelta(days=3)).enqueue()

    ready(result)
    assert run_worker().acked == []
    kit.travel(3 * 86_400)
    assert len(run_worker().acked) == 1


def test_naive_datetime(framework, tasks):
    with pytest.raises(invalid_task(framework), match="run_after must be an aware datetime"):
        tasks.noop.using(run_after=datetime.now())  # noqa: DTZ005


def test_invalid_priority(framework, tasks):
    for priority in (-101, 101, 3.1):
        with pytest.raises(invalid_task(framework), match="priority must be a whole number between -100 and 100"):
            tasks.noop.using(priority=priority)
    for priority in (-100, 0, 100):
        tasks.noop.using(priority=priority)


def test_priority_chooses_one_of_three_weighted_classes(tasks, kit, backend):
    for priority in (-100, -1, 0, 1, 100):
        tasks.noop.using(priority=priority).enqueue(priority)

    [queue] = [handler.queue for handler in backend.consumer().handlers if handler.queue_name == "django-default"]
    found = {one.body["args"][0]: one.priority for one in kit.published(queue)}
    assert found == {-100: "low", -1: "low", 0: "normal", 1: "high", 100: "high"}


def test_unknown_queue_name(framework, tasks):
    with pytest.raises(invalid_task(framework), match="Queue 'queue-2' is not valid for backend"):
        tasks.noop.using(queue_name="queue-2")


def test_validate_on_enqueue(framework, tasks):
    custom = tasks.noop.using(queue_name="queue-1")
    options = {"default": {"BACKEND": BACKEND, "QUEUES": ["other"]}}
    with override_settings(TASKS=options):
        with pytest.raises(invalid_task(framework), match="Queue 'queue-1' is not valid for backend"):
            custom.enqueue()
        with pytest.raises(invalid_task(framework), match="Queue 'queue-1' is not valid for backend"):
            asyncio.run(custom.aenqueue())


def test_invalid_function(framework, project):
    for function in (any, test_invalid_function.__get__(object())):
        with pytest.raises(invalid_task(framework), match="Task function must be defined at a module level"):
            framework.task()(function)


def test_takes_context_without_taking_context(framework, tasks):
    with pytest.raises(invalid_task(framework), match="does not have a first argument of 'context'"):
        framework.task(takes_context=True)(tasks.meaning_of_life.func)


def test_call_task_directly(tasks):
    assert tasks.meaning_of_life.call() == 42
    assert asyncio.run(tasks.meaning_of_life.acall()) == 42
    assert asyncio.run(tasks.meaning_of_life_async.acall()) == 42
    assert tasks.meaning_of_life_async.call() == 42


def test_queue_isolation(tasks, kit, backend):
    tasks.noop.enqueue()
    tasks.noop.using(queue_name="queue-1").enqueue()

    queues = {handler.queue_name: handler.queue for handler in backend.consumer().handlers}
    assert {name: len(kit.published(queue)) for name, queue in queues.items()} == {
        "django-default": 1,
        "django-queue-1": 1,
    }


# ---- signals, logs, context


def test_enqueue_logs(tasks, caplog):
    with caplog.at_level("DEBUG", "django"), caplog.at_level("DEBUG", "django_tasks"):
        result = tasks.noop.enqueue()
    assert [one.getMessage() for one in caplog.records if "enqueued" in one.getMessage()] == [
        f"Task id={result.id} path=shop_tasks.tasks.noop enqueued backend=default"
    ]


@pytest.mark.parametrize("name", ["meaning_of_life", "meaning_of_life_async"])
def test_started_finished_signals(tasks, run_worker, signals, name):
    getattr(tasks, name).enqueue()
    run_worker()

    assert signals == [("task_enqueued", "READY"), ("task_started", "RUNNING"), ("task_finished", 42)]


@pytest.mark.parametrize("name", ["value_error", "value_error_async", "system_exit", "complex_return_value"])
def test_failed_signals(tasks, run_worker, signals, name):
    getattr(tasks, name).enqueue()

    assert len(run_worker().dead) == 1
    assert signals == [("task_enqueued", "READY"), ("task_started", "RUNNING"), ("task_finished", "FAILED")]


def test_failed_logs(tasks, run_worker, caplog):
    tasks.value_error.enqueue()
    with caplog.at_level("DEBUG"):
        run_worker()

    [failed] = [one for one in caplog.records if "state=FAILED" in one.getMessage()]
    assert failed.exc_info[0] is ValueError


def test_receiver_that_raises_does_not_fail_the_task(project, tasks, run_worker):
    def raises(**_):
        raise RuntimeError("the receiver is broken")

    signal = sys.modules[f"{project}.signals"].task_finished
    signal.connect(raises)
    try:
        tasks.noop.enqueue()
        assert len(run_worker().acked) == 1
    finally:
        signal.disconnect(raises)


def test_takes_context(tasks, run_worker):
    result = tasks.task_id.enqueue()
    tasks.async_context.enqueue(word="hello")
    run_worker()

    assert [result.id, (True, 1, "hello")] == tasks.SEEN


def test_context_counts_attempts_and_has_the_errors_of_earlier_attempts(tasks, run_worker):
    tasks.fails_until.using(backend="retried").enqueue(3)
    done = run_worker("retried", scheduled=True)

    assert (len(done.acked), len(done.nacked)) == (1, 2)
    attempts, workers, traces = zip(*tasks.SEEN, strict=True)
    assert attempts == (1, 2, 3)
    assert [len(ids) for ids in workers] == [1, 2, 3]
    assert [[trace.splitlines()[-1] for trace in one] for one in traces] == [
        [],
        ["ValueError: attempt 1"],
        ["ValueError: attempt 1", "ValueError: attempt 2"],
    ]


def test_retry_that_is_pending_sends_no_finished_signal(tasks, run_worker, signals):
    tasks.value_error.using(backend="retried").enqueue()
    run_worker("retried", scheduled=True)

    assert [name for name, _ in signals] == ["task_enqueued", *["task_started"] * 3, "task_finished"]


def test_result_that_json_cannot_hold_is_not_retried(tasks, run_worker):
    tasks.complex_return_value.using(backend="retried").enqueue()

    assert len(run_worker("retried").dead) == 1


def test_task_may_raise_the_outcomes_of_reliq(tasks, run_worker, signals):
    tasks.snoozed_once.enqueue()
    done = run_worker(scheduled=True)

    assert (len(done.snoozed), len(done.acked)) == (1, 1)
    assert [name for name, _ in signals][1:] == ["task_started", "task_started", "task_finished"]


# ---- transactions


def test_enqueue_in_a_transaction_commits_with_it(tasks, run_worker):
    with transaction.atomic():
        result = tasks.noop.enqueue(1)
        assert outbox_rows() == 1
    ready(result)
    assert run_worker().acked == []
    assert run_worker(outbox=connection).acked == [result.id.partition(":")[2]]
    assert tasks.SEEN == [((1,), {})]


def test_aenqueue_publishes_in_the_transaction_of_its_thread(tasks):
    from asgiref.sync import sync_to_async

    async def both():
        def opened():
            block = transaction.atomic()
            block.__enter__()
            return block

        block = await sync_to_async(opened)()
        await tasks.noop.aenqueue()
        rows = await sync_to_async(outbox_rows)()
        await sync_to_async(block.__exit__)(None, None, None)
        return rows

    assert asyncio.run(both()) == 1


def test_rollback_removes_the_task(tasks):
    with transaction.atomic():
        tasks.noop.enqueue()
        transaction.set_rollback(True)
    assert outbox_rows() == 0


def test_rollback_of_a_savepoint_removes_the_task(tasks):
    with transaction.atomic():
        tasks.noop.enqueue("kept")
        with transaction.atomic():
            tasks.noop.enqueue("gone")
            transaction.set_rollback(True)
    assert outbox_rows() == 1


def test_doesnt_wait_until_transaction_commit_without_outbox(tasks, backends, run_worker):
    options = {"default": {"BACKEND": BACKEND, "OPTIONS": {"outbox": None}}}
    with override_settings(TASKS=options), transaction.atomic():
        tasks.noop.enqueue()
        assert outbox_rows() == 0
        assert len(run_worker().acked) == 1


def test_transaction_of_another_database_does_not_delay_the_task(tasks, run_worker):
    with transaction.atomic(using="other"):
        tasks.noop.enqueue()
        assert len(run_worker().acked) == 1


def test_run_after_in_a_transaction(tasks, kit, run_worker):
    with transaction.atomic():
        tasks.noop.using(run_after=datetime.now(UTC) + timedelta(hours=1)).enqueue()

    assert run_worker(outbox=connection).acked == []
    kit.travel(3600)
    assert len(run_worker().acked) == 1


def test_block_of_a_test_case_is_no_transaction_of_the_application(tasks, run_worker):
    class Shop(TestCase):
        def test(self):
            tasks.noop.enqueue()
            assert outbox_rows() == 0
            with transaction.atomic():
                tasks.noop.enqueue()
            assert outbox_rows() == 1

    outcome = unittest.TestResult()
    unittest.TestSuite([Shop("test")]).run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    assert len(run_worker().acked) == 1


# ---- the path of a task


def test_task_outside_of_the_module_tasks_is_found_by_its_path(tasks, run_worker):
    import shop_tasks.later

    shop_tasks.later.greet.enqueue("ann")
    run_worker()

    assert tasks.SEEN == ["hello ann"]


@pytest.mark.parametrize(
    "path",
    [
        "subprocess.check_output",
        "antigravity.fly",
        "shop_tasks_evil.tasks.noop",
        "shop_tasks.later.plain_function",
        "shop_tasks.tasks.SEEN",
        "shop_tasks.missing.task",
        "shop_tasks.raises_at_import.task",
        "shop_tasks",
        "",
        "..",
        "noop",
    ],
)
def test_hostile_path_is_not_imported_and_left_to_other_workers(tasks, run_worker, kit, backend, path):
    queue = Queue("django-default")
    queue.publish({"args": [], "kwargs": {}}, headers={"reliq-task": path})

    done = run_worker()

    assert (len(done.snoozed), done.acked, done.dead) == (1, [], [])
    assert "antigravity" not in sys.modules
    assert tasks.SEEN == []


def test_unknown_task_with_another_body_is_left_unspent(tasks, run_worker):
    Queue("django-default", bytes).publish(b"\xff", headers={"reliq-task": "another.app"})

    assert len(run_worker().snoozed) == 1


@pytest.mark.parametrize("name", ["nested", "renamed", "foreign"])
def test_task_that_no_worker_could_find_is_refused_at_its_enqueue(framework, tasks, name):
    import shop_tasks.later

    if name == "nested":
        task, reason = shop_tasks.later.Group.nested, "cannot import the task"
    elif name == "renamed":
        task, reason = framework.task(shop_tasks.later.plain_function), "is not a task in a module of INSTALLED_APPS"
    else:
        task, reason = framework.task(outbox_rows), "is not a task in a module of INSTALLED_APPS"
    with pytest.raises(invalid_task(framework), match=reason):
        task.enqueue()


def test_find_task_raises_for_other_modules(project):
    from reliq.contrib.django.backend import find_task

    with pytest.raises(
        SuspiciousOperation, match="subprocess.check_output is not a task in a module of INSTALLED_APPS"
    ):
        find_task("subprocess.check_output")


# ---- settings and checks


def test_check(backend):
    assert list(backend.check()) == []


def test_check_warns_without_the_app(backend):
    with override_settings(INSTALLED_APPS=["shop_tasks"]):
        [warning] = backend.check()
    assert warning.id == "reliq.W001"
    assert 'add "reliq.contrib.django" to INSTALLED_APPS' in warning.hint


def test_check_warns_without_the_tables(backends):
    options = {"default": {"BACKEND": BACKEND, "OPTIONS": {"outbox": "other"}}}
    with override_settings(TASKS=options):
        assert list(backends["default"].check()) == []  # the database is empty: it will be migrated
        with connections["other"].cursor() as cursor:
            cursor.execute("CREATE TABLE something (id integer)")
        [warning] = backends["default"].check()
    assert "run `manage.py migrate`" in warning.hint


def test_check_without_outbox_needs_no_tables(backends):
    options = {"default": {"BACKEND": BACKEND, "OPTIONS": {"outbox": None}}}
    with override_settings(TASKS=options, INSTALLED_APPS=["shop_tasks"]):
        assert list(backends["default"].check()) == []


def test_misspelled_option_is_refused(backends):
    options = {"default": {"BACKEND": BACKEND, "OPTIONS": {"prefx": "x"}}}
    with override_settings(TASKS=options), pytest.raises(TypeError, match="'prefx'. Did you mean 'prefix'"):
        backends["default"]


def test_empty_list_of_queues_is_refused(backends):
    options = {"default": {"BACKEND": BACKEND, "QUEUES": []}}
    with override_settings(TASKS=options), pytest.raises(ImproperlyConfigured, match="must name the queues"):
        backends["default"]


def test_layout_of_go_is_refused_by_its_name(backends):
    options = {"default": {"BACKEND": BACKEND, "OPTIONS": {"queue": {"layout": Layout.hdt3213()}}}}
    with override_settings(TASKS=options), pytest.raises(ImproperlyConfigured, match="hdt3213"):
        backends["default"]


def test_module_tasks_can_be_imported_without_a_tasks_framework():
    """Celery imports the modules `tasks` of all apps, also where neither Django 6 nor django-tasks is installed."""
    import subprocess

    text = "import sys; sys.modules['django'] = None; import reliq.contrib.django.tasks as t; hasattr(t, 'shared_task')"
    subprocess.run([sys.executable, "-c", text], check=True)
