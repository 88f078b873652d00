"""What an operator stands on: one Redis, the way to its queues, and what is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.admin.existing import check_known
from reliq.client.client import Client
from reliq.keys import Keys, Layout, check_layout
from reliq.transport.connection import Connection, check_slots

if TYPE_CHECKING:
    from reliq.transport.pool import Target

#: How long a look or a step may take in all before Redis counts as away.
TRY_SECONDS = 2.0
#: How long one reply is awaited: some looks read much.
ANSWER_SECONDS = 5.0


class Ground:
    """
    One Redis, as an operator sees it.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the keys of its queues are spelled.

    Raises:
        ConfigurationError: there is no Redis to look at, or it is none that reliq can use.
    """

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ) -> None:
        self._target = url
        self._connection = Connection.to(url)
        check_layout(layout)
        check_slots(url, layout)
        self._layout = layout

    @property
    def place(self) -> str:
        """The URL without its password, or the kind of client."""
        return self._connection.name

    def keys(self, queue: str) -> Keys:
        """Return the keys of a queue; raise ConfigurationError for what is no name."""
        return Keys(queue, self._layout)

    def close(self) -> None:
        """Close the connections; they come back when they are used again."""
        self._connection.close()

    def _client(self) -> Client:
        return Client(self._connection.wire(ANSWER_SECONDS))

    def _ask(self, request: Any) -> Any:
        return self._client().run(request, for_seconds=TRY_SECONDS)

    def _known(self, queue: str) -> tuple[Client, Keys]:
        """Return what it takes to act on a queue; raise ConfigurationError for one that nobody knows."""
        client, keys = self._client(), self.keys(queue)
        check_known(client, keys, TRY_SECONDS)
        return client, keys
