"""
Everything reliq raises.

    ReliqError
    ├── ConfigurationError (ValueError)   a setting, a name or an argument that is not allowed
    ├── BodyError (ValueError)            a body that cannot be sent
    ├── UndecodableError (ValueError)     a body that is not of the handler's type
    ├── PublishFailed                     a publish that gave up, with its outcome
    ├── RedisUnavailableError             Redis cannot be reached or cannot answer now
    ├── RedisRefusedError                 Redis answered with an error: rights, memory, a key's type
    │   ├── LoginError                    a wrong user or password, or no such database
    │   └── WrongKeyTypeError             a key of the queue holds something else
    ├── ProtocolError                     a reply that is none of ours
    └── Stopped                           `Job.check()`: stopping, cancelled or lost

and what it warns of:

    InsecureWarning (UserWarning)         what goes to Redis could be read by others
"""

from functools import partial
from typing import Any, Literal


class ReliqError(Exception):
    """What all errors of reliq have in common."""


class ConfigurationError(ReliqError, ValueError):
    """A setting, a name or an argument is not allowed; the message says what is."""


class BodyError(ReliqError, ValueError):
    """A body cannot be sent: not of the queue's type, not encodable, or too large."""


class UndecodableError(ReliqError, ValueError):
    """A body is not of the handler's type; the message has the field's path, never its value."""


class PublishFailed(ReliqError):  # noqa: N818  what happened, as `Stopped`
    """
    A publish gave up.

    The same publish through the same `Queue` object, with these ids and all options as before, is written once at
    most, for five minutes and unless the message is cancelled. Elsewhere an id is protected as far as `dedup` goes: a
    chosen one also after its message has ended, a generated one only while its message is alive.

    Attributes:
        ids: of the messages in the call that failed.
        outcome: `refused`, nothing was written; `unknown`, it may have been.
        confirmed: how many messages of the same `publish_many` were confirmed before.
    """

    def __init__(
        self,
        queue: str,
        ids: tuple[str, ...],
        outcome: Literal["refused", "unknown"],
        why: str,
        confirmed: int = 0,
        *,
        advised: bool = True,
    ) -> None:
        self.queue, self.ids, self.outcome, self.why, self.confirmed = queue, ids, outcome, why, confirmed
        self._advised = advised  # whether the text says that it can be published again
        done, again = {
            "refused": ("nothing of it was written", "it can be published again"),
            "unknown": ("it may have been written", "publish the same again with the same id to be sure"),
        }[outcome]
        super().__init__(
            f"publishing {len(ids)} message(s) to queue {queue!r} failed, {done}: {why}" + f"; {again}" * advised
        )

    @property
    def id(self) -> str:
        """The id of the message, the first when there were several."""
        return self.ids[0]

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), advised=self._advised)
        return made, (self.queue, self.ids, self.outcome, self.why, self.confirmed)


class RedisUnavailableError(ReliqError):
    """
    Redis cannot be reached, or cannot answer at the moment.

    Attributes:
        maybe_ran: whether the command may have run all the same: it was sent, and no reply came.
    """

    def __init__(self, message: str, *, maybe_ran: bool = False) -> None:
        super().__init__(message)
        self.maybe_ran = maybe_ran


class RedisRefusedError(ReliqError):
    """
    Redis answered with an error that trying again does not mend.

    Attributes:
        maybe_ran: whether an earlier try of the same call may have run all the same.
    """

    maybe_ran = False


class LoginError(RedisRefusedError):
    """Redis is there and lets nobody in by this URL or client: a wrong user or password, or no such database."""


class WrongKeyTypeError(RedisRefusedError):
    """A key of the queue holds another type of value."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the Redis key {key!r} is not of the type this queue needs; something else wrote it")
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key,)


class ProtocolError(ReliqError):
    """Redis sent a reply that none of our scripts gives; whatever ran, ran."""

    maybe_ran = True


class Stopped(ReliqError):  # noqa: N818  what happened; a handler may let it pass
    """Raised by `Job.check()`: the worker stops, or the message was cancelled or lost."""


class InsecureWarning(UserWarning):
    """What goes to Redis could be read by others: a password in the clear, or a certificate that nobody checks."""
