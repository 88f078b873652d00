"""Settings of a worker from options, environment and pyproject.toml, and `reliq worker --show-settings`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from required import must_run_in_ci

from reliq.cli.app import Commands

#: Setting -> a value that is not the default, as an environment variable spells it, and its meaning.
OTHERS = {
    "consumer": ("jobs:consumer", "jobs:consumer"),
    "processes": ("2", 2),
    "concurrency": ("3", 3),
    "queue": ("a b", ["a", "b"]),
    "burst": ("1", True),
    "burst-delayed": ("yes", True),
    "grace": ("1.5", 1.5),
    "gil-timeout": ("9", 9),
    "max-jobs": ("7", 7),
    "max-memory": ("512M", "512M"),
    "url": ("redis://127.0.0.1:6379/5", "redis://127.0.0.1:6379/5"),
    "allow-eviction": ("1", True),
    "metrics-port": ("9000", 9000),
    "metrics-host": ("0.0.0.0", "0.0.0.0"),
    "no-queue-metrics": ("true", True),
    "log-level": ("debug", "debug"),
    "log-format": ("json", "json"),
    "log-error-text": ("yes", True),
    "reload": ("on", True),
}

JOBS = """
from reliq import Consumer, Queue

consumer = Consumer()


@consumer.handler(Queue("q"))
def work(body):
    print("worked", body)
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Change into a folder below a pyproject.toml that has these lines in [tool.reliq]."""
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for name in [name for name in os.environ if name.startswith("RELIQ_")]:
        monkeypatch.delenv(name)

    def write(lines):
        path = tmp_path / "pyproject.toml"
        path.write_text(f"[project]\nname = 'shop'\n[tool.reliq]\n{lines}")
        return str(path)

    return write


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def shown(command):
    return {
        name: (row["value"], row["origin"]) for name, row in command("worker", "--show-settings", "--json").json.items()
    }


def test_every_worker_option_is_an_environment_variable(command, written, monkeypatch):
    for name, (text, _) in OTHERS.items():
        monkeypatch.setenv("RELIQ_" + name.upper().replace("-", "_"), text)

    values = shown(command)

    no_settings = {"json", "show-settings"}
    assert {one.name.replace("_", "-") for one in Commands.load("worker").params} == OTHERS.keys() | no_settings
    assert {name: value for name, (value, _) in values.items()} == {name: value for name, (_, value) in OTHERS.items()}
    assert values["max-jobs"][1] == "RELIQ_MAX_JOBS"


def test_every_worker_option_is_a_key_of_the_nearest_pyproject(command, written):
    assert {origin for _, origin in shown(command).values()} == {"default"}
    path = written("\n".join(f"{name} = {value!r}".replace("True", "true") for name, (_, value) in OTHERS.items()))

    assert shown(command) == {name: (value, path) for name, (_, value) in OTHERS.items()}


def test_environment_overrides_the_file_and_empty_variables_do_not_count(command, written, monkeypatch):
    path = written("concurrency = 3\nmax_jobs = 4\nburst = true\ngrace = 5")
    monkeypatch.setenv("RELIQ_CONCURRENCY", "32")
    monkeypatch.setenv("RELIQ_BURST", "0")
    monkeypatch.setenv("RELIQ_MAX_JOBS", "")
    # Kubernetes sets this for a Service named reliq-metrics.
    monkeypatch.setenv("RELIQ_METRICS_PORT", "tcp://10.96.0.7:9000")
    monkeypatch.setenv("RELIQ_CONCURENCY", "4")

    values = shown(command)

    assert values["concurrency"] == (32, "RELIQ_CONCURRENCY")
    assert values["burst"] == (False, "RELIQ_BURST")
    assert values["max-jobs"] == (4, path)
    assert values["metrics-port"] == (None, "default")
    assert (
        "RELIQ_CONCURENCY is not a setting; did you mean RELIQ_CONCURRENCY?"
        in command("worker", "--show-settings").out.splitlines()
    )


def test_option_comes_before_the_environment_and_is_shown_with_its_origin(command, written, monkeypatch):
    monkeypatch.setenv("RELIQ_CONCURRENCY", "32")

    values = command("worker", "--show-settings", "--json", "--concurrency", "8").json

    assert values["concurrency"] == {"value": 8, "origin": "command line"}


def test_worker_without_a_consumer_is_a_one_line_error(command, written):
    done = command("worker")

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("reliq: name the Consumer: ")


def test_show_settings_masks_the_password(command, written):
    written("url = 'redis://shop:secret@127.0.0.1:6379/5'")

    told = command("worker", "--show-settings").out + command("worker", "--show-settings", "--json").out

    assert "redis://shop:***@127.0.0.1:6379/5" in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("lines", "environment", "said"),
    [
        ("concurency = 3", {}, "has no setting 'concurency'; is it 'concurrency'?"),
        ("colour = 3", {}, "has no setting 'colour'; `reliq worker --show-settings` lists all settings"),
        ("concurrency = 'many'", {}, "pyproject.toml"),
        ("", {"RELIQ_GRACE": "long"}, "it comes from RELIQ_GRACE"),
        ("", {"RELIQ_BURST": "never"}, "valid boolean, unable to interpret input; it comes from RELIQ_BURST"),
        ("url = 3", {}, "url in [tool.reliq] of "),
        ("concurrency =", {}, "pyproject.toml cannot be read: "),
    ],
    ids=["near", "unknown", "type", "variable", "flag", "url", "syntax"],
)
def test_bad_setting_is_one_line_that_names_its_origin(command, written, monkeypatch, lines, environment, said):
    written(lines)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    for words in (["worker", "--show-settings"], ["worker", "jobs:consumer"]):
        done = command(*words)

        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert said in done.err
    if "RELIQ_GRACE" in environment:
        assert command("worker", "jobs:consumer", "--grace", "x").err.endswith("see reliq worker --help\n")


def test_command_uses_the_url_of_the_settings_file_or_reads_none(command, written, queue, url):
    queue.publish({})
    path = written(f"url = {url!r}")

    done = command("queues")
    os.mkfifo("pyproject.toml")  # reading it would hang
    with_a_url = command("queues", "--url", url)

    assert done.out.splitlines()[1].split()[0] == "q"
    assert done.err == f"reliq: using the Redis URL of [tool.reliq] in {path}\n"
    assert (with_a_url.code, with_a_url.err) == (0, "")


def make_foreign(path):
    if os.geteuid():
        must_run_in_ci("only root can give a file to another user")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (make_foreign, "[tool.reliq] is not used: {path} belongs to user 65534; change the owner, or set RELIQ_ "),
        (lambda path: make_foreign(path.parent), "[tool.reliq] is not used: {path.parent} belongs to user 65534; "),
        (lambda path: path.chmod(0o646), "[tool.reliq] is not used: every user can write to {path}; chmod o-w, or "),
        (lambda path: path.parent.chmod(0o757), "[tool.reliq] is not used: every user can write to {path.parent}; "),
        (lambda path: (path.unlink(), os.mkfifo(path)), "{path} cannot be read: it is a FIFO, a device or a folder; "),
        (lambda path: (path.unlink(), path.symlink_to(path)), "{path} cannot be read: "),
        (lambda path: path.write_text("a = " + 20_000 * "["), "{path} cannot be read: "),
    ],
    ids=["owner", "owner of folder", "mode", "mode of folder", "pipe", "endless link", "deep"],
)
def test_untrusted_or_unreadable_settings_file_is_a_one_line_error(command, written, spoil, said, url):
    path = Path(written(f"url = {url!r}"))
    os.chdir(path.parent)
    spoil(path)

    for words in (["queues"], ["worker", "--show-settings"], ["worker", "jobs:consumer"]):
        done = command(*words)

        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"reliq: {said.format(path=path)}")


def test_settings_file_that_cannot_be_read_is_an_error_unless_its_folder_is_locked(written):
    restrict = []
    if not os.geteuid():  # root may read any file
        restrict = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]
        if shutil.which("setpriv") is None:
            must_run_in_ci("setpriv is not installed")
    path = Path(written("concurrency = 'many'"))

    def config_locked(path):
        mode = path.stat().st_mode
        path.chmod(0)
        done = run(*restrict, sys.executable, "-P", "-m", "reliq", "worker", "--show-settings")
        path.chmod(mode)
        return done

    done = config_locked(path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"reliq: {path} cannot be read: ")
    for folder in (path.parent / "inner", path.parent):  # first the parent folder is locked, then this folder
        os.chdir(folder)
        done = config_locked(path.parent)
        assert (done.returncode, done.stderr) == (0, ""), folder


def test_command_in_a_deleted_folder_is_a_one_line_error(command, written):
    written("")
    Path.cwd().rmdir()

    for words in (["queues"], ["worker", "--show-settings"], ["worker", "jobs:consumer"]):
        assert command(*words) == (2, "", "reliq: the working folder was deleted: change to another folder\n")


@pytest.mark.parametrize("boundary", ["root of a repository", "folder of every user"])
def test_search_for_settings_ends_at_the_project(command, written, tmp_path, boundary):
    written("concurrency = 3")
    if boundary == "root of a repository":
        (tmp_path / "inner" / ".git").mkdir()
    else:
        tmp_path.chmod(0o1777)

    assert shown(command)["concurrency"] == (16, "default")


def test_worker_without_options_obeys_the_settings_file(written, queue, url, tmp_path):
    queue.publish({"n": 1})
    written(f"consumer = 'jobs:consumer'\nburst = true\nconcurrency = 3\nurl = {url!r}")
    (tmp_path / "jobs.py").write_text(JOBS)

    os.chdir(tmp_path)
    done = run(sys.executable, "-m", "reliq", "worker")

    assert (done.returncode, done.stdout) == (0, "worked {'n': 1}\n")
    assert "1 process of 3 on " in done.stderr
