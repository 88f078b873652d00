"""`reliq demo`: run thousands of jobs, kill a process that runs some of them, and check that none is lost."""

from importlib import import_module
from typing import Annotated

import typer

from reliq.settings import whole


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
    whole("--jobs", jobs, least=100, most=100_000)
    raise typer.Exit(0 if import_module("reliq.cli.demo_story").run(jobs, url, seed) else 1)
