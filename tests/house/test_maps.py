"""Every file and name that the pages for contributors quote exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP, GUIDE, TESTS = (ROOT / name for name in ("reliq/README.md", "CONTRIBUTING.md", "tests/README.md"))


def quoted(page):
    """The texts that a page has between backticks."""
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


def test_files_and_names_that_a_map_quotes_exist():
    missing = []
    for page, folder in ((MAP, MAP.parent), (GUIDE, ROOT), (TESTS, TESTS.parent)):
        places = [re.fullmatch(r"([\w/.-]+(?:\.\w+|/))(?:: ([\w.]+))?", text) for text in quoted(page)]
        named = [place for place in places if place and ("/" in place[1] or place[1].endswith((".py", ".md")))]
        assert len(named) >= 8
        for place in named:
            name = place[1].partition("NAME")[0]  # `reliq/cli/NAME.py` names a folder
            path = next((path for path in (folder / name, ROOT / name) if path.exists()), None)
            if not path or (place[2] and place[2] not in names_in(path)):
                missing.append(f"{page.name}: {place[0]}")

    assert missing == []
