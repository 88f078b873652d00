"""Bodies as bytes, published as they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from reliq.codec.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.publish.orders import Writer
from reliq.settings import LARGEST_BODY, QueueSettings
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.message import Receipt
    from reliq.outgoing import Outgoing, PublishOptions
    from reliq.queue import Queue


def publish(queue: Queue[bytes], body: bytes, *, raw: bool, options: PublishOptions) -> Receipt:
    """Publish a body as it is; without `raw` it must be JSON, or BodyError is raised."""
    if not raw and not is_json(body):
        raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
    return queue.publish(body, **options)


def taker(queue: Queue[bytes]) -> Callable[[Outgoing[bytes]], bool]:
    """Return the test whether a message may be published in `queue`: a foreign program may have written what reliq refuses."""
    shards = queue.known_shards
    writer = Writer(shards, Codec(bytes), QueueSettings(max_body=LARGEST_BODY))

    def takes(order: Outgoing[bytes]) -> bool:
        try:
            made = writer.special(order)
        except (ConfigurationError, BodyError):
            return False
        if made.line and not shards.is_keyed:
            shards.read(for_seconds=PUBLISH_SECONDS)
        return not (made.line and shards.map.served > 1)

    return takes


def is_json(body: bytes) -> bool:
    """Say whether `body` is one JSON value."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
