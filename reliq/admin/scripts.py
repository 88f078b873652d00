"""Has a server know the scripts, for users who may run those alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.admin.acl.probe import QUESTION
from reliq.call import Command
from reliq.lua import script, script_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.lua import Script


def load_scripts(ask: Callable[[Command[Any]], Any]) -> list[str]:
    """Load every script of this version; return their names. A server forgets them when it ends."""
    scripts = [*map(script, script_names()), QUESTION]
    for one in scripts:
        ask(_load(one))
    return [one.name for one in scripts]


def _load(one: Script) -> Command[str]:
    return Command(("SCRIPT", "LOAD", one.text), bytes.decode)
