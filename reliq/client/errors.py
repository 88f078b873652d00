"""Foreign errors into ours, once for both clients."""

from typing import Any

import redis

from reliq.call import Call, Command, Request
from reliq.errors import LoginError, RedisRefusedError, RedisUnavailableError, ReliqError, WrongKeyTypeError
from reliq.transport import error_replies as replies
from reliq.transport.failures import NotSentError
from reliq.transport.known_scripts import is_denied_eval

_KEY_MARK = " RELIQ_KEY "


def translated(request: Request[Any], error: Exception) -> ReliqError:
    """Return `error` of redis-py as an error of ours."""
    name = request.script.name if isinstance(request, Call) else f"the command {request.command[0]!s}"
    text = str(error)
    if _KEY_MARK in text:
        return WrongKeyTypeError(text.partition(_KEY_MARK)[2].split()[0].rstrip(","))
    if text.startswith("WRONGTYPE") and isinstance(request, Command):
        return WrongKeyTypeError(str(request.command[1]))
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return LoginError(
            f"Redis lets nobody in by this user, password or database: {text}; give them in RELIQ_URL, as "
            "redis://:PASSWORD@host or redis://USER:PASSWORD@host:6379/0"
        )
    if is_denied_eval(error) and isinstance(request, Call):
        return RedisRefusedError(
            f"{name}: this user may not EVAL, and Redis lacks the script: run `reliq scripts load`"
        )
    if (code := replies.code(error)) in replies.NOT_NOW:
        told = text if code in text else f"{code} {text}"  # redis-py cuts some codes off
        return RedisUnavailableError(f"{name}: Redis answered: {told}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError):
        return RedisUnavailableError(f"{name}: {text}", maybe_ran=True)
    return RedisRefusedError(f"{name}: Redis answered: {text}")
