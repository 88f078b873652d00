"""All scripts by name: the transitions, and the scripts of `reliq check`."""

from importlib.resources import files

import reliq.admin
import reliq.lua
from reliq.admin.check import CHECK, CHECK_KEYS
from reliq.lua import script, script_names

TRANSITIONS = {name: script(name) for name in script_names()}
OF_CHECK = {one.name: one for one in (CHECK, CHECK_KEYS)}
ONCE = TRANSITIONS | OF_CHECK
#: Scripts with a separate branch for queues with keys, listed a second time for that branch.
KEYED = {f"{name} (keyed)": one for name, one in TRANSITIONS.items() if one.keyed_keys}
SCRIPTS = ONCE | KEYED
NAMES = sorted(SCRIPTS)
#: Redis keys of limits; a script that declares such a key has the prelude of queues with keys.
OF_LIMITS = {"limits", "ring", "held", "asleep", "rates", "line"}


def source(name):
    """Return the text of a script, of its branch for queues with keys, or of a prelude."""
    package, (bare, _, keyed) = reliq.admin if name in OF_CHECK else reliq.lua, name.partition(" ")
    text = files(package).joinpath(f"{bare}.lua").read_text("utf-8")
    return reliq.lua._keyed_source(text) if keyed else text
