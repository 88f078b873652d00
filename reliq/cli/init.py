"""The files that `reliq init` writes: a small application that works, to be changed into one's own."""

import os
import shlex
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from reliq import distribution
from reliq.cli.output import say
from reliq.errors import ConfigurationError
from reliq.settings import check_int

_PROJECT = f"""\
[project]
name = "app"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["{distribution.NAME}"]

[dependency-groups]
dev = ["{distribution.NAME}[reload,testing]", "pytest"]

[tool.reliq] # the settings of `reliq worker`; `reliq worker --show-settings` shows them
consumer = "app.jobs:consumer"
concurrency = 16

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
"""

_QUEUES = '''\
"""What is published and worked on: publishers and workers import it, and nothing connects at the import."""

from dataclasses import dataclass

from reliq import Queue


@dataclass(frozen=True)
class Greeting:
    """Somebody is to be greeted."""

    name: str


GREETINGS = Queue("greetings", Greeting, retries=5)
'''

_JOBS = '''\
"""The handlers: `reliq worker` runs them."""

from reliq import Consumer, Reject

from app.queues import GREETINGS, Greeting

consumer = Consumer()


@consumer.handler(GREETINGS, timeout=60)
def greet(greeting: Greeting) -> None:
    """Greet somebody. It may run twice, after a crash: see that this does no harm."""
    if not greeting.name:
        raise Reject("nobody to greet")
    print(f"Hello, {greeting.name}!", flush=True)
'''

_MAIN = '''\
"""Publishes a greeting: `python -m app Ada`."""

import sys

from app.queues import GREETINGS, Greeting

if __name__ == "__main__":
    receipt = GREETINGS.publish(Greeting(" ".join(sys.argv[1:]) or "World"))
    print(receipt.status, receipt.id)
'''

_TEST = '''\
"""Each test has a Redis of its own: `python -m pytest`."""

import pytest
from reliq import Reject
from reliq.testing import Reliq

from app.jobs import consumer
from app.queues import GREETINGS, Greeting


def test_a_greeting_is_published_and_worked_off(reliq: Reliq, capsys: pytest.CaptureFixture[str]) -> None:
    GREETINGS.publish(Greeting("Ada"), id="ada")

    assert reliq.drain(consumer).acked == ["ada"]
    assert capsys.readouterr().out == "Hello, Ada!\\n"


def test_nobody_cannot_be_greeted(reliq: Reliq) -> None:
    with pytest.raises(Reject, match="nobody to greet"):
        reliq.perform(consumer, GREETINGS, Greeting(""))
'''

_COMPOSE = """\
# A Redis that keeps what it has acknowledged, and a worker. Put reliq's wheel into the folder wheels/ first:
#
#   pip wheel --no-deps --wheel-dir wheels PATH_OF_RELIQS_CHECKOUT_OR_WHEEL
#   docker compose up --build --detach
#   docker compose exec worker python -m app Ada
#   docker compose logs worker
services:
  redis:
    image: redis:7.4-alpine
    command: redis-server --appendonly yes --maxmemory-policy noeviction
    volumes: ["redis:/data"]
    healthcheck: {test: ["CMD", "redis-cli", "-e", "ping"], interval: 5s, timeout: 5s, start_period: 60s}

  worker:
    build:
      context: .
      dockerfile_inline: |
        FROM python:3.13-slim
        WORKDIR /srv
        COPY wheels wheels
        RUN pip install --no-cache-dir wheels/*.whl
        COPY pyproject.toml .
        COPY app app
        USER nobody
        CMD ["reliq", "worker"]
    environment: {RELIQ_URL: "redis://redis:6379/0"}
    depends_on:
      redis: {condition: service_healthy}
    stop_grace_period: 40s # longer than the 25 s that --grace gives to handlers

volumes:
  redis:
"""

#: Path -> text.
FILES = {
    "pyproject.toml": _PROJECT,
    "app/__init__.py": '"""A small application on reliq."""\n',
    "app/queues.py": _QUEUES,
    "app/jobs.py": _JOBS,
    "app/__main__.py": _MAIN,
    "tests/test_jobs.py": _TEST,
    "compose.yaml": _COMPOSE,
}


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to; it is made when it is not there.")
    ] = Path(),
) -> None:
    """
    Write a small application that works: a queue, a handler, a publisher, a test and a compose file.

    Nothing is overwritten. Exit codes: 0 done, 2 a file is there already or cannot be written.

    Example: reliq init shop
    """
    if there := [name for name in FILES if os.path.lexists(folder / name)]:
        raise ConfigurationError(f"{folder / there[0]} is there already; nothing was written: name another folder")
    for name, text in FILES.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:  # "x" does not follow a symbolic link
                file.write(text)
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
        say(f"wrote {path}")
    if folder != Path():
        say("", f"cd {shlex.quote(str(folder))}")
    say(
        f"{distribution.install('reload', 'testing')} pytest",
        'redis-server --port 6390 --appendonly yes --dir "$(mktemp -d)" >/dev/null || echo "no Redis: is port 6390 in use?" &',
        "export RELIQ_URL=redis://127.0.0.1:6390/0",
        "python -m pytest",
        "python -m app Ada",
        "reliq worker --reload",
        "",
        "# Or with a worker in a container:",
        f"pip wheel --no-deps --wheel-dir wheels {shlex.quote(distribution.source())}",
        "docker compose up --build --detach",
        "docker compose exec worker python -m app Ada",
        "docker compose logs worker",
    )


def demo(
    jobs: Annotated[int, typer.Option(help="How many jobs to publish.")] = 5000,
    url: Annotated[
        str | None,
        typer.Option(help="A Redis to use instead of a private one, such as redis://127.0.0.1:6379/0."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
) -> None:
    """
    Run thousands of jobs in two processes, kill one while it runs jobs, and show that none is lost.

    The demo starts a Redis of its own and ignores RELIQ_URL. With --url it uses a queue named demo there, which must
    not exist, and deletes it at the end. Exit codes: 0 nothing was lost, 1 a job was lost or did not run again, 2 wrong
    usage or a Redis that cannot be used, 130 interrupted.

    Example: reliq demo --jobs 20000
    """
    check_int("--jobs", jobs, least=100, most=100_000)
    raise typer.Exit(0 if import_module("reliq.cli.demo").run(jobs, url, seed) else 1)
