"""Bodies as bytes, published as they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from reliq.codec.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.publish.orders import Writer
from reliq.settings import MIB, QueueSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.message import Outgoing
    from reliq.queue import Queue

#: No body is larger.
LARGEST_BODY = 16 * MIB


def taker(queue: Queue[bytes]) -> Callable[[Outgoing[bytes]], bool]:
    """Return what says of a message whether `queue` can have it: a foreign one may be such as nobody may publish."""
    writer = Writer(queue.keys, Codec(bytes), QueueSettings(max_body=LARGEST_BODY), bare=queue.keys.bare)

    def takes(order: Outgoing[bytes]) -> bool:
        try:
            writer.special(order)
        except (ConfigurationError, BodyError):
            return False
        return True

    return takes


def is_json(body: bytes) -> bool:
    """Say whether `body` is one JSON value."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def check_json(body: bytes) -> None:
    """Raise BodyError when `body` is not JSON; the message does not show it."""
    if not is_json(body):
        raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
