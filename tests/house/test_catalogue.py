"""The tables of failures and of claims are closed: no row is missing, and every test that they name is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "faults" / "README.md"
CLAIMS = ROOT / "tests" / "claims.md"

#: How many rows each group of the catalogue has.
GROUPS = {"L": 14, "D": 11, "S": 34, "T": 6, "C": 4, "X": 10, "P": 5}

_ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows():
    """What covers each row, as the table has it."""
    return [(found[1], found[3]) for found in _ROW.finditer(TABLE.read_text("utf-8"))]


def claims():
    """Each claim of the README and of docs/, with what holds it."""
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", CLAIMS.read_text("utf-8"), re.MULTILINE)
    return [row for row in found if row[0] not in ("claim", "---")]


@cache
def names_in(file):
    """The names of the tests in a file."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_of_the_catalogue_is_in_the_table_once():
    expected = [f"{group}{number}" for group, count in GROUPS.items() for number in range(1, count + 1)]

    assert [name for name, _ in rows()] == expected


@pytest.mark.parametrize(("row", "covered"), rows() + claims())
def test_a_row_names_tests_that_exist_or_says_why_there_is_none(row, covered):
    named = _TEST.findall(covered)

    assert named or covered.startswith("not here: ")
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert test in names_in(file), f"{file} has no {test}"


def test_every_test_of_a_fault_stands_in_the_table():
    told = {name for _, covered in rows() for _, name in _TEST.findall(covered)}
    found = {
        name
        for path in (ROOT / "tests" / "faults").glob("test_*.py")
        for name in names_in(str(path.relative_to(ROOT)))
        if name.startswith("test_")
    }

    assert found - told == set()


def test_every_page_has_its_claims():
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]

    first, *told, last = re.findall(r"^## (.+)$", CLAIMS.read_text("utf-8"), re.MULTILINE)
    assert (first, last) == ("README.md", "The CHANGELOG, beyond these pages")
    assert sorted(told) == sorted(pages)
    assert len(claims()) > 150
