"""What the pages of docs/migrating show of other queues: read as Python, and with `--long` installed, run and forwarded."""

import ast
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from conftest import parse
from pages import ROOT, blocks, commands, programs
from waiting import eventually

from benchmarks.catalogue import PEERS
from reliq import Layout, Queue
from reliq.testing import isolated

FILES = ("arq.md", "celery.md", "dramatiq.md", "hdt3213.md", "rq.md")
PAGES = {file.removesuffix(".md"): ROOT / "docs" / "migrating" / file for file in FILES}


@dataclass(frozen=True)
class Old:
    """
    Another queue: how its worker starts, and what it has left.

    Attributes:
        publish: the module whose last version before reliq publishes when it is run.
        worker: the arguments of Python that start its worker, but for the URL.
        left: counts what waits, runs or is due later.
        ends: what becomes of the published in reliq, by queue.
    """

    publish: str
    worker: tuple[str, ...]
    left: Callable[[redis.Redis], int]
    ends: dict[str, dict[str, int]]


def size(client, *keys):
    """How many members these keys have together, whatever their types."""
    count = {"list": client.llen, "zset": client.zcard, "hash": client.hlen, "none": lambda _key: 0}
    return sum(count[client.type(key).decode()](key) for key in keys)


OLD = {
    "celery": Old(
        "tasks",
        ("-m", "celery", "-A", "tasks", "worker", "--pool", "threads", "--concurrency", "4"),
        lambda client: size(client, "celery", "unacked"),
        {"receipts": {"acked": 1, "dead": 1}},
    ),
    "rq": Old(
        "jobs",
        ("-m", "rq.cli", "worker", "pages", "--with-scheduler", "--url", "{url}"),
        lambda client: size(client, "rq:queue:pages", *(f"rq:{at}:pages" for at in ("scheduled", "deferred", "wip"))),
        {"pages": {"acked": 2, "dead": 1}},
    ),
    "dramatiq": Old(
        "actors",
        ("-m", "dramatiq", "actors", "--processes", "1", "--path", "."),
        lambda client: size(client, "dramatiq:pages.msgs", "dramatiq:pages.DQ.msgs"),
        {"pages": {"acked": 1, "dead": 1}},
    ),
    "arq": Old(
        "jobs",
        ("-m", "arq", "jobs.WorkerSettings"),
        lambda client: size(client, "arq:queue"),
        {"greetings": {"acked": 2, "dead": 0}},
    ),
}
#: What becomes of the messages that the programs of a page publish: queue, layout, ends.
ENDS = {name: (queue, Layout.RELIQ, ends) for name, was in OLD.items() for queue, ends in was.ends.items()}
ENDS["hdt3213"] = ("order:deadlines", Layout.hdt3213(), {"acked": 1, "dead": 1})
#: A pipeline is to run out in the old code: what is forwarded are messages of one actor.
PUBLISH = {"dramatiq": "from actors import fetch; fetch.send('a:b'); fetch.send_with_options(args=('c',), delay=2000)"}
each_old = pytest.mark.parametrize("name", OLD)


@pytest.fixture
def page_of(shop, monkeypatch):
    """Have a page's programs be importable while the test runs; return what makes its other commands."""
    monkeypatch.syspath_prepend("")
    yield lambda name: shop(PAGES[name])
    for module in [module for module in sys.modules if module.partition(".")[0] == "shop"]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ENDS)
def test_reliqs_side_of_a_page_works_as_it_is_written(name, page_of, url):
    make, said = page_of(name), ""
    with isolated(url) as reliq:
        for line in commands(PAGES[name]):
            match shlex.split(line):
                case ["python", "-m", module]:
                    runpy.run_module(module, run_name="__main__")
                case ["reliq", "worker", consumer, *_] as words:
                    parse(words[1:])
                    module, _, attribute = consumer.partition(":")
                    reliq.drain(getattr(importlib.import_module(module), attribute), scheduled=True, fail_fast=False)
                case _:
                    said += make(line)
        queue, layout, ends = ENDS[name]
        totals = Queue(queue, url=url, layout=layout).counts().totals

    assert {end: totals.get(end, 0) for end in ends} == ends
    assert totals.get("dead", 0) == len(re.findall(r" (?:failed|rejected) ", said))


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_the_programs_of_another_queue_are_python_and_import_what_the_page_has(page):
    here = {
        name.removesuffix(".py").replace("/", "."): {
            *(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)),
            *(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)),
        }
        for name, text in programs(page).items()
    }

    for block in blocks(page, "py"):
        assert re.match(r"# \w+\.py\n", block)
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("shop."):
                assert {alias.name for alias in node.names} - here[node.module] == set()


