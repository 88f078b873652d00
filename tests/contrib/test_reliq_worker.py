"""`manage.py reliq_worker`: the supervisor of `reliq worker` with the tasks of a Django project."""

import os
import sqlite3
from contextlib import closing

import pytest
from programs import python
from waiting import eventually
from worker_process import Command

pytestmark = pytest.mark.slow

MANAGE = """
import os, sys
from django.core.management import execute_from_command_line
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
execute_from_command_line(sys.argv)
"""
SETTINGS = """
import django
from pathlib import Path
BACKPORT = [] if django.VERSION >= (6,) else ["django_tasks"]
INSTALLED_APPS = ["reliq.contrib.django", "shop", *BACKPORT]
NAME = Path(__file__).parents[1] / "shop.db"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": NAME, "OPTIONS": {"timeout": 60}}}
BACKEND = {"BACKEND": "reliq.contrib.django.tasks.ReliqBackend"}
TASKS = {"default": BACKEND, "mails": BACKEND | {"QUEUES": ["mails"], "OPTIONS": {"handler": {"lease": 3}}}}
USE_TZ = True
"""
TASKS = """
import os, signal, time
from asgiref.sync import sync_to_async
from django.db import connection
try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

def note(text):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO ran VALUES (%s, %s)", [text, os.getpid()])

@task
def plain(number):
    note(f"plain {number}")
    return number

@task
async def coroutine(number):
    await sync_to_async(note)(f"async {number}")
    return number

@task(backend="mails", queue_name="mails")
def mail(to):
    note(to)

@task(backend="mails", queue_name="mails")
def kills():
    note("kills")
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGKILL)

@task
def breaks_connection():
    # like a database that has restarted: the connection is unusable, and a query has failed
    connection.ensure_connection()
    connection.connection.close()
    connection.errors_occurred = True

@task
async def abreaks_connection():
    await sync_to_async(breaks_connection.func)()
"""
CREATE = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection
call_command("migrate", verbosity=0)
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE ran (text TEXT, pid INTEGER)")
"""
ENQUEUE = """
import asyncio, django
django.setup()
from django.db import transaction
from shop.tasks import coroutine, plain
with transaction.atomic():
    results = [plain.enqueue(number) for number in range(200)]
async def others():
    return [await coroutine.aenqueue(number) for number in range(200)]
results += asyncio.run(others())
print(*(one.id for one in results))
"""
BROKEN = """
import django
django.setup()
from shop.tasks import *
breaks_connection.enqueue()
plain.enqueue(1)
abreaks_connection.enqueue()
coroutine.enqueue(2)
"""
STATUSES = """
import collections, sys, django
django.setup()
from shop.tasks import plain
results = [plain.get_backend().get_result(id) for id in sys.argv[1:]]
assert sorted(one.return_value for one in results) == sorted([*range(200)] * 2)
print(*collections.Counter(one.status for one in results).popitem())
"""
KINDS = ("plain", "async")


@pytest.fixture
def shop(tmp_path, url, project):
    """A folder with a Django project, its environment, and a function that runs Python in it."""
    files = {"manage.py": MANAGE, "shop/__init__.py": "", "shop/settings.py": SETTINGS, "shop/tasks.py": TASKS}
    (tmp_path / "shop").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "RELIQ_URL": url, "DJANGO_SETTINGS_MODULE": "shop.settings"}

    def run(*words):
        done = python(*words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-c", CREATE)
    return tmp_path, environment, run


@pytest.fixture
def start(shop):
    """Return a function that starts `manage.py reliq_worker` with options."""
    folder, environment, _ = shop
    started = []

    def start(*options, cwd=folder):
        started.append(Command(cwd, environment, *options, program=[str(folder / "manage.py"), "reliq_worker"]))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def ran(shop):
    """Return a function that returns the rows that tasks have written: text, process and connection."""

    def rows():
        with closing(sqlite3.connect(shop[0] / "shop.db")) as connection:
            return connection.execute("SELECT * FROM ran ORDER BY rowid").fetchall()

    return rows


def test_tasks_of_a_transaction_and_async_tasks_run_in_two_processes(shop, start, ran):
    folder, _, run = shop
    ids = run("-c", ENQUEUE).split()
    relayed = run("-m", "reliq", "relay", "--once", "--database", f"sqlite:///{folder / 'shop.db'}")
    worker = start("--processes", "2", "--burst")

    assert (worker.wait(), relayed) == (0, "moved 200 rows\n"), worker.lines
    assert sorted(text for text, *_ in ran()) == sorted(f"{kind} {number}" for kind in KINDS for number in range(200))
    assert len(set(ids)) == 400
    assert run("-c", STATUSES, *ids) == "SUCCESSFUL 400\n"


def test_worker_of_a_backend_runs_in_any_folder_and_stops_gracefully(shop, start, ran, tmp_path_factory):
    _, _, run = shop
    run("-c", "import django; django.setup(); from shop.tasks import *; mail.enqueue('ann'); plain.enqueue(1)")
    worker = start("--backend", "mails", cwd=tmp_path_factory.mktemp("elsewhere"))
    eventually(ran, "the task runs")

    assert worker.stop() == 0, worker.lines
    assert [text for text, *_ in ran()] == ["ann"]
    assert worker.said("tasks of Django's backend mails")


def test_each_task_gets_a_connection_that_works(shop, start, ran):
    _, _, run = shop
    run("-c", BROKEN)
    worker = start("--concurrency", "1", "--burst")

    assert worker.wait() == 0, worker.lines
    assert [text for text, *_ in ran()] == ["plain 1", "async 2"]


def test_task_that_kills_its_process_after_its_first_second_fails_after_five_deaths(shop, start, ran):
    """The history that is stored in the meantime does not count as progress of the task."""
    _, _, run = shop
    id = run("-c", "import django; django.setup(); from shop.tasks import *; print(kills.enqueue().id)").strip()
    worker = start("--backend", "mails", "--concurrency", "1")
    found = f"import django; django.setup(); from shop.tasks import *; print(kills.get_result({id!r}).status)"
    eventually(lambda: run("-c", found) == "FAILED\n", "the task fails", 120)

    assert worker.stop() == 0, worker.lines
    assert [text for text, *_ in ran()] == ["kills"] * 5


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--help"], 0, "Takes all options of `reliq worker`"),
        (["--backend", "other"], 2, "must have a Consumer named 'other'"),
        (["--proceses", "2"], 2, "--proceses"),
        (["--concurrency", "0"], 2, "concurrency must be 1"),
    ],
)
def test_wrong_options_end_the_command_with_the_reason(start, options, code, text):
    worker = start(*options)

    assert worker.wait() == code
    assert text in " ".join(" ".join(worker.lines).split())
