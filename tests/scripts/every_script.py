"""Every script that there is, by its name: the transitions', those for a queue with keys, and those of `reliq check`."""

from importlib.resources import files

import reliq.admin
import reliq.lua
from reliq.admin.check import CHECK, CHECK_KEYS
from reliq.lua import script, script_names

PLAIN = {name: script(name) for name in script_names()}
#: The variants for a queue with keys, of those scripts that have one.
KEYED = {
    f"{name} (keyed)": variant for name, one in PLAIN.items() if (variant := script(name, keyed=True)).sha != one.sha
}
OF_CHECK = {one.name: one for one in (CHECK, CHECK_KEYS)}
SCRIPTS = PLAIN | KEYED | OF_CHECK
NAMES = sorted(SCRIPTS)
#: The keys of a queue's limits; a script that has one of them has the prelude of queues with keys.
OF_LIMITS = {"limits", "ring", "held", "asleep", "rates", "line"}


def source(name):
    """The text of a script as it is read, or of a prelude."""
    package, (bare, _, keyed) = reliq.admin if name in OF_CHECK else reliq.lua, name.partition(" ")
    if "prelude" in name:
        return files(package).joinpath(f"{name}.lua").read_text("utf-8")
    return reliq.lua._source(bare, package.__name__, keyed=bool(keyed))
