"""Circuit breakers: a node that does not answer fails at once, until it does."""

import logging
import random
import threading
import time
from collections.abc import Callable, Collection

from reliq.transport.failures import BROKEN, NotSentError

#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()
logger = logging.getLogger(__name__)

#: The first wait before a node is tried again, in seconds; each further one is twice as long.
FIRST_PAUSE_SECONDS = 0.1
#: The longest wait.
LONGEST_PAUSE_SECONDS = 0.5


class Breakers:
    """
    The nodes that did not answer in time. What is sent to them fails at once, so that nobody waits for them.

    A thread for each of them connects to it and pings it, with a back-off, and ends when it is answered.

    Args:
        probe: connects to a node and pings it; raises what redis-py does.
        meanwhile: called after each try that failed.
    """

    def __init__(self, probe: Callable[[str], object], meanwhile: Callable[[], None]) -> None:
        self._probe, self._meanwhile = probe, meanwhile
        self._lock = threading.Lock()
        #: Node -> why it failed.
        self._open: dict[str, Exception] = {}

    def check(self, node: str) -> str:
        """Return `node`; raise NotSentError when it is known not to answer."""
        if self._open and (why := self._open.get(node)):
            raise NotSentError(f"{node} does not answer and is tried again in the background ({why})")
        return node

    def trip(self, node: str, why: Exception) -> None:
        """Have everything for `node` fail until it answers again."""
        with self._lock:
            if node in self._open:
                return
            self._open[node] = why
        threading.Thread(target=self._try, args=(node,), name=f"reliq-ping-{node}", daemon=True).start()

    def keep(self, nodes: Collection[str]) -> None:
        """Forget the nodes that are none of `nodes`."""
        with self._lock:
            for gone in self._open.keys() - set(nodes):
                del self._open[gone]

    def close(self) -> None:
        """Try no node any more; what is sent to one goes there again."""
        self.keep(())

    def _try(self, node: str) -> None:
        pause = FIRST_PAUSE_SECONDS
        while node in self._open:
            time.sleep(pause * _chance.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                self._probe(node)
            except BROKEN:
                self._meanwhile()
                continue
            except Exception as error:  # it answers, if only to refuse
                logger.debug("%s answers again: %s", node, error)
            with self._lock:
                self._open.pop(node, None)
