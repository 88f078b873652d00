"""What docs/howto/ shows, run as it stands: its tests, its notebook cell by cell."""

import asyncio
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
from pages import BLOCK, ROOT, commands
from starlette.applications import Starlette
from waiting import eventually
from written import attribute, parse, run_cells, run_module, run_tests

from reliq import Consumer, PublishFailed, Queue

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it asks for a newer httpx
    from starlette.testclient import TestClient


def follow(line, server):
    """Make a command of a page in this process; of a server or a worker import what it names."""
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


@pytest.mark.parametrize("name", ["fastapi.md", "starlette.md", "flask.md", "asyncio.md", "types.md", "deploys.md"])
def test_the_programs_and_tests_of_a_page_run_as_they_are_written(name, written, kit_url, capsys):
    page = written(f"howto/{name}")

    for line in commands(page):
        if line != "python -m shop.service":  # which works until a signal
            follow(line, kit_url)

    said = capsys.readouterr().out.splitlines()
    for program in (text for language, text in BLOCK.findall(page.read_text("utf-8")) if language == "python"):
        assert [line for line in re.findall(r"print\(.*\)  # (.+)$", program, re.MULTILINE) if line not in said] == []


@pytest.mark.parametrize(
    ("name", "application", "method", "path", "body"),
    [
        ("starlette.md", "shop.web:app", "POST", "/orders", {"number": 1}),
        (
            "flask.md",
            "shop.web:create_app",
            "PUT",
            "/invitations/6f3c6a52-3f0c-4d44-8d2a-0c6e7a0c5a11",
            {"friend": "x"},
        ),
    ],
)
def test_while_redis_takes_nothing_the_visitor_is_asked_to_try_again(
    name, application, method, path, body, written, client
):
    written(f"howto/{name}")
    client.config_set("maxmemory", 1)
    try:
        answer = request(attribute(application), method, path, body)
    finally:
        client.config_set("maxmemory", 0)

    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")


def request(application, method, path, body):
    """Make a request to an application of Starlette, or to one that a factory of Flask's makes."""
    if isinstance(application, Starlette):
        return TestClient(application).request(method, path, json=body)
    return application().test_client().open(path, method=method, json=body)


def test_an_application_of_starlette_may_work_too(written, url, monkeypatch):
    written("howto/starlette.md")
    monkeypatch.setenv("SHOP_WORKS", "1")
    orders = Queue("orders", url=url)
    with TestClient(attribute("shop.web:app")) as client:
        client.post("/orders", json={"number": 7})
        orders.reschedule("order-7", delay=0)
        eventually(lambda: attribute("shop.jobs:closed") == [7], "the handler runs in the server's process")

    assert orders.counts().totals["acked"] == 1


def test_the_program_that_works_beside_its_own_coroutines_ends_at_a_signal(written, url, tmp_path):
    written("howto/asyncio.md")
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


def test_a_project_of_django_migrates_runs_its_commands_and_passes_its_tests(written, url, tmp_path):
    made, *lines = commands(written("howto/django.md"))
    assert made == "mkdir -p shop && touch shop/__init__.py"
    (tmp_path / "shop" / "__init__.py").touch()
    lines = [line for line in lines if line.startswith("python") and "runserver" not in line]

    done = subprocess.run(
        [sys.executable, "-c", DJANGO, *lines], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert "0 reminders" in done.stdout
    assert "Ran 2 tests" in done.stderr
    assert done.stdout.split()[-3:] == ["ann:303", "staff:200", "nobody:303"]


def cells_of(page):
    """The cells of a page, each with what the page shows below it; None where it shows nothing."""
    blocks = [one for one in BLOCK.findall(page.read_text("utf-8")) if one[0] != "sh" and ".py\n" not in one[1]]
    return [
        (text, after[1].strip() if after[0] == "text" else None)
        for (language, text), after in zip(blocks, [*blocks[1:], ("", "")], strict=True)
        if language == "python"
    ]


def test_a_notebook_says_cell_by_cell_what_it_is_to_say_and_its_cells_may_be_run_again(written, url):
    page = written("howto/jupyter.md")
    cells = cells_of(page)
    worker = attribute("shop.jobs:consumer")
    worker.start()
    try:
        first, again = asyncio.run(run_cells(cells, times=2))
    finally:
        worker.stop()

    assert len(first) == 5
    assert first == [wanted for _, wanted in cells if wanted]
    assert again == ["'duplicate'", "(0, 100)", *first[2:]]
    for line in commands(page):
        parse(shlex.split(line)[1:])


def test_a_kernel_of_jupyter_says_the_same(written, request, tmp_path):
    if not request.config.getoption("--long"):
        pytest.skip("--long starts a kernel")
    client = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel brings a kernel")
    from nbformat import v4

    cells = 2 * cells_of(written("howto/jupyter.md"))
    notebook = v4.new_notebook(cells=[v4.new_code_cell(text) for text, _ in cells])
    worker = attribute("shop.jobs:consumer")
    worker.start()
    try:
        client.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        worker.stop()

    shown = ["".join(one["data"]["text/plain"] for one in cell.outputs if "data" in one) for cell in notebook.cells]
    wanted = [text or "" for _, text in cells]
    for at, text in ((0, "'duplicate'"), (1, "(0, 100)")):  # of the second time
        wanted[len(cells) // 2 + at] = text
    assert shown == wanted


MESSAGES = """
class Fit: ...
Fit = dataclass(Fit)
FITS = Queue("fits-trial", Fit, url=url)
class Fit: ...
Fit = dataclass(Fit)
FITS.publish(Fit())
# ----
trial = Consumer()
trial.handler(FITS)(handler)
trial.handler(FITS)(handler)
# ----
trial.start()
trial.start()
# ----
waiting = asyncio.sleep(0)
try:
    asyncio.run(waiting)
finally:
    waiting.close()
"""


def test_what_cells_that_are_run_again_say_is_what_the_page_says(url):
    page = (ROOT / "docs" / "howto" / "jupyter.md").read_text("utf-8")
    *table, away = re.findall(r"^\| `(.+?)` \| ", page, re.MULTILINE)
    names = {"dataclass": dataclass, "Queue": Queue, "Consumer": Consumer, "asyncio": asyncio, "url": url}
    names["handler"] = lambda body: None
    said = []

    async def notebook():
        for cell in MESSAGES.split("# ----"):
            with pytest.raises(Exception) as caught:
                exec(cell, names)
            said.append(f"{caught.typename}: {caught.value}")

    asyncio.run(notebook())
    names["trial"].stop()

    assert away == PublishFailed.__name__
    assert len(table) == len(said) == 4
    assert [message for message, line in zip(table, said, strict=True) if message not in line] == []
