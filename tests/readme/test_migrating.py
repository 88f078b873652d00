"""What the pages of docs/migrating show of other queues: read as Python, and with `--long` installed, run and forwarded."""

import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import redis
from conftest import parse
from pages import ROOT, blocks, commands, programs
from waiting import eventually

from benchmarks.catalogue import PEERS
from reliq import Layout, Queue
from reliq.embedded import EmbeddedRedis
from reliq.testing import isolated

FILES = ("arq.md", "celery.md", "dramatiq.md", "hdt3213.md", "rq.md")
PAGES = {file.removesuffix(".md"): ROOT / "docs" / "migrating" / file for file in FILES}


@dataclass(frozen=True)
class Old:
    """
    Another queue: how its worker starts, and what it has left.

    Attributes:
        module: its program on the page, before reliq and as the forwarder.
        worker: the arguments of Python that start its worker, but for the URL.
        left: counts what waits, runs or is due later.
        ours: the module of the page that has the consumer of reliq.
        queue: the queue of reliq that gets its messages.
        ends: what becomes of them there.
        publish: the code that publishes, where it is not the module itself.
    """

    module: str
    worker: tuple[str, ...]
    left: Callable[[redis.Redis], int]
    ours: str
    queue: str
    ends: dict[str, int]
    publish: str = ""


def size(client, *keys):
    """How many members these keys have together, whatever their types."""
    count = {"list": client.llen, "zset": client.zcard, "hash": client.hlen, "none": lambda _key: 0}
    return sum(count[client.type(key).decode()](key) for key in keys)


OLD = {
    "celery": Old(
        "tasks",
        ("-m", "celery", "-A", "tasks", "worker", "--pool", "threads", "--concurrency", "4"),
        lambda client: size(client, "celery", "unacked"),
        "receipts",
        "receipts",
        {"acked": 1, "dead": 1},
    ),
    "rq": Old(
        "jobs",
        ("-m", "rq.cli", "worker", "pages", "--with-scheduler", "--url", "{url}"),
        lambda client: size(client, "rq:queue:pages", *(f"rq:{at}:pages" for at in ("scheduled", "deferred", "wip"))),
        "pages",
        "pages",
        {"acked": 2, "dead": 1},
    ),
    "dramatiq": Old(
        "actors",
        ("-m", "dramatiq", "actors", "--processes", "1", "--path", "."),
        lambda client: size(client, "dramatiq:pages.msgs", "dramatiq:pages.DQ.msgs"),
        "actors",
        "pages",
        {"acked": 1, "dead": 1},
        # A pipeline is to run out in the old code: what is forwarded are messages of one actor.
        publish="from actors import fetch; fetch.send('a:b'); fetch.send_with_options(args=('c',), delay=2000)",
    ),
    "arq": Old(
        "jobs",
        ("-m", "arq", "jobs.WorkerSettings"),
        lambda client: size(client, "arq:queue"),
        "greetings",
        "greetings",
        {"acked": 2, "dead": 0},
    ),
}
#: What becomes of the messages that the programs of a page publish: queue, layout, ends.
ENDS = {name: (was.queue, Layout.RELIQ, was.ends) for name, was in OLD.items()}
ENDS["hdt3213"] = ("order:deadlines", Layout.hdt3213(), {"acked": 1, "dead": 1})
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
def old(request, tmp_path, monkeypatch):
    """Install another queue beside reliq, and write both versions of its program down: (what it is, its Python, URL)."""
    if not request.config.getoption("--long"):
        pytest.skip("--long installs other queues")
    was, page, python = OLD[request.param], PAGES[request.param], tmp_path / "venv" / "bin" / "python"
    [requirements] = [peer.requirements for peer in PEERS if peer.module == request.param]
    for words in (("venv", python.parents[1]), ("pip", "install", "--python", python, *requirements, ROOT)):
        subprocess.run([sys.executable, "-m", "uv", *map(str, words)], check=True)
    before, *_, forward = (text for text in blocks(page, "py") if text.startswith(f"# {was.module}.py"))
    with EmbeddedRedis(port=None) as server:
        monkeypatch.setenv("RELIQ_URL", server.url)
        monkeypatch.setenv("PYTHONPATH", ".")
        for folder, text in (("before", before), ("forward", forward)):
            (tmp_path / folder / "shop").mkdir(parents=True)
            for file, program in {f"{was.module}.py": text, **programs(page)}.items():
                (tmp_path / folder / file).write_text(program.replace("redis://127.0.0.1:6379/0", server.url))
        yield was, str(python), server.url


@pytest.mark.timeout(600)
def test_what_another_queue_holds_is_forwarded_and_worked_once(old, tmp_path):
    was, python, url = old
    publish = ("-c", was.publish) if was.publish else (f"{was.module}.py",)
    subprocess.run([python, *publish], cwd=tmp_path / "before", check=True)
    with redis.Redis.from_url(url) as client:
        assert was.left(client) > 0

        worker = subprocess.Popen([python, *(word.format(url=url) for word in was.worker)], cwd=tmp_path / "forward")
        try:
            eventually(lambda: was.left(client) == 0, "everything is forwarded")
        finally:
            worker.terminate()
            worker.wait(60)

    ours = ("-m", "reliq", "worker", f"shop.{was.ours}:consumer", "--burst=delayed")
    subprocess.run([python, *ours], cwd=tmp_path / "forward", check=True)

    totals = Queue(was.queue, url=url).counts().totals
    assert {end: totals.get(end, 0) for end in was.ends} == was.ends
    assert totals["published"] == sum(was.ends.values())
