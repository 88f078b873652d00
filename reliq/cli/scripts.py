"""`reliq scripts`: the Lua scripts of this version, on a server."""

import typer

from reliq.cli.options import Json, Url, admin
from reliq.cli.output import print_json, say
from reliq.text import count_of

scripts = typer.Typer(
    help="Load the Lua scripts, for users whose rule is made with `reliq acl --without-eval`.", add_completion=False
)


@scripts.callback()
def root() -> None:
    """Load the Lua scripts, for users whose rule is made with `reliq acl --without-eval`."""


@scripts.command()
def load(json: Json = False, url: Url = None) -> None:
    """
    Load the scripts of this version, so that users without EVAL can run them.

    Redis forgets them when it restarts, and a replica that is promoted may not have them: run this after each start
    of the server, after a failover, and with each new version of reliq before its producers start. It needs a user
    who may SCRIPT LOAD.

    Example: reliq scripts load
    """
    loaded = admin(url).load_scripts()
    if json:
        print_json(loaded)
        return
    say(f"{count_of(len(loaded), 'script is', 'scripts are')} loaded")