@each_old
def test_a_page_names_the_version_that_the_benchmarks_have(name):
    [wanted] = [peer.requirements[0] for peer in PEERS if peer.module == name]
    version = re.search(r"==(\d+\.\d+)", wanted)[1]

    assert re.search(rf"Checked against {name} {re.escape(version)}\b", PAGES[name].read_text("utf-8"), re.IGNORECASE)


def test_the_comparison_names_the_versions_that_the_benchmarks_have():
    text = (ROOT / "docs" / "comparison.md").read_text("utf-8").replace("\n", " ")
    told = dict(re.findall(r"(\w[\w-]*) (\d+\.\d+)\b", text[: text.index("## Which to choose")]))
    pinned = [re.match(r"([\w-]+)(?:\[.*\])?==(\d+\.\d+)", peer.requirements[0]) for peer in PEERS if peer.requirements]

    versions = {found[1]: found[2] for found in pinned if found and found[1] != "bullmq"}
    assert {name.lower(): version for name, version in told.items() if name != "taskiq"} == versions


@pytest.fixture(params=OLD)
def old(request, tmp_path, url, monkeypatch):
    """Install another queue beside reliq, and write both versions of its program down: (name, its Python, folders)."""
    if not request.config.getoption("--long"):
        pytest.skip("--long installs other queues")
    name = request.param
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", str(ROOT))))
    python = tmp_path / "venv" / "bin" / "python"
    [requirements] = [peer.requirements for peer in PEERS if peer.module == name]
    for words in (
        ("venv", str(tmp_path / "venv")),
        ("pip", "install", "--python", str(python), *requirements, str(ROOT)),
    ):
        subprocess.run([sys.executable, "-m", "uv", *words], check=True, timeout=300)
    before, *_, forward = (text for text in blocks(PAGES[name], "py") if text.startswith(f"# {OLD[name].publish}.py"))
    for folder, text in (("before", before), ("forward", forward)):
        (tmp_path / folder / "shop").mkdir(parents=True)
        (tmp_path / folder / f"{OLD[name].publish}.py").write_text(text.replace("redis://127.0.0.1:6379/0", url))
        for file, program in programs(PAGES[name]).items():
            (tmp_path / folder / file).write_text(program)
    return name, str(python), tmp_path


@contextmanager
def working(python: str, words: tuple[str, ...], folder: Path):
    """Have its worker run in a folder while the block runs, and end it in peace."""
    process = subprocess.Popen([python, *words], cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_what_another_queue_holds_is_forwarded_and_worked(old, client, url):
    name, python, folder = old
    was = OLD[name]
    publish = ("-c", PUBLISH[name]) if name in PUBLISH else (f"{was.publish}.py",)
    subprocess.run([python, *publish], cwd=folder / "before", check=True, timeout=60)
    assert was.left(client) > 0

    with working(python, tuple(word.format(url=url) for word in was.worker), folder / "forward"):
        eventually(lambda: was.left(client) == 0, f"{name} has forwarded everything")
    [module] = {file.removeprefix("shop/").removesuffix(".py") for file in programs(PAGES[name])} & WORKED
    worker = ("-m", "reliq", "worker", f"shop.{module}:consumer", "--burst=delayed")
    subprocess.run([python, *worker], cwd=folder / "forward", check=True, timeout=120)

    for queue, ends in was.ends.items():
        counts = Queue(queue, url=url).counts()
        assert {end: counts.totals.get(end, 0) for end in ends} == ends
        assert counts.totals["published"] == sum(ends.values())


#: The modules of the pages that have a consumer.
WORKED = {"receipts", "pages", "actors", "greetings"}
