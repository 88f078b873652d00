"""Has servers know the scripts, for users who may run those alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.admin import server
from reliq.admin.acl.probe import QUESTION
from reliq.admin.fsck.ids import CHECK, CHECK_KEYS
from reliq.lua import script, script_names

if TYPE_CHECKING:
    from reliq.admin.session import Session


def load_scripts(session: Session) -> list[str]:
    """Have each server, and each replica that may be promoted, know every script of this version; return their names."""
    variants = {script(name, keyed=keyed): None for keyed in (False, True) for name in script_names()}
    scripts = [*variants, CHECK, CHECK_KEYS, QUESTION]
    for server_session in session.each(replicas=True).values():
        for one in scripts:
            server_session.run(server.load_script(one))
    return list(dict.fromkeys(one.name for one in scripts))
