"""Type the sessions of a page, Python and Redis in turns, line by line: each output equals the page's."""

import ast
import re
import shlex
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
import redis
from pages import ROOT, blocks
from written import imported_from

from reliq.cli.app import main
from reliq.testing import isolated

PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if blocks(page, "console")]
PYTHON, REDIS, SHELL = ">>> ", "redis> ", "$ "
_WAIT = re.compile(r"# (a minute|an hour) later")
_SECONDS = {"a minute": 60, "an hour": 3600}


def steps(page):
    """Return the input lines of a page's sessions, in order, each with the output that the page shows."""
    found = []
    for line in "".join(blocks(page, "console")).splitlines():
        if line.startswith((PYTHON, REDIS, SHELL)):
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


def alike(lines):
    """Replace text that differs in each run: times, nonces, generated ids, processes."""
    text = "\n".join(lines)
    text = re.sub(r"\b\d{10,}(\.\d+)?\b", "TIME", text)
    text = re.sub(r"[\w-]{14}\d+\.\d+:(?=\d)", "NONCE:", text)
    return re.sub(r"[\w.-]+:\d+(?=\x1d|\\x1d)", "HOST:PID", text)


@pytest.fixture
def session(shop, url, monkeypatch, capsys):
    """Return a function that types a line in the folder of a page and returns the output lines."""
    names = {}

    def python(statement):
        if wait := _WAIT.fullmatch(statement):
            test.travel(_SECONDS[wait[1]])
        with redirect_stdout(StringIO()) as said:
            exec(compile(ast.Interactive(ast.parse(statement).body), "<page>", "single"), names)
        return said.getvalue()

    def command(line):
        with redis.Redis.from_url(url, protocol=2) as client:
            client.response_callbacks.clear()
            reply = client.execute_command(*shlex.split(line))
        rows = reply if isinstance(reply, list) else [reply]
        return "\n".join(row.decode() if isinstance(row, bytes) else f"{row}" for row in rows)

    def shell(line):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        capsys.readouterr()
        with suppress(SystemExit):
            main()
        return capsys.readouterr().out

    def typed(line):
        prompt, _, rest = line.partition(" ")
        return {PYTHON: python, REDIS: command, SHELL: shell}[f"{prompt} "](rest).splitlines()

    with imported_from(Path.cwd()), isolated(url) as test:
        yield lambda page: shop(page) and typed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_session_of_a_page_gives_the_answers_that_it_shows(page, session):
    typed = session(page)

    for line, answer in steps(page):
        assert (line, alike(typed(line))) == (line, alike(answer))
