"""The pages of docs/migrating: programs of reliq run; programs of other queues are parsed only."""

import ast
import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest
from pages import ROOT, blocks, commands, programs
from written import imported_from, parse

from benchmarks.catalogue import PEERS
from reliq import Queue
from reliq.testing import isolated

#: Page -> the result of the messages that its programs publish: queue, ends.
ENDS = {
    "celery": ("photos", {"acked": 3, "dead": 0}),
    "rq": ("pages", {"acked": 2, "dead": 1}),
    "dramatiq": ("pages", {"acked": 1, "dead": 1}),
    "arq": ("greetings", {"acked": 2, "dead": 0}),
}
PAGES = {name: ROOT / "docs" / "migrating" / f"{name}.md" for name in ENDS}


@pytest.fixture
def page_of(shop):
    """Make a page's programs importable during the test; return a function that runs its other commands."""
    with imported_from(Path.cwd()):
        yield lambda name: shop(PAGES[name])


@pytest.mark.parametrize("name", ENDS)
def test_programs_of_a_migration_page_run_as_written(name, page_of, url):
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
        queue, ends = ENDS[name]
        totals = Queue(queue, url=url).counts().totals

    assert {end: totals.get(end, 0) for end in ends} == ends
    assert totals.get("dead", 0) == len(re.findall(r" (?:failed|rejected)\b", said))


def test_programs_of_other_queues_are_python_and_import_names_of_the_page():
    missing = []
    for name, page in PAGES.items():
        here = {}
        for file, text in programs(page).items():
            nodes = list(ast.walk(ast.parse(text)))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            names |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            here[file.removesuffix(".py").replace("/", ".")] = names
        for block in blocks(page, "py"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("shop."):
                    absent = {alias.name for alias in node.names} - here[node.module]
                    missing += [(name, node.module, one) for one in absent]

    assert missing == []


def test_pages_name_the_versions_of_other_queues_that_the_benchmarks_have():
    pinned = [re.match(r"([\w-]+)(?:\[.*\])?==(\d+\.\d+)", peer.requirements[0]) for peer in PEERS if peer.requirements]
    versions = {found[1]: found[2] for found in pinned if found and found[1] != "bullmq"}
    text = (ROOT / "docs" / "internals/comparison.md").read_text("utf-8").replace("\n", " ")
    compared = dict(re.findall(r"(\w[\w-]*) (\d+\.\d+)\b", text[: text.index("## Which to choose")]))
    checked = {
        name: re.search(rf"Checked against {name} (\d+\.\d+)\b", page.read_text("utf-8"), re.IGNORECASE)
        for name, page in PAGES.items()
    }

    assert {name.lower(): version for name, version in compared.items() if name.lower() in versions} == {
        name: version for name, version in versions.items() if name != "pydocket"
    }
    assert [name for name, found in checked.items() if not found] == []
    assert {name: found[1] for name, found in checked.items() if name in versions} == {
        name: versions[name] for name in checked if name in versions
    }
