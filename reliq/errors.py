"""
All exceptions of reliq.

    ReliqError
    ├── ConfigurationError (ValueError)   a setting, a name or an argument is not valid
    ├── BodyError (ValueError)            a body cannot be published
    ├── UndecodableError (ValueError)     a body does not match the handler's type
    ├── PublishFailed                     a publish failed; `outcome` shows whether Redis may have stored the message
    ├── RedisUnavailableError             Redis cannot be reached, or cannot serve commands now
    ├── RedisRefusedError                 Redis replied with an error, for example about permissions or memory
    │   ├── LoginError                    the user or password is wrong, or the database does not exist
    │   └── WrongKeyTypeError             another program wrote to a Redis key of the queue
    ├── ProtocolError                     Redis sent a reply that reliq's scripts never return
    └── JobInterrupted                    raised by `Job.raise_if_stopped()`: the handler should end

The only warning of reliq:

    InsecureWarning (UserWarning)         other people can read the data that is sent to Redis
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

#: Exit code for a wrong configuration (EX_CONFIG in sysexits.h). After this exit code, a restart would fail too.
EXIT_CONFIG = 78


class ReliqError(Exception):
    """The base class of all exceptions of reliq."""


class ConfigurationError(ReliqError, ValueError):
    """A setting, a name or an argument is not valid. The text of the exception describes the expected value."""


class BodyError(ReliqError, ValueError):
    """A body cannot be published, because it has the wrong type, cannot be encoded, or is too large."""


class UndecodableError(ReliqError, ValueError):
    """
    A body does not match the handler's type, or is larger than `max_body`.

    Attributes:
        why: the reason, with the path of the invalid field, but never with its value.
        queue, id: the queue name and the id of the message; empty if only the body is known, not its message.
    """

    def __init__(self, why: str, queue: str = "", id: str = "") -> None:
        self.why = why
        self.queue = queue
        self.id = id
        super().__init__(f"message {id!r} of queue {queue!r}: {why}" if id else why)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why, self.queue, self.id)


class PublishFailed(ReliqError):  # noqa: N818  not an error of the program, like `JobInterrupted`
    """
    A publish failed.

    Publish the message again with the same `id`, so that it is not stored twice. If you do this within five minutes,
    with the same `Queue` object and options, Redis stores the message at most once, unless it is cancelled in between.
    After five minutes, or in another process, the repeated publish is refused while the first message exists. With a
    chosen id, the repeated publish is also refused for the time `dedup` after the first message has ended.

    Attributes:
        ids: the ids of the messages whose publish failed.
        outcome: `refused`: Redis has stored none of these messages. `unknown`: Redis may have stored them.
        why: the reason, as text.
        confirmed: how many messages of the same `publish_many` were published before.

    Example:
        except PublishFailed as failed:
            queue.publish(body, id=failed.id)  # published once, even if the first try was written

        except PublishFailed as failed:  # from publish_many(items) of an iterator
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
        again: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple,
    ) -> None:
        self.queue = queue
        self.ids = ids
        self.outcome = outcome
        self.why = why
        self.confirmed = confirmed
        self.orders: Sequence[Any] = ()
        self._again = again
        self._advised = advised  # whether the text of this exception tells the user to publish again
        done, advice = {
            "refused": ("nothing was written", "you can publish again"),
            "unknown": ("it may have been written", "publish the same again with the same id to be sure"),
        }[outcome]
        super().__init__(
            f"publishing {'a message' if len(ids) == 1 else f'{len(ids)} messages'} to queue {queue!r} failed, {done}: {why.removesuffix('.')}"
            + f"; {advice}" * advised
        )

    @property
    def id(self) -> str:
        """The id of the message; if there are several messages, the id of the first message."""
        return self.ids[0]

    @property
    def rest(self) -> tuple[Any, ...]:
        """
        The messages that are not confirmed, as `OutgoingMessage` objects with their ids.

        These are the messages whose publish failed, and further messages that `publish_many` had already read from its
        `items`. The tuple is empty after the exception was pickled, for example to send it to another process.
        """
        return self._again(self.orders)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), advised=self._advised)
        return make, (self.queue, self.ids, self.outcome, self.why, self.confirmed)


class RedisUnavailableError(ReliqError):
    """
    Redis cannot be reached, or cannot serve commands at the moment.

    Attributes:
        maybe_ran: whether Redis may have run the command, because it was sent but no reply arrived.
        refusal: the error code in the reply of Redis, for example READONLY; empty if no reply arrived.
    """

    def __init__(self, message: str, *, maybe_ran: bool = False, refusal: str = "") -> None:
        super().__init__(message)
        self.maybe_ran = maybe_ran
        self.refusal = refusal


class RedisRefusedError(ReliqError):
    """
    Redis replied with an error that a retry does not fix.

    Attributes:
        maybe_ran: whether Redis may have run the command or script call in an earlier try.
    """

    maybe_ran = False


class LoginError(RedisRefusedError):
    """Redis refused the login, because the user or password is wrong, or the database does not exist."""


class WrongKeyTypeError(RedisRefusedError):
    """A Redis key of the queue has the wrong type, because another program wrote to it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the Redis key {key!r} has the wrong type for this queue; another program wrote it")
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key,)


class ProtocolError(ReliqError):
    """Redis sent a reply that reliq's scripts never return. The script may have run nevertheless."""

    maybe_ran = True


class JobInterrupted(ReliqError):  # noqa: N818  a handler may let it pass
    """Raised by `Job.raise_if_stopped()`, because the worker stops, the message was cancelled or its lease was lost."""


class InsecureWarning(UserWarning):
    """
    Other people can read the data that is sent to Redis.

    A password is sent without encryption, or the certificate of the server is not checked.
    """
