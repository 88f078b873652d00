"""Make Redis forget scripts before a round trip: all scripts, or one script."""

from contextlib import contextmanager

from reliq.lua import script
from reliq.redis.connection import ServerConnections

_SCRIPTS = ("publish", "limit", "promote", "reclaim", "claim", "ack", "nack", "counts")


def lose(client, lost):
    """Make Redis forget one script, or all of `all`."""
    client.script_flush()
    for name in _SCRIPTS:
        if lost not in ("all", name):
            client.script_load(script(name).text)


class Losing:
    """Counts round trips of this process; before round trip number `at`, Redis forgets scripts."""

    def __init__(self, client, lost, at):
        self._client, self._lost, self._at, self.trips = client, lost, at, 0

    def trip(self):
        self.trips += 1
        if self.trips == self._at:
            lose(self._client, self._lost)


@contextmanager
def _counting(losing, monkeypatch):
    async def send(connections, commands, send=ServerConnections.send):
        losing.trip()
        return await send(connections, commands)

    with monkeypatch.context() as patch:
        patch.setattr(ServerConnections, "send", send)
        yield


def with_scripts_lost(client, lost, monkeypatch, work):
    """
    Call `work` once for each of its round trips; before this round trip, Redis forgets scripts.

    Return the number of round trips.
    """
    trips = at = 0
    while at <= trips:
        at += 1
        work(2 * at)  # this process knows that Redis has all scripts
        losing = Losing(client, lost, at)
        with _counting(losing, monkeypatch):
            work(2 * at + 1)
        trips = losing.trips
    return trips
