"""The commands that a server receives and that its scripts run, as MONITOR prints them."""

import threading

import redis
from waiting import eventually

from reliq.lua import script

#: Position of `keyed_limit` in the arguments of a claim; a claim without a clock has an empty argument, dropped here.
_LIMIT = script("claim").args.index("keyed_limit") - 1


class Overheard:
    """
    Runs MONITOR on a separate connection until `close`.

    Attributes:
        lines: each command since the start, as redis-py returns it.
    """

    def __init__(self, url):
        self.lines = []
        # With redis-py's time-out of 5 s, the listening would end at the first pause.
        self._url, self._client = url, redis.Redis.from_url(url, socket_timeout=None)
        self._monitor = self._client.monitor()
        self._monitor.__enter__()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        try:
            for line in self._monitor.listen():
                self.lines.append(line)
        except (redis.RedisError, OSError, ValueError, AttributeError):
            return  # the connection is closed

    def all(self):
        """Return all lines so far."""
        with redis.Redis.from_url(self._url) as client:
            client.echo(word := f"heard-{len(self.lines)}")
        eventually(lambda: any(word in line["command"] for line in self.lines), "what was said is heard")
        return list(self.lines)

    def close(self):
        self._client.close()
        self._monitor.connection.disconnect()


def claims_in(lines):
    """Return the claims for queues with keys that asked for messages; a poll asks for none (limit 0)."""
    claim = script("claim")
    words = [line["command"].split() for line in lines if claim.sha in line["command"]]
    return [line for line in words if line[3 + int(line[2]) + _LIMIT] != "0"]


def tokens_in(lines, queue):
    """Return the wake tokens that scripts have pushed for a queue."""
    pushed = ["LPUSH", queue.keys.wake]
    return [line for line in lines if line["client_type"] == "lua" and line["command"].split()[:2] == pushed]
