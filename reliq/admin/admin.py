"""`Admin`: everything the command line can see and do, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.connection import Connection
from reliq.doors.blocking import BlockingDoor
from reliq.keys import Keys, Layout

if TYPE_CHECKING:
    from reliq.pools import Target

#: How long a look or a step may take in all before Redis counts as away.
TRY_SECONDS = 2.0
#: How long one reply is awaited: some looks read much.
ANSWER_SECONDS = 5.0


class Admin:
    """
    The operator's view of one Redis.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the keys of its queues are spelled.

    Raises:
        ConfigurationError: there is no Redis to look at, or it is none that reliq can use.
    """

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ) -> None:
        self._connection = Connection.to(url)
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

    def _door(self) -> BlockingDoor:
        return BlockingDoor(self._connection.wire(ANSWER_SECONDS))

    def _ask(self, request: Any) -> Any:
        return self._door().run(request, for_seconds=TRY_SECONDS)
