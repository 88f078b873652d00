"""Has a server know the scripts, for users who may run those alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.admin import server
from reliq.admin.acl.probe import QUESTION
from reliq.admin.fsck.ids import CHECK
from reliq.errors import ConfigurationError
from reliq.lua import script, script_names

if TYPE_CHECKING:
    from reliq.admin.session import Session


def load_scripts(session: Session) -> list[str]:
    """
    Load every script of this version; return their names. A server forgets them when it ends.

    Raises:
        ConfigurationError: it is a Cluster, where each node needs them.
    """
    if session.is_cluster:
        raise ConfigurationError("each node of a Cluster needs the scripts; give one node's URL after another")
    scripts = [*map(script, script_names()), CHECK, QUESTION]
    for one in scripts:
        session.run(server.load_script(one))
    return [one.name for one in scripts]
