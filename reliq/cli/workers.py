"""`reliq workers`: who is alive."""

import time

from reliq.cli.options import Json, Url, admin
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table, say_age
from reliq.readable import spoken


def workers(json: Json = False, url: Url = None) -> None:
    """
    Show every worker process that is alive: where it runs, what it claims, how busy it is.

    A process that is killed is shown for up to 15 s more. Exit codes: 0 done (also when there is none), 1 Redis is
    away or refuses, 2 wrong usage.

    Example: reliq workers --json
    """
    found = admin(url).workers()
    if json:
        print_json(found)
        return
    if not found:
        say("No worker is alive.")
        return
    now = time.time()
    print_table(
        ("worker", "host", "pid", "version", "busy", "up", "last claim", "queues"),
        [
            (
                one.id,
                one.host,
                one.pid,
                one.version,
                f"{one.busy}/{one.slots}",
                spoken(max(0.0, now - one.started)),
                f"{spoken(max(0.0, now - one.last_claim))} ago",
                " ".join(one.queues),
            )
            for one in found
        ],
        long=("queues",),
    )
    say_age(one.seen for one in found)
