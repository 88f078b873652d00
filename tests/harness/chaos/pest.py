"""A late worker in every consumer: it uses receipts again that were used before. Redis must refuse each."""

import random
import threading
import time

from reliq import transitions
from reliq.client.client import Client
from reliq.errors import ReliqError
from tests.harness.chaos.workload import place_keys

PAUSE_SECONDS = 0.1


def pester(tap, chance: random.Random) -> None:
    """Use old receipts again and again, in a thread of its own, for as long as the process lives."""
    threading.Thread(target=_pester, args=(tap, chance), daemon=True).start()


def _pester(tap, chance: random.Random) -> None:
    client = Client(tap)
    while True:
        time.sleep(PAUSE_SECONDS)
        old = list(tap.spent)
        queue = chance.choice([name for name, _ in old] or [""])
        receipts = [claimed for name, claimed in old if name == queue]
        verb = chance.choice(["ack", "nack", "extend", "release"])
        if receipts:
            try:
                client.run(_call(verb, place_keys(queue), receipts))
            except ReliqError:
                continue  # Redis is away


def _call(verb, keys, receipts):
    match verb:
        case "ack":
            return transitions.ack(keys, [(one, None) for one in receipts])
        case "nack":
            return transitions.nack(keys, [(one, 0, "failed 1 late", b"") for one in receipts])
        case "extend":
            return transitions.extend(keys, receipts, lease_ms=2000)
        case _:
            return transitions.release(keys, receipts)
