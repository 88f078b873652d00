"""Pages of docs/ with applications of their own: their programs, their tests, their notebook cell by cell."""

import asyncio
import re
import shlex
import subprocess
import sys
import warnings
from functools import partial
from uuid import uuid4

import django
import httpx
import pytest
from pages import BLOCK, blocks, commands
from programs import python
from starlette.applications import Starlette
from waiting import eventually
from written import attribute, parse, run_cells, run_module, run_tests

from reliq import Consumer, Queue

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette asks for a newer httpx
    from starlette.testclient import TestClient

pytestmark = pytest.mark.slow


def follow(line, server):
    """Run a command of a page in this process; for a server or a worker, import its target only."""
    words = shlex.split(line)
    if words[:3] == ["python", "-m", "pytest"]:
        assert run_tests(*words[3:], server=server) == 0, line
    elif words[:2] == ["python", "-m"]:
        run_module(words[2])
    elif words[0] == "reliq":
        parse(words[1:])
        assert words[1] != "worker" or isinstance(attribute(words[2]), Consumer)
    elif words[0] == "flask":
        assert attribute(f"{words[2]}:create_app")().test_client()
    else:
        assert words[0] == "uvicorn"
        assert callable(attribute(words[1]))


@pytest.mark.parametrize(
    "name",
    [
        *(f"integrations/{name}.md" for name in ("fastapi", "flask", "asyncio")),
        "production/schema-changes.md",
    ],
)
def test_programs_and_tests_of_a_page_run_as_written(name, written, kit_url, capsys):
    page = written(name)

    for line in commands(page):
        if line != "python -m shop.service":  # it runs until a signal
            follow(line, kit_url)

    said = capsys.readouterr().out.splitlines()
    for program in (text for language, text in BLOCK.findall(page.read_text("utf-8")) if language == "python"):
        assert [line for line in re.findall(r"print\(.*\)  # (.+)$", program, re.MULTILINE) if line not in said] == []


@pytest.mark.parametrize(
    ("name", "application", "method", "path", "body"),
    [
        ("fastapi", "shop.web:app", "POST", "/orders", {"number": 1, "email": "ann@shop.example"}),
        ("flask", "shop.web:create_app", "PUT", f"/invitations/{uuid4()}", {"friend": "x"}),
    ],
    ids=["fastapi", "flask"],
)
def test_application_answers_503_while_redis_is_full(name, application, method, path, body, written, client):
    written(f"integrations/{name}.md")
    client.config_set("maxmemory", 1)
    try:
        answer = request(attribute(application), method, path, body)
    finally:
        client.config_set("maxmemory", 0)

    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")


def request(application, method, path, body):
    """Send a request to a Starlette application, or to a Flask application from a factory."""
    if isinstance(application, Starlette):
        return TestClient(application).request(method, path, json=body)
    return application().test_client().open(path, method=method, json=body)


def test_fastapi_application_may_run_handlers_too(written, url, monkeypatch):
    written("integrations/fastapi.md")
    sent = []
    transport = httpx.MockTransport(lambda one: sent.append(one.headers["Idempotency-Key"]) or httpx.Response(200))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
    with TestClient(attribute("shop.single:app")) as client:
        client.post("/orders", json={"number": 7, "email": "ann@shop.example"})
        eventually(lambda: sent == ["order-7"], "the handler runs in the server's process")

    assert Queue("orders", url=url).counts().totals["acked"] == 1


def test_service_beside_other_coroutines_ends_at_a_signal(written, url, tmp_path):
    written("integrations/asyncio.md")
    pages = Queue("pages", str, url=url)
    pages.publish("https://shop.example/")
    with subprocess.Popen([sys.executable, "-m", "shop.service"], cwd=tmp_path, stdout=subprocess.PIPE) as program:
        eventually(lambda: pages.counts().alive == 0, "the page is fetched")
        program.terminate()
        assert (program.communicate(timeout=60)[0], program.returncode) == (b"https://shop.example/\n", 0)


DJANGO = """
import os, shlex, sys, manage
from django.core.management import execute_from_command_line
url = os.environ["RELIQ_URL"]
for line in sys.argv[1:]:
    execute_from_command_line(shlex.split(line)[1:])
os.environ["RELIQ_URL"] = url  # the tests have taken it away, and what serves the pages is another process

from shop.asgi import application
from django.contrib.auth.models import User
from django.test import Client
from starlette.testclient import TestClient

for name in ("ann", "staff", "nobody"):
    client = Client()
    if name != "nobody":
        client.force_login(User.objects.create_user(name, is_staff=name == "staff"))
    cookies = {key: one.value for key, one in client.cookies.items()}
    browser = TestClient(application, cookies=cookies, follow_redirects=False)
    page = browser.get("/ops/reliq/", headers={"host": "localhost"})
    print(f"{name}:{page.status_code}")
"""


ENQUEUED = """
import manage, django
django.setup()
from shop.models import Order
from shop.tasks import pack
pack.enqueue(Order.objects.create(email="ann@shop.example").pk)
"""
PACKED = """
import manage, django
django.setup()
from shop.models import Order
print(Order.objects.last().state)
"""


def test_django_project_migrates_runs_its_commands_and_its_tests(written, url, tmp_path):
    page = written("integrations/django.md")
    made, *lines = commands(page)
    assert made == "mkdir -p shop && touch shop/__init__.py"
    (tmp_path / "shop" / "__init__.py").touch()
    [worker] = [line for line in lines if "reliq_worker" in line]
    lines = [line for line in lines if line.startswith("python") and "runserver" not in line and line != worker]
    settings, tasks = tmp_path / "shop" / "settings.py", tmp_path / "shop" / "tasks.py"
    settings.write_text(settings.read_text() + "".join(blocks(page, "py")))
    if django.VERSION < (6,):  # as the page says
        settings.write_text(settings.read_text() + "INSTALLED_APPS.append('django_tasks')\n")
        tasks.write_text(tasks.read_text().replace("django.tasks", "django_tasks"))

    done = python("-c", DJANGO, *lines, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    enqueued = python("-c", ENQUEUED, cwd=tmp_path)
    assert enqueued.returncode == 0, enqueued.stderr
    worked = python(*shlex.split(worker)[1:], "--burst", cwd=tmp_path)
    assert (worked.returncode, python("-c", PACKED, cwd=tmp_path).stdout) == (0, "packed\n"), worked.stderr
    assert "Ran 2 tests" in done.stderr
    assert done.stdout.split()[-3:] == ["ann:303", "staff:200", "nobody:303"]


def cells_of(page):
    """Return the cells of a page, each with the output that the page shows, or None."""
    blocks = [one for one in BLOCK.findall(page.read_text("utf-8")) if one[0] != "sh" and ".py\n" not in one[1]]
    return [
        (text, after[1].strip() if after[0] == "text" else None)
        for (language, text), after in zip(blocks, [*blocks[1:], ("", "")], strict=True)
        if language == "python"
    ]


def test_notebook_shows_its_values_also_when_cells_run_again(written, url):
    page = written("integrations/jupyter.md")
    cells = cells_of(page)
    worker = attribute("shop.jobs:consumer")
    worker.start()
    try:
        first, again = asyncio.run(run_cells(cells, times=2))
    finally:
        worker.stop()

    assert len(first) == 3
    assert first == [wanted for _, wanted in cells if wanted]
    assert again == ["(0, 100)", *first[1:]]
    for line in commands(page):
        parse(shlex.split(line)[1:])
