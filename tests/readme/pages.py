"""The README and the pages of docs/: their programs, commands and tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
#: The page whose queue and handler the programs of other pages use.
EXAMPLE = ROOT / "docs" / "guides/publishing.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))

#: Pages whose programs need more than a folder `shop`; test_migrating.py, test_howto.py and test_tutorial.py run them.
OF_THEIR_OWN = {f"migrating/{name}.md" for name in ("arq", "celery", "dramatiq", "rq")} | {"tutorial.md"}
OF_THEIR_OWN |= {
    *(f"integrations/{name}.md" for name in ("asyncio", "django", "fastapi", "flask", "jupyter")),
    "production/schema-changes.md",
    "reference/types.md",
}

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ((?:shop/)?\w+\.py)\n")
_PRINTED = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)


def name_of(page):
    """Return the path of a page in docs/, such as integrations/fastapi.md."""
    return page.relative_to(ROOT / "docs").as_posix() if page != README else page.name


def blocks(page, language):
    """Return the code blocks of a page in a language."""
    return [text for name, text in BLOCK.findall(page.read_text("utf-8")) if name == language]


def commands(page):
    """Return every command line of a page."""
    return [line.partition("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]


def programs(page):
    """Return every program of a page by its file name, from its first line."""
    found = {}
    for text in blocks(page, "python"):
        name = _FILE.match(text)
        assert name, f"{page.name}: a program says its file in its first line, such as # shop/jobs.py"
        found[name[1]] = text
    return found


def printed(program):
    """Return the expected output in the comments behind a program's prints."""
    return _PRINTED.findall(program)


def rows(name, first):
    """Return the rows of the tables of a page in docs/ with these column heads, as lists of cells."""
    found, is_in = [], False
    for line in (ROOT / "docs" / name).read_text("utf-8").splitlines():
        is_in = line.startswith("|") and (is_in or line.startswith(f"| {first} |"))
        if is_in and not line.startswith((f"| {first} |", "| ---")):
            found.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found
