"""The commands to try reliq: `reliq init` creates a small application, and `reliq demo` kills a worker process."""

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

STARTER = Path(__file__).with_name("starter")
FILES = (
    "pyproject.toml",
    "app/__init__.py",
    "app/tasks.py",
    "app/__main__.py",
    "tests/test_tasks.py",
    "compose.yaml",
)


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for the application; created if it does not exist.")
    ] = Path(),
) -> None:
    """
    Create a small working application: a task, a publisher, a test and a compose file.

    Existing files are not overwritten. Exit codes: 0 done, 2 a file exists already or cannot be written.

    Example: reliq init shop
    """
    if existing := [folder / name for name in FILES if os.path.lexists(folder / name)]:
        raise ConfigurationError(f"{existing[0]} exists already; nothing was written: name another folder")
    for name in FILES:
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:  # mode "x" does not overwrite files or follow symbolic links
                file.write((STARTER / name).read_text("utf-8"))
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


def demo(jobs: Annotated[int, typer.Option(help="How many jobs to publish.")] = 5000) -> None:
    """
    Run thousands of jobs in two worker processes, kill one process, and show that no job is lost.

    The demo starts a private Redis server and ignores RELIQ_URL. Exit codes: 0 no job was lost, 1 a job was lost or a
    job of the killed process did not run again, 2 wrong usage or no redis-server is installed, 130 interrupted.

    Example: reliq demo --jobs 20000
    """
    check_int("--jobs", jobs, least=100, most=100_000)
    raise typer.Exit(code=0 if import_module("reliq.cli.demo").run(jobs) else 1)
