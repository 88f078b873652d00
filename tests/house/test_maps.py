"""The pages that lead a newcomer are short, and every file and name that they give is there."""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest
from test_layers import LEVEL

ROOT = Path(__file__).parents[2]
#: The most words of a page that is read in one sitting.
WORDS = {"README.md": 1500, "reliq/README.md": 600, "CONTRIBUTING.md": 900}
MAP, GUIDE, TESTS = (ROOT / name for name in ("reliq/README.md", "CONTRIBUTING.md", "tests/README.md"))


def quoted(page):
    """What a page has between backticks."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    )


@cache
def names_in(file):
    """The classes and functions of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("name", WORDS)
def test_a_page_that_leads_is_short(name):
    assert len((ROOT / name).read_text("utf-8").split()) <= WORDS[name]


@pytest.mark.parametrize(("page", "folder"), [(MAP, MAP.parent), (GUIDE, ROOT), (TESTS, TESTS.parent)])
def test_every_file_and_name_of_a_map_is_there(page, folder):
    places = [re.fullmatch(r"([\w/.-]+(?:\.\w+|/))(?:: ([\w.]+))?", text) for text in quoted(page)]
    named = [place for place in places if place and ("/" in place[1] or place[1].endswith((".py", ".md")))]

    assert len(named) >= 8
    for place in named:
        name = place[1].partition("NAME")[0]  # `reliq/cli/NAME.py` names a folder
        path = next((path for path in (folder / name, ROOT / name) if path.exists()), None)
        assert path, f"{page.name} names {place[1]}"
        assert not place[2] or place[2] in names_in(path), place[0]


def test_the_map_has_every_folder_of_the_package():
    folders = {path.parent.name for path in MAP.parent.glob("*/__init__.py")}

    assert {folder for folder in folders if f"{folder}/" not in MAP.read_text("utf-8")} == set()


def test_the_map_of_the_tests_has_every_folder_of_theirs():
    folders = {path.parent.name for path in TESTS.parent.glob("*/test_*.py")}
    table = re.findall(r"^\| `(\w+)/` \|", TESTS.read_text("utf-8"), re.MULTILINE)

    assert sorted(table) == sorted(folders)


def test_every_chore_of_the_guide_is_one_word_of_the_script():
    script = (ROOT / ".ci" / "do").read_text("utf-8")

    assert re.findall(r"^\| `\.ci/do (\w+)` \|", GUIDE.read_text("utf-8"), re.MULTILINE) == re.findall(
        r"^  (\w+)\) ", script, re.MULTILINE
    )


def test_the_layers_of_the_map_are_in_the_order_of_the_code():
    rows = re.findall(r"^\| (`.+`) \|", MAP.read_text("utf-8"), re.MULTILINE)
    levels = [[LEVEL[name] for name in re.findall(r"`(\w+)", row)] for row in rows]

    assert len(rows) > 6
    assert all(max(below) < min(above) for below, above in itertools.pairwise(levels))
