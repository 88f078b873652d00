"""What a server is asked, and what its scripts do, as MONITOR tells it."""

import threading

import redis
from waiting import eventually

from reliq.lua import script

#: The place of `keyed_limit` among the arguments of a claim whose clock is an empty text, which is left out here.
_LIMIT = script("claim").args.index("keyed_limit") - 1


class Overheard:
    """
    Listens on a connection of its own; `close` ends that.

    Attributes:
        lines: each command since the beginning, as redis-py tells it.
    """

    def __init__(self, url):
        self.lines = []
        self._url, self._client = url, redis.Redis.from_url(url)
        self._monitor = self._client.monitor()
        self._monitor.__enter__()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        try:
            for line in self._monitor.listen():
                self.lines.append(line)
        except (redis.RedisError, OSError, ValueError, AttributeError):
            return  # it is closed

    def all(self):
        """Every line up to now."""
        with redis.Redis.from_url(self._url) as client:
            client.echo(word := f"heard-{len(self.lines)}")
        eventually(lambda: any(word in line["command"] for line in self.lines), "what was said is heard")
        return list(self.lines)

    def close(self):
        self._client.close()
        self._monitor.connection.disconnect()


def claims_in(lines):
    """The claims with regard to keys that could have taken something: a look has the limit 0."""
    claim = script("claim")
    words = [line["command"].split() for line in lines if claim.sha in line["command"]]
    return [line for line in words if line[3 + int(line[2]) + _LIMIT] != "0"]


def tokens_in(lines, queue):
    """The wake tokens that scripts have pushed for a queue."""
    pushed = ["LPUSH", queue.keys.wake]
    return [line for line in lines if line["client_type"] == "lua" and line["command"].split()[:2] == pushed]
