"""The settings of a relay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.outbox.database import database
from reliq.outbox.tables import DEFAULT_PREFIX, Tables
from reliq.settings import seconds, whole
from reliq.transport.target import check_target

if TYPE_CHECKING:
    from reliq.message import Duration
    from reliq.transport.target import Target


@dataclass(frozen=True, kw_only=True)
class Relay:
    """
    Moves the messages of `publish_in` from a database to Redis: `Consumer(relay=Relay("postgresql://…"))`.

    Several may work on one outbox.

    Attributes:
        database: a URL, `postgresql://…` (by psycopg 3) or `sqlite:///PATH`; SQLAlchemy's URL or engine does too.
        prefix: what the names of the tables begin with; `schema.prefix` names a schema too.
        batch: the most rows of one round (1..10,000); a call to Redis has at most 500.
        keep: seconds or timedelta for which rows stay after they were sent, for a Redis that loses its last writes.
        poll: the most seconds between two looks at the outbox; in PostgreSQL a commit is told at once besides.
        url: the Redis; None means that of the consumer, else RELIQ_URL.

    Raises:
        ConfigurationError: a setting is not allowed, or the library of the database is not installed.
    """

    database: Any
    prefix: str = DEFAULT_PREFIX
    batch: int = 500
    keep: Duration = 3600.0
    poll: Duration = 1.0
    url: Target | None = None

    def __init__(
        self,
        database: Any,
        *,
        prefix: str = DEFAULT_PREFIX,
        batch: int = 500,
        keep: Duration = 3600.0,
        poll: Duration = 1.0,
        url: Target | None = None,
    ) -> None:
        given = {"database": database, "prefix": prefix, "batch": batch, "url": url}
        given |= {"keep": seconds("keep", keep), "poll": seconds("poll", poll, least=0.01, most=3600)}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        _check(self)


def _check(relay: Relay) -> None:
    Tables.of(relay.prefix)
    database(relay.database)
    whole("batch", relay.batch, least=1, most=10_000)
    if relay.url is not None:
        check_target(relay.url)
