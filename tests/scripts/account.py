"""How messages ended: counted, and the last of them by name."""

from collections import Counter

#: How many acked messages are remembered, and how many others.
HISTORY, ENDS = 3, 1000


class Account:
    """The totals of a queue, and (id, kind) of the last messages: those not acked, and those acked."""

    def __init__(self):
        self.totals = Counter()
        self.ends, self.history = [], []

    def note_end(self, id, kind):
        self.totals[kind] += 1
        kept = self.history if kind == "acked" else self.ends
        kept.append((id, kind))
        del kept[: -HISTORY if kind == "acked" else -ENDS]
