"""
Everything reliq raises.

    ReliqError
    ├── ConfigurationError (ValueError)   a setting, a name or an argument that is not allowed
    ├── BodyError (ValueError)            a body that cannot be sent
    ├── UndecodableError (ValueError)     a body that is not of the handler's type
    ├── PublishFailed                     a publish that gave up; `outcome` says what may have been written
    ├── RedisUnavailableError             Redis cannot be reached or cannot answer now
    ├── RedisRefusedError                 Redis answered with an error: rights, memory, a key's type
    │   ├── LoginError                    a wrong user or password, or no such database
    │   └── WrongKeyTypeError             a key of the queue holds something else
    ├── ProtocolError                     a reply that no script of reliq gives
    └── Stopped                           raised by `Job.check()`: the handler should end

and what it warns of:

    InsecureWarning (UserWarning)         others could read what is sent to Redis
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

#: The exit code of a process that cannot work as it is set up: another would fail, too (sysexits.h: EX_CONFIG).
EXIT_CONFIG = 78


class ReliqError(Exception):
    """The base class of all errors of reliq."""


class ConfigurationError(ReliqError, ValueError):
    """A setting, a name or an argument is not allowed; the message says what is."""


class BodyError(ReliqError, ValueError):
    """A body cannot be sent: not of the queue's type, not encodable, or too large."""


class UndecodableError(ReliqError, ValueError):
    """
    A body is not of the handler's type, or larger than `max_body`.

    Attributes:
        why: the reason, with the field's path, never its value.
        queue, id: of the message; empty where only its body is known.
    """

    def __init__(self, why: str, queue: str = "", id: str = "") -> None:
        self.why = why
        self.queue = queue
        self.id = id
        super().__init__(f"message {id!r} of queue {queue!r}: {why}" if id else why)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why, self.queue, self.id)


class PublishFailed(ReliqError):  # noqa: N818  what happened, as `Stopped`
    """
    A publish gave up.

    Publish again with the same `id` to be sure. Within five minutes, through the same `Queue` object and with the same
    options, the message is written at most once, unless it is cancelled meanwhile. Later, or from another process, an
    id is as safe as `dedup` makes it: a chosen one also after its message has ended, a generated one only while its
    message is alive.

    Attributes:
        ids: of the messages in the call that failed.
        outcome: `refused`: nothing was written; `unknown`: it may have been.
        why: the reason, as text.
        confirmed: how many messages of the same `publish_many` were confirmed before.

    Example:
        except PublishFailed as failed:
            queue.publish(body, id=failed.id)  # published once, also when the first one was written

        except PublishFailed as failed:  # of publish_many(items), where items is an iterator: it cannot be read twice
            queue.publish_many(itertools.chain(failed.rest, items))
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
        orders: Sequence[Any] = (),
        again: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple,
    ) -> None:
        self.queue = queue
        self.ids = ids
        self.outcome = outcome
        self.why = why
        self.confirmed = confirmed
        self.orders = orders
        self._again = again
        self._advised = advised  # whether the text says that it can be published again
        done, advice = {
            "refused": ("nothing of it was written", "it can be published again"),
            "unknown": ("it may have been written", "publish the same again with the same id to be sure"),
        }[outcome]
        super().__init__(
            f"publishing {'a message' if len(ids) == 1 else f'{len(ids)} messages'} to queue {queue!r} failed, {done}: {why.removesuffix('.')}"
            + f"; {advice}" * advised
        )

    @property
    def id(self) -> str:
        """The id of the message, the first when there were several."""
        return self.ids[0]

    @property
    def rest(self) -> tuple[Any, ...]:
        """
        The messages that were read and not confirmed, as `Outgoing` with their ids; none in another process.

        They are the messages of the failed call and, of a `publish_many`, all that it had read ahead.
        """
        return self._again(self.orders)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), advised=self._advised)
        return make, (self.queue, self.ids, self.outcome, self.why, self.confirmed)


class RedisUnavailableError(ReliqError):
    """
    Redis cannot be reached, or cannot answer at the moment.

    Attributes:
        maybe_ran: whether the command may have run all the same: it was sent, and no reply came.
        refusal: the code of Redis's answer, for example READONLY; empty when no answer came.
    """

    def __init__(self, message: str, *, maybe_ran: bool = False, refusal: str = "") -> None:
        super().__init__(message)
        self.maybe_ran = maybe_ran
        self.refusal = refusal


class RedisRefusedError(ReliqError):
    """
    Redis answered with an error that trying again does not mend.

    Attributes:
        maybe_ran: whether an earlier try of the same call may have run all the same.
    """

    maybe_ran = False


class LoginError(RedisRefusedError):
    """Redis refuses this URL or client: a wrong user or password, or a database that it does not have."""


class WrongKeyTypeError(RedisRefusedError):
    """A key of the queue holds another type of value."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the Redis key {key!r} is not of the type this queue needs; something else wrote it")
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key,)


class ProtocolError(ReliqError):
    """Redis sent a reply that no script of reliq gives; the script may have run."""

    maybe_ran = True


class Stopped(ReliqError):  # noqa: N818  what happened; a handler may let it pass
    """Raised by `Job.check()`: the worker stops, or the message was cancelled, or its lease was lost."""


class InsecureWarning(UserWarning):
    """Others could read what is sent to Redis: a password goes in the clear, or no certificate is checked."""
