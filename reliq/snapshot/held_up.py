"""For how long, at least, no message of a key has started: what looks saw of keys that wait without a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq import transitions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.call import Call
    from reliq.keys import Keys

#: Keys of a queue that are remembered at most, those held up for longest.
HELD_UP_LIMIT = 64
#: Keys that a look draws among those that sleep, and among those that have places.
DRAWN = 50


class HeldUp:
    """
    Remembers from look to look which message stood first under keys that sleep, or whose places are taken.

    As long as it is the same one, nothing of its key has started: a message that is old because its queue is slow does
    not count. The first look at a key tells nothing.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[str, float]]] = {}

    def question(self, keys: Keys) -> Call[dict[str, str]]:
        """Return what asks for the keys that were remembered, and for some others."""
        return transitions.held_up(keys, most=DRAWN, of=[*self._known.get(keys.entry, ())])

    def take(self, keys: Keys, first: Mapping[str, str], now_ms: float) -> float:
        """Take the answer to `question`; return for how many seconds the key is known to wait that waits for longest."""
        known = self._known.get(keys.entry, {})
        since = {key: known[key][1] if known.get(key, ("",))[0] == id else now_ms for key, id in first.items()}
        longest = sorted(since, key=since.__getitem__)[:HELD_UP_LIMIT]
        self._known[keys.entry] = {key: (first[key], since[key]) for key in longest}
        return max(0.0, now_ms - since[longest[0]]) / 1000 if longest else 0.0

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget every queue but these."""
        entries = {keys.entry for keys in queues}
        self._known = {entry: keys for entry, keys in self._known.items() if entry in entries}
