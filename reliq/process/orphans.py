"""The first process of a container inherits orphans: somebody must collect those that have died."""

import os
from collections.abc import Collection
from contextlib import suppress

#: The number of a container's first process.
FIRST_PROCESS = 1


def reap_orphans(own: Collection[int]) -> None:
    """Collect the dead processes whose parents are gone, but for `own`, if this is a container's first process."""
    if os.getpid() != FIRST_PROCESS:
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)
