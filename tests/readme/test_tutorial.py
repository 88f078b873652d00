"""Type the steps of docs/tutorial.md and of `reliq init` line by line, after an installation from a checkout."""

import contextlib
import os
import re
import shutil
import subprocess
import sysconfig

import psutil
import pytest
import redis
from pages import BLOCK, ROOT, blocks
from ports import free_port
from redis.backoff import NoBackoff
from redis.retry import Retry
from waiting import eventually
from written import write_down

from reliq import Queue
from reliq.distribution import VERSION

pytestmark = pytest.mark.slow
TUTORIAL = ROOT / "docs" / "tutorial.md"
#: pip builds and installs the checkout here; all other packages, and pip, come from the environment under test.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Terminal:
    """A shell with its own HOME; tests type lines into it."""

    def __init__(self, home, folder):
        self.home = home
        self.log = home / f"terminal-{free_port()}.log"
        path = os.pathsep.join([sysconfig.get_path("scripts"), "/usr/bin", "/bin"])
        environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "COLUMNS": "160", **OFFLINE}
        with self.log.open("w") as log:
            self.shell = subprocess.Popen(
                ["bash"], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=folder, text=True
            )

    @property
    def text(self):
        return self.log.read_bytes().decode("utf-8", "ignore")  # it may end within a character

    def type(self, line):
        self.shell.stdin.write(f"{line}\n")
        self.shell.stdin.flush()

    def run(self, line):
        """Type `line`, wait for its success, and return its output."""
        before = len(self.text)
        self.type(f'{line}\necho "[exit $?]"')
        eventually(lambda: re.search(r"\[exit \d+\]\n", self.text[before:]), f"the end of {line!r}")
        output, code = re.match(r"(.*)\[exit (\d+)\]\n", self.text[before:], re.DOTALL).groups()
        assert code == "0", (line, output)
        return output

    def close(self):
        for process in psutil.Process(self.shell.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        self.shell.stdin.close()
        self.shell.wait(60)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the wheel's source files; the first block of tutorial.md installs it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "reliq", copy / "reliq", ignore=shutil.ignore_patterns("__pycache__"))
    make, install = blocks(TUTORIAL, "sh")[0].splitlines()
    terminal = Terminal(copy, copy)
    terminal.run(make.replace("-m venv", "-m venv --without-pip"))  # installing pip takes four seconds
    [site] = copy.glob(".venv/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = copy / ".venv" / "bin" / "pip"
    pip.write_text(
        f"#!{pip.with_name('python')}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    )
    pip.chmod(0o755)
    terminal.run(install)
    terminal.close()
    return copy


@pytest.fixture
def terminals(tmp_path):
    """Return a function that opens a terminal in a folder, and a port; end the programs of all terminals afterwards."""
    opened, port = [], free_port()

    def opens(folder):
        opened.append(Terminal(tmp_path, folder))
        return opened[-1]

    yield opens, str(port)
    for terminal in opened:
        terminal.close()
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client, contextlib.suppress(redis.ConnectionError):
        client.shutdown(nosave=True)


def as_pattern(text):
    """Return a pattern of lines: … matches a part of a line, alone any lines; spaces may differ in number."""
    lines = [" +".join(map(re.escape, line.split())).replace("…", ".*") for line in text.splitlines()]
    return "".join("(?:.*\n)*" if line == ".*" else f" *{line} *\n" for line in lines)


def test_tutorial_typed_from_a_checkout_prints_what_it_shows(checkout, terminals, tmp_path):
    """The rest of tutorial.md is typed as written, with another port; a second worker saves a minute at the end."""
    opens, port = terminals
    url, first, worker, output = f"redis://127.0.0.1:{port}/0", opens(checkout), opens(checkout), ""
    first.run(". .venv/bin/activate")
    write_down(TUTORIAL, tmp_path / "reliq-tutorial")
    _, *rest = [one for one in BLOCK.findall(TUTORIAL.read_text("utf-8").replace("6390", port)) if one[0] != "python"]

    for language, block in rest:
        if language == "sh" and "reliq worker shop" in block:
            start = block
            worker.type(start)
        elif language == "sh":
            if "--check" in block:
                opens(checkout).type(start.replace("--processes 2 --concurrency 4", "--concurrency 400"))
                eventually(lambda: Queue("mails", url=url).counts().alive == 0, "the worker is quiet")
            output = "".join(map(first.run, block.splitlines()))
        else:
            wanted = as_pattern(block)
            if not re.fullmatch(wanted, output):
                eventually(lambda: re.search(wanted, worker.text), f"{block}after: {output}")  # noqa: B023


def test_init_steps_typed_after_an_installation_from_a_checkout_work(checkout, terminals):
    opens, port = terminals
    terminal = opens(checkout)
    terminal.run(". .venv/bin/activate && cd ~")
    _, _, steps = terminal.run("reliq init 'my shop'").replace("6390", port).partition("\n\n")
    steps, _, in_a_container = steps.partition("\n\n# Or with a worker in a container:\n")
    *steps, work = steps.splitlines()
    make_wheel, *compose = in_a_container.splitlines()

    told = [terminal.run(step) for step in steps]
    terminal.run(make_wheel)
    terminal.type(work)

    eventually(lambda: "Hello, Ada!" in terminal.text, "the worker greets")
    assert steps[1].split()[:2] == ["pip", "install"]
    assert [step.split()[2] for step in compose] == ["up", "exec", "logs"]
    assert "2 passed" in told[4]
    assert told[5].startswith("published ")
    assert [path.name for path in terminal.home.glob("my shop/wheels/*")] == [f"reliq_queue-{VERSION}-py3-none-any.whl"]
