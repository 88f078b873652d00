"""`reliq init` writes an application that works: its tests pass, its job is published and done."""

import subprocess
import sys

import pytest
import yaml

from reliq.cli.init import FILES, STARTER


@pytest.fixture
def started(command, tmp_path, monkeypatch):
    """Create the application; return a function that runs a command in its folder as a user does."""
    monkeypatch.chdir(tmp_path)
    assert command("init", "shop").code == 0

    monkeypatch.chdir(tmp_path / "shop")
    monkeypatch.setenv("PYTHONPATH", "")

    def run(*words):
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_application_runs_and_passes_its_tests_and_a_linter(started):
    assert started("app", "Ada").startswith("published ")
    assert started("reliq", "worker", "--burst") == "Hello, Ada!\n"
    assert "2 passed" in started("pytest", "-q", "-p", "no:cacheprovider")
    started("ruff", "check", ".")


def test_compose_file_has_a_durable_redis_and_a_worker():
    services = yaml.safe_load((STARTER / "compose.yaml").read_text("utf-8"))["services"]

    assert "ports" not in services["redis"]  # another Redis on this machine may use the port
    assert "--appendonly yes --maxmemory-policy noeviction" in services["redis"]["command"]
    assert services["worker"]["build"]["dockerfile_inline"].splitlines()[-1] == 'CMD ["reliq", "worker"]'
    assert services["worker"]["environment"] == {"RELIQ_URL": "redis://redis:6379/0"}


def test_init_lists_its_files_and_overwrites_nothing(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("init")
    assert [line for line in done.out.splitlines() if line.startswith("wrote ")] == [f"wrote {name}" for name in FILES]
    assert "reliq worker --reload" in done.out
    (tmp_path / "app" / "tasks.py").write_text("mine")
    (tmp_path / "pyproject.toml").unlink()

    again = command("init")

    assert (again.code, again.out) == (2, "")
    assert again.err == "reliq: app/__init__.py exists already; nothing was written: name another folder\n"
    assert (tmp_path / "app" / "tasks.py").read_text() == "mine"
    assert not (tmp_path / "pyproject.toml").exists()


def test_init_that_cannot_write_is_one_line_and_writes_nothing(command, tmp_path):
    (tmp_path / "compose.yaml").symlink_to(tmp_path / "elsewhere")
    done = command("init", tmp_path)
    assert done.err == f"reliq: {tmp_path}/compose.yaml exists already; nothing was written: name another folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["compose.yaml"]

    (tmp_path / "file").write_text("")
    done = command("init", tmp_path / "file")
    assert (done.code, done.err) == (2, f"reliq: cannot write {tmp_path}/file/pyproject.toml: File exists\n")


def test_files_of_the_starter_are_those_that_init_writes():
    kept = {path.relative_to(STARTER).as_posix() for path in STARTER.rglob("*") if path.is_file()}

    assert {name for name in kept if "cache" not in name} == set(FILES)
