"""A queue of a Cluster gets more shards while it is published to and worked on, and a producer is paused meanwhile."""

import signal
import time

from reliq import Admin
from tests.harness.chaos.arena import Arena
from tests.harness.chaos.grounds import ManyServers
from tests.harness.chaos.schedule import PRODUCERS, Fault
from tests.harness.chaos.workload import GROWING


def shards_added(arena: Arena, fault: Fault) -> None:
    """Let the queue have half of the shards that it is to have in the end, or all; finish what was begun before."""
    assert isinstance(arena.ground, ManyServers)
    admin = Admin(url=arena.ground.cluster.url)
    admin.finish_resize(GROWING)
    now = admin.shards(GROWING).map
    if now.was == now.n < arena.ground.shards:
        member = arena.producers[fault.victim % PRODUCERS]
        with member.lock:
            member.send(signal.SIGSTOP)
            admin.resize(GROWING, max(arena.ground.shards // 2, 2 * now.n))
            time.sleep(fault.seconds)
            member.send(signal.SIGCONT)
    arena.journal.write("shards", map=admin.shards(GROWING).map.text.decode())
