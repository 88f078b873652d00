"""Model of the totals: the number of each kind of end, and the ids of the last ends."""

from collections import Counter

#: Number of acked messages that are remembered, and of others.
HISTORY, ENDS = 3, 1000


class Account:
    """The totals of a queue, and (id, kind) of the last ends: other than acked, and acked."""

    def __init__(self):
        self.totals = Counter()
        self.ends, self.history = [], []

    def note_end(self, id, kind):
        self.totals[kind] += 1
        kept = self.history if kind == "acked" else self.ends
        kept.append((id, kind))
        del kept[: -HISTORY if kind == "acked" else -ENDS]
