"""What a page of docs/ shows is run here as it stands: its programs are written down, its commands made in their order."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from go_original import GoProgram

from reliq import Layout
from reliq.cli.app import app, main
from reliq.keys import Keys

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (shop/\w+\.py)\n")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def blocks(page, language):
    """The blocks of a page in a language."""
    return [text for name, text in _BLOCK.findall(page.read_text("utf-8")) if name == language]


def commands(page):
    """Every line of a page that a person types."""
    return [line.partition("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]


def of_go(client):
    """A Go program has published, one message is due."""
    go = GoProgram(client, Keys("order:timeout", Layout.hdt3213()))
    go.publish(b"41", due=client.time()[0] - 60)
    go.promote(client.time()[0])
    return lambda said: "order 41 is closed" in said and "order:timeout" in said and "NOT" not in said


#: What is in Redis before a page is read, and what its commands must have said.
BEFORE = {"go.md": of_go}


@pytest.fixture
def shop(tmp_path, url, monkeypatch, capsys):
    """Write down the programs of a page; return what makes a command there."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.chdir(tmp_path)

    def written(page):
        for text in blocks(page, "python"):
            name = _FILE.match(text)
            assert name, f"{page.name}: a program says its file in its first line, such as # shop/jobs.py"
            Path(name[1]).parent.mkdir(exist_ok=True)
            Path(name[1]).write_text(text)
        return run

    def run(line):
        words = shlex.split(line)
        code, out, error = start(*words) if words[0] == "python" or "worker" in words else typed(*words)
        assert code == 0, (line, out, error)
        return out

    def start(*words):
        words = ("python", "-m", *words) if words[0] == "reliq" else words
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False, timeout=120)
        return done.returncode, done.stdout, done.stderr

    def typed(*words):
        """Make the command in this process: starting another takes much longer."""
        assert words[0] == "reliq", words
        monkeypatch.setattr(sys, "argv", [*words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return written


@each_page
def test_the_commands_of_a_page_run_as_they_are_written(page, shop, client):
    holds = BEFORE.get(page.name, lambda _client: bool)(client)
    run = shop(page)

    said = "".join(map(run, commands(page)))

    assert holds(said)


@each_page
def test_the_blocks_of_a_page_are_in_languages_that_are_known(page):
    text = page.read_text("utf-8")

    assert {name for name, _ in _BLOCK.findall(text)} <= {"sh", "python", "go"}
    assert text.count("```") == 2 * len(_BLOCK.findall(text))


@each_page
def test_the_commands_and_layouts_that_a_page_names_are_there(page):
    text = page.read_text("utf-8")
    known = {command.callback.__name__ for command in app.registered_commands} | {"dead", "list", "scripts", "forget"}

    assert set(re.findall(r"`reliq (\w+)", text)) - known == set()
    for layout in re.findall(r"--layout ([\w:=,.-]+)", text):
        assert str(Layout.parse(layout)) == layout


@each_page
def test_the_links_of_a_page_lead_somewhere(page):
    assert [link for link in _LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()] == []


def test_what_the_readme_links_to_is_there_and_in_the_source_distribution():
    links = set(_LINK.findall((ROOT / "README.md").read_text("utf-8")))
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["sdist"]

    assert [link for link in links if not (ROOT / link).exists()] == []
    assert {Path(link).parts[0] for link in links} - set(packed["include"]) == set()


def test_the_readme_links_to_every_page():
    readme = (ROOT / "README.md").read_text("utf-8")

    assert [page.name for page in PAGES if f"](docs/{page.name})" not in readme] == []


def test_a_layout_is_the_same_in_go_on_the_command_line_and_in_python():
    rows = re.findall(r"`--layout (\S+)` \| `Layout\.hdt3213\((.*)\)`", (ROOT / "docs/go.md").read_text("utf-8"))

    assert len(rows) == 4
    for text, arguments in rows:
        options = dict(re.findall(r'(\w+)=(?:"(\w+)"|True)', arguments))
        assert Layout.parse(text) == Layout.hdt3213(**{name: value or True for name, value in options.items()})
