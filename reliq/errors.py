"""
All exceptions of reliq.

    ReliqError
    ├── ConfigurationError (ValueError)   a setting, a name or an argument is not valid
    ├── BodyError (ValueError)            a body cannot be published
    ├── UndecodableError (ValueError)     a body does not match the handler's type
    ├── PublishFailed                     a publish failed; `outcome` shows whether the message may have been written
    ├── RedisUnavailableError             Redis cannot be reached or cannot answer now
    ├── RedisRefusedError                 Redis replied with an error: permissions, memory, a key's type
    │   ├── LoginError                    wrong user or password, or no such database
    │   └── WrongKeyTypeError             another program wrote to a key of the queue
    ├── ProtocolError                     Redis sent a reply that reliq's scripts never send
    └── JobInterrupted                    raised by `Job.raise_if_stopped()`: the handler should end

and its warning:

    InsecureWarning (UserWarning)         data sent to Redis can be read by others
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

#: Exit code for wrong configuration, after which a restart would fail too (sysexits.h: EX_CONFIG).
EXIT_CONFIG = 78


class ReliqError(Exception):
    """The base class of all exceptions of reliq."""


class ConfigurationError(ReliqError, ValueError):
    """A setting, a name or an argument is not valid; the message describes the expected value."""


class BodyError(ReliqError, ValueError):
    """A body cannot be published: wrong type, not encodable, or too large."""


class UndecodableError(ReliqError, ValueError):
    """
    A body does not match the handler's type, or is larger than `max_body`.

    Attributes:
        why: the reason with the path of the field, never its value.
        queue, id: queue name and id of the message; empty if only the body is known.
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

    Publish again with the same `id` to avoid a second message. If you do this within five minutes, with the same
    `Queue` object and options, the message is written at most once, unless it is cancelled in between. After five
    minutes, or in another process, the repeated publish is refused while the first message exists. With a chosen id,
    the repeated publish is also refused for `dedup` after the end of the first message.

    Attributes:
        ids: the ids of the messages in the failed call.
        outcome: `refused`: nothing was written; `unknown`: the messages may have been written.
        why: the reason, as text.
        confirmed: how many messages of the same `publish_many` were confirmed before.

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
        self._advised = advised  # whether the text of this exception advises to publish again
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
        """The message id; for several messages, the first id."""
        return self.ids[0]

    @property
    def rest(self) -> tuple[Any, ...]:
        """
        The messages that were read but not confirmed, as `OutgoingMessage` with their ids.

        These are the messages of the failed call and, for `publish_many`, further messages that it had already read.
        Empty after the exception was pickled, for example to send it to another process.
        """
        return self._again(self.orders)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), advised=self._advised)
        return make, (self.queue, self.ids, self.outcome, self.why, self.confirmed)


class RedisUnavailableError(ReliqError):
    """
    Redis cannot be reached, or cannot answer at the moment.

    Attributes:
        maybe_ran: whether the command may have run, because it was sent but no reply came.
        refusal: the error code of Redis, for example READONLY; empty without a reply.
    """

    def __init__(self, message: str, *, maybe_ran: bool = False, refusal: str = "") -> None:
        super().__init__(message)
        self.maybe_ran = maybe_ran
        self.refusal = refusal


class RedisRefusedError(ReliqError):
    """
    Redis replied with an error that a retry does not fix.

    Attributes:
        maybe_ran: whether an earlier try of the same call may have run.
    """

    maybe_ran = False


class LoginError(RedisRefusedError):
    """Redis refused the login: wrong user or password, or the database does not exist."""


class WrongKeyTypeError(RedisRefusedError):
    """A key of the queue has the wrong type, because another program wrote to it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the Redis key {key!r} has the wrong type for this queue; another program wrote it")
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key,)


class ProtocolError(ReliqError):
    """Redis sent a reply that reliq's scripts never send; the script may have run."""

    maybe_ran = True


class JobInterrupted(ReliqError):  # noqa: N818  a handler may let it pass
    """Raised by `Job.raise_if_stopped()`: the worker is stopping, the message was cancelled, or its lease was lost."""


class InsecureWarning(UserWarning):
    """Data sent to Redis can be read by others: a password is sent unencrypted, or no certificate is checked."""
