"""Every script that there is, by its name: the transitions' and the one of `reliq check`."""

from importlib.resources import files

import reliq.admin.fsck
import reliq.lua
from reliq.admin.fsck.ids import CHECK
from reliq.lua import script, script_names

SCRIPTS = {name: script(name) for name in script_names()} | {CHECK.name: CHECK}
NAMES = sorted(SCRIPTS)


def source(name):
    """The text of a script as it was written, or of the prelude."""
    home = reliq.admin.fsck if name == CHECK.name else reliq.lua
    return files(home).joinpath(f"{name}.lua").read_text("utf-8")
