"""`reliq init`: a small application to begin with."""

from pathlib import Path
from typing import Annotated

import typer

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
    if there := [name for name in FILES if (folder / name).exists()]:
        raise ConfigurationError(f"{folder / there[0]} is there already; nothing was written: name another folder")
    for name, text in FILES.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
        say(f"wrote {path}")
    if folder != Path():
        say("", f"cd {folder}")
    say(
        "docker compose up --detach redis  # or any Redis of yours",
        "export RELIQ_URL=redis://127.0.0.1:6379/0",
        "python -m app Ada",
        "reliq worker --reload",
        "python -m pytest",
    )
