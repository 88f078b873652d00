"""`reliq demo`: thousands of jobs, two processes, one of them killed half way, and an account that must balance."""

from importlib import import_module
from typing import Annotated

import typer

from reliq.settings import whole


def demo(
    jobs: Annotated[int, typer.Option(help="How many jobs to publish.")] = 5000,
    url: Annotated[str | None, typer.Option(help="A Redis to use instead of a private one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the demo's chance.")] = 1,
) -> None:
    """
    Run thousands of jobs through two processes, kill one half way, and balance the account.

    Example: reliq demo --jobs 20000
    """
    whole("--jobs", jobs, least=10, most=1_000_000)
    raise typer.Exit(0 if import_module("reliq.cli.demo_story").run(jobs, url, seed) else 1)
