"""Bodies as bytes, published as they are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from reliq.codec.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.message import Outgoing
from reliq.publish.orders import Writer
from reliq.settings import MIB, QueueSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from reliq.queue import Queue

#: No body is larger.
LARGEST_BODY = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """
    How bodies are published; None means what a queue has by default.

    Attributes:
        delay: seconds until they are due.
        at: when they are due, as an aware datetime, instead of `delay`.
        retries: deliveries after the first.
        ttl: seconds after the due time in which a delivery may start.
        headers: short texts that travel beside each body.
        dedup: seconds for which a chosen id, or a line of a file, stays known after its end.
    """

    delay: float = 0.0
    at: datetime | None = None
    retries: int | None = None
    ttl: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    dedup: float | None = None

    def order(self, body: bytes, id: str | None, dedup: float | None = None) -> Outgoing[bytes]:
        """Return `body` as what `Queue.publish_many` takes."""
        return Outgoing(
            body=body,
            id=id,
            delay=self.delay,
            at=self.at,
            retries=self.retries,
            ttl=self.ttl,
            headers=self.headers,
            dedup=dedup if self.dedup is None else self.dedup,
        )


def taker(queue: Queue[bytes]) -> Callable[[Outgoing[bytes]], bool]:
    """Return what says of a message whether `queue` can have it: a foreign one may be such as nobody may publish."""
    writer = Writer(queue.keys, Codec(bytes), QueueSettings(max_body=LARGEST_BODY), bare=queue.keys.bare)

    def takes(order: Outgoing[bytes]) -> bool:
        try:
            writer.order(order)
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
