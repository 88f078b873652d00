"""One producer process: publishes at a steady rate until its time is over, and records every result."""

import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from reliq import Durability, OutgoingMessage, PublishFailed, ReliqError
from reliq.logs import configure_logging
from tests.harness.chaos.history import Journal
from tests.harness.chaos.workload import QUEUES, SHARES, wish

#: How long a publish without a reply is repeated with the same id.
INSIST_SECONDS = 3.0
#: A longer backlog would take the consumers too long.
BACKLOG_LIMIT = 3000
LOOK_SECONDS = 1.0
#: The durability of those Cluster publishes that wait for a replica.
WAIT = Durability.replicas(1, timeout=0.3)
logger = logging.getLogger("producer")


class Producer:
    """
    Publish the messages that the seed decides, step by step.

    Args:
        shares: queue -> its share of the publishes.
        calls: call numbers that no other producer of the process uses.
    """

    def __init__(
        self, name: str, seed: int, journal: Journal, shares: Mapping[str, int], calls: Iterator[int], *, waits: bool
    ) -> None:
        self._name, self._seed, self._journal = name, seed, journal
        self._shares, self._calls, self._waits = shares, calls, waits
        self._last: deque[tuple[str, str]] = deque(maxlen=5)  # queue and id of the last confirmed messages
        self._looked_at = time.monotonic()

    def work(self, rate: float, until: float) -> None:
        """Publish `rate` messages a second until the monotonic time `until`."""
        start, published, number = time.monotonic(), 0, 0
        while (now := time.monotonic()) < until:
            if now - self._looked_at > LOOK_SECONDS:
                start += self._wait_for_consumers(until)
            ahead = start + published / rate - now
            if ahead > 0:
                time.sleep(min(ahead, max(0.0, until - now)))
            one = wish(self._seed, self._name, number, self._shares)
            self._publish(one)
            if one.cancels and len(self._last) >= one.cancels:
                self._cancel(*self._last[-one.cancels])
            published, number = published + len(one.names), number + 1

    def _publish(self, one: SimpleNamespace) -> None:
        call = next(self._calls)
        facts = {"names": one.names, "queue": one.queue, "delay": one.delay, "key": one.key}
        self._journal.write("publish", call=call, **facts, cost=min(one.cost, one.spent))
        until = time.monotonic() + INSIST_SECONDS
        ids: tuple[str, ...] = one.names if one.chosen else ()
        outcome = "refused"
        while True:
            try:
                ids, durable = self._send(one, ids)
            except PublishFailed as failure:
                logger.error("PublishFailed: %s", failure)
                # With several shards, the error lists the messages of the failed shards. Messages with chosen ids are sent again.
                ids = ids or failure.ids
                outcome = "unknown" if failure.outcome == "unknown" else outcome
                if time.monotonic() < until:
                    continue
                self._journal.write("published", call=call, ids=ids, outcome=outcome)
                return
            self._journal.write("published", call=call, ids=ids, outcome="ok", durable=durable)
            self._last.extend((one.queue, id) for id in ids)
            return

    def _send(self, one: SimpleNamespace, ids: tuple[str, ...]) -> tuple[tuple[str, ...], bool | None]:
        """Call publish once; return the ids of the published messages, and whether replicas confirmed them."""
        queue, padding = QUEUES[one.queue], "x" * one.padding
        durability = WAIT if self._waits and one.waits else None
        bodies = [{"name": name, "delay": one.delay, "padding": padding, "spent": one.spent} for name in one.names]
        options = {"delay": one.delay, "key": one.key or None, "cost": one.cost}
        if len(bodies) == 1:
            receipt = queue.publish(bodies[0], id=ids[0] if ids else None, durability=durability, **options)
            return (receipt.id,), receipt.durable
        items = [OutgoingMessage(body=body, id=id, **options) for body, id in zip(bodies, ids, strict=True)]
        return ids, queue.publish_many(items, durability=durability).durable

    def _cancel(self, queue: str, id: str) -> None:
        call = next(self._calls)
        self._journal.write("cancel", call=call, id=id)
        answer = "unknown"
        with suppress(ReliqError):
            answer = QUEUES[queue].cancel(id)
        self._journal.write("cancel_answered", call=call, id=id, answer=answer)

    def _wait_for_consumers(self, until: float) -> float:
        """Wait until the backlog is short enough; return how long that took."""
        self._looked_at = since = time.monotonic()
        while time.monotonic() < until:
            with suppress(ReliqError):
                if sum(QUEUES[name].counts().alive for name in self._shares) < BACKLOG_LIMIT:
                    break
            time.sleep(0.2)
        waited = time.monotonic() - since
        return waited if waited > 0.2 else 0.0


def main(path: str, seed: str, rate: str, until: str, kind: str) -> int:
    configure_logging("info")
    name, shares, calls = Path(path).stem.replace("producer-", "p"), SHARES[kind], itertools.count(1)
    # In a Cluster each queue has its own thread, so that an unreachable node does not block the other queues.
    parts = {name: shares} if kind != "cluster" else {f"{name}-{queue}": {queue: shares[queue]} for queue in shares}
    threads = []
    for part, own in parts.items():
        one = Producer(part, int(seed), Journal(Path(path)), own, calls, waits=kind == "cluster")
        share = float(rate) * sum(own.values()) / sum(shares.values())
        threads.append(threading.Thread(target=one.work, args=(share, float(until))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
