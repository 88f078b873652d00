"""Failures to get a reply: what they are, and whether the command may have run."""

from typing import Any

import redis
import redis.asyncio

#: Errors after which a connection is of no more use.
BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)


class NotSentError(redis.ConnectionError):
    """
    No connection could be had, so the command cannot have run.

    Attributes:
        is_crowded: whether all connections that there may be are in use: that says nothing of the server.
    """

    is_crowded = False


def is_failure(reply: Any) -> bool:
    """Say whether a reply is none: its server did not answer, or could not be reached."""
    return isinstance(reply, BROKEN) and not isinstance(reply, redis.AuthenticationError)


def not_sent(error: Exception, pool: Any) -> Exception:
    """Return what to raise when a connection could not be made; a refused login stays what it is."""
    if isinstance(error, redis.AuthenticationError):
        return error
    if isinstance(error, redis.ResponseError):  # to SELECT or AUTH
        return redis.AuthenticationError(str(error))
    text = str(error)
    if text.startswith("No connection available"):
        crowded = NotSentError(text)
        crowded.is_crowded = True
        return crowded
    kind = getattr(pool, "beneath", pool).connection_class
    is_secure = issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)
    if is_secure and ("Timeout connecting" in text or "WRONG_VERSION_NUMBER" in text):
        return NotSentError(f"{text}; if that port speaks no TLS, the URL begins with redis://")
    if not is_secure and "connecting to" not in text:  # it was closed at the greeting
        return NotSentError(f"{text}; if that port speaks TLS, the URL begins with rediss://")
    return NotSentError(text)
