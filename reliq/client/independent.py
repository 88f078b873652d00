"""Independent servers that hold the shards of a queue: each of them knows which of how many it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from reliq import transitions
from reliq.client.client import Clients
from reliq.errors import ConfigurationError, ProtocolError
from reliq.hashtags import SHARDS_LIMIT
from reliq.shardmap import ShardMap, map_text
from reliq.transport.target import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.keys import Keys, Layout
    from reliq.transport.target import Target

_Count = Annotated[int, msgspec.Meta(ge=1, le=SHARDS_LIMIT)]
#: They are tried for this many seconds while one of them is away.
SERVERS_SECONDS = 2.0


class ServerPlace(msgspec.Struct):
    """The map of an independent server says besides that it is the `place`-th of `n`."""

    epoch: int
    n: _Count
    place: _Count


def shards_wanted(
    shards: int | Sequence[str] | None, url: Target | None, layout: Layout
) -> tuple[int | None, Target | None]:
    """
    Return how many shards a queue must have, and where it is: the URLs of its servers, when it was given those.

    Raises:
        ConfigurationError: it is neither a number of shards nor a list of URLs, or both `url` and those are given.
    """
    if shards is None:
        return None, url
    if not isinstance(shards, list | tuple):
        return ShardMap.wanted(shards, layout), url
    if url is not None or layout.bare or not all(isinstance(one, str) for one in shards):
        raise ConfigurationError(
            "shards must be their number, or a list of Redis URLs, without `url` beside it and in reliq's own layout"
        )
    return len(shards), tuple(shards)


def take_places(keys: Keys, urls: Sequence[str]) -> None:
    """
    See that the servers are named as they were, all and in their order; new ones are given their places.

    Raises:
        ConfigurationError: one has another place.
        RedisUnavailableError, RedisRefusedError: one cannot be asked.
    """
    clients = [Clients(url, ()).blocking() for url in urls]
    texts = [client.run(map_text(keys), for_seconds=SERVERS_SECONDS) for client in clients]
    for at, text in enumerate(texts):
        if text:
            _check(keys, urls, at, text)
    is_new = not any(texts) and not clients[0].run(transitions.counts(keys)).totals
    number = len(urls)
    map = ShardMap(1, number, number, "steady") if is_new else ShardMap(1, number, 1, "growing")
    for at, (client, text) in enumerate(zip(clients, texts, strict=True)):
        if not text:
            value = msgspec.json.encode(msgspec.to_builtins(map) | {"place": at + 1})
            _check(keys, urls, at, client.run(transitions.remap(keys, b"", value)))


def _check(keys: Keys, urls: Sequence[str], at: int, text: bytes) -> None:
    """Raise ConfigurationError when a server has another place than it is named at, or none because of a queue's keys."""
    if text == transitions.REMAP_KEYED:
        raise ConfigurationError(
            f"queue {keys.name!r} has keys or limits at {shown(urls[at])}, and is in one place: name that server alone"
        )
    try:
        found = msgspec.json.decode(text, type=ServerPlace)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"the map of queue {keys.name!r} at {shown(urls[at])} is none of a server ({error})"
        ) from None
    if (found.place, found.n) != (at + 1, len(urls)):
        raise ConfigurationError(
            f"{shown(urls[at])} is {found.place} of {found.n} servers of queue {keys.name!r} (epoch {found.epoch}), and "
            f"named as {at + 1} of {len(urls)}: name all of them, in their order"
        )
