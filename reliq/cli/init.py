"""`reliq init`: a small application to begin with."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from reliq import distribution
from reliq.cli.output import say
from reliq.cli.skeleton import FILES
from reliq.errors import ConfigurationError


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
