"""The settings of a worker: by its options, the environment, pyproject.toml; and what `reliq config` shows of them."""

import os
import subprocess
import sys

import pytest

from reliq.cli.app import Commands

#: A value of each setting that is not its default, as the environment spells it, and what it means.
OTHERS = {
    "consumer": ("jobs:consumer", "jobs:consumer"),
    "processes": ("2", 2),
    "concurrency": ("3", 3),
    "queue": ("a b", ["a", "b"]),
    "burst": ("delayed", "delayed"),
    "grace": ("1.5", 1.5),
    "stall": ("9", 9),
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
    """Go into a folder within that of a pyproject.toml with these lines in [tool.reliq]."""
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


def shown(command, **environment):
    return {name: (row["value"], row["origin"]) for name, row in command("config", "--json").json.items()}


def test_the_settings_are_the_options_of_the_worker():
    assert {one.name.replace("_", "-") for one in Commands.load("worker").params} == OTHERS.keys()


def test_without_any_setting_the_defaults_are_in_force(command, written):
    values = shown(command)

    assert values["concurrency"] == (16, "default")
    assert {origin for _, origin in values.values()} == {"default"}


def test_every_option_of_the_worker_is_a_variable_by_one_rule(command, written, monkeypatch):
    for name, (text, _) in OTHERS.items():
        monkeypatch.setenv("RELIQ_" + name.upper().replace("-", "_"), text)

    values = shown(command)

    assert {name: value for name, (value, _) in values.items()} == {name: value for name, (_, value) in OTHERS.items()}
    assert values["max-jobs"][1] == "RELIQ_MAX_JOBS"


def test_every_option_of_the_worker_is_a_key_of_the_nearest_pyproject(command, written):
    path = written("\n".join(f"{name} = {value!r}".replace("True", "true") for name, (_, value) in OTHERS.items()))

    values = shown(command)

    assert values == {name: (value, path) for name, (_, value) in OTHERS.items()}


def test_the_environment_comes_before_the_file_and_an_empty_variable_is_none(command, written, monkeypatch):
    path = written("concurrency = 3\nmax_jobs = 4\nburst = true\ngrace = 5")
    monkeypatch.setenv("RELIQ_CONCURRENCY", "32")
    monkeypatch.setenv("RELIQ_BURST", "0")
    monkeypatch.setenv("RELIQ_MAX_JOBS", "")

    values = shown(command)

    assert values["concurrency"] == (32, "RELIQ_CONCURRENCY")
    assert values["burst"] == (False, "RELIQ_BURST")
    assert values["max-jobs"] == (4, path)


def test_the_address_that_kubernetes_puts_into_a_variable_is_no_setting(command, written, monkeypatch):
    monkeypatch.setenv("RELIQ_METRICS_PORT", "tcp://10.96.0.7:9000")  # of a Service named reliq-metrics

    assert shown(command)["metrics-port"] == (None, "default")


def test_a_password_is_not_shown(command, written, monkeypatch):
    written("url = 'redis://shop:secret@127.0.0.1:6379/5'")

    told = command("config").out + command("config", "--json").out

    assert "redis://shop:***@127.0.0.1:6379/5" in told
    assert "secret" not in told


def test_a_variable_that_is_nearly_a_setting_is_told(command, written, monkeypatch):
    monkeypatch.setenv("RELIQ_CONCURENCY", "4")

    assert "RELIQ_CONCURENCY is no setting; is RELIQ_CONCURRENCY meant?" in command("config").out.splitlines()


@pytest.mark.parametrize("words", [["config"], ["worker", "jobs:consumer"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("lines", "environment", "said"),
    [
        ("concurency = 3", {}, "has no setting 'concurency'; is it 'concurrency'?"),
        ("colour = 3", {}, "has no setting 'colour'; `reliq config` lists those that there are"),
        ("concurrency = 'many'", {}, "pyproject.toml"),
        ("", {"RELIQ_GRACE": "long"}, "it comes from RELIQ_GRACE"),
        ("", {"RELIQ_BURST": "never"}, "write --burst or --burst=delayed, not 'never'; it comes from RELIQ_BURST"),
        ("url = 3", {}, "url in [tool.reliq] of "),
        ("concurrency =", {}, "pyproject.toml cannot be read: "),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_where_it_stands(
    command, written, monkeypatch, words, lines, environment, said
):
    written(lines)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    done = command(*words)

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err


def test_an_option_comes_first_and_what_is_wrong_with_it_is_not_blamed_on_the_environment(
    command, written, monkeypatch
):
    monkeypatch.setenv("RELIQ_GRACE", "60")

    done = command("worker", "jobs:consumer", "--grace", "long")

    assert done.err.endswith("see reliq worker --help\n")


def test_every_command_asks_the_redis_of_the_file_when_the_environment_names_none(command, written, queue, url):
    queue.publish({})
    written(f"url = {url!r}")

    assert command("queues", "--interval", "0").out.splitlines()[1].split()[0] == "q"


def test_a_worker_without_options_works_as_the_file_says(written, queue, url, tmp_path):
    """The whole way: a process that is given nothing but its folder."""
    queue.publish({"n": 1})
    written(f"consumer = 'jobs:consumer'\nburst = true\nconcurrency = 3\nurl = {url!r}")
    (tmp_path / "jobs.py").write_text(JOBS)

    done = subprocess.run(
        [sys.executable, "-m", "reliq", "worker"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, "worked {'n': 1}\n")
    assert "1 process of 3 on " in done.stderr
