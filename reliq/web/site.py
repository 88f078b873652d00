"""Everything that the pages of one application share: Redis, the last look at it, the tasks that run, and who is let in."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import TYPE_CHECKING

from reliq.admin import Admin
from reliq.errors import RedisUnavailableError
from reliq.keys import Layout
from reliq.web.access import Visitor, bearer_of, visitor_of
from reliq.web.actions import BackgroundTasks
from reliq.web.pages import Pages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

    from reliq.admin import MinuteStats, Overview, QueueSample
    from reliq.redis.url import Target
    from reliq.web.access import Access, Token

    #: It says what a request may; the visitor's name comes with `Access.by`.
    Resolver = Callable[[Request], Access | Visitor | Awaitable[Access | Visitor]]

#: A look at all queues serves every page that is asked for within this many seconds.
FRESH_SECONDS = 1.0
#: After this many seconds without a look, rates are no longer those since the last one, but those that workers note.
OLD_LOOK_SECONDS = 15.0
#: The notes of workers, one a minute, are read again after this many seconds.
NOTES_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Now:
    """
    Every queue at one moment.

    Attributes:
        histories: queue -> what its workers noted of the last hour.
    """

    moment: QueueSample
    histories: Mapping[str, Sequence[MinuteStats]]

    @property
    def overview(self) -> Overview:
        """The queues, and who works."""
        return self.moment.overview


class LastSample:
    """The last look at every queue: many pages that poll cost Redis one look a second."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._watcher = admin.watch()
        self._lock = threading.Lock()
        self._now: Now | None = None
        self._at = self._noted_at = self._away_at = float("-inf")
        self._away = ""
        self._is_fresh = False

    def get(self) -> Now:
        """Return a look that is at most a second old; raise RedisUnavailableError when Redis was away within it."""
        with self._lock:
            at = time.monotonic()
            if self._now is None or not self._is_fresh or at >= self._at + FRESH_SECONDS * 0.9:
                if at < self._away_at + FRESH_SECONDS:
                    raise RedisUnavailableError(self._away)
                self._is_fresh = True
                try:
                    self._now = self._look(at)
                except RedisUnavailableError as error:
                    # Requests that waited for the lock report the outage, instead of waiting for Redis once more.
                    self._away = str(error)
                    self._away_at = time.monotonic()
                    raise
                self._at = at
            return self._now

    def forget(self) -> None:
        """Have the next page look for itself: something has been written."""
        self._is_fresh = False

    def _look(self, at: float) -> Now:
        if at > self._at + OLD_LOOK_SECONDS:
            self._watcher = self._admin.watch()
            moment = replace(self._watcher.look(), overview=self._admin.queues())
        else:
            moment = self._watcher.look()
        if self._now is not None and at < self._noted_at + NOTES_SECONDS:
            return Now(moment, self._now.histories)
        self._noted_at = at
        return Now(moment, self._admin.histories())


class Site:
    """
    All that the pages of one application share.

    Attributes:
        paths: the route's name -> its path.
        token: that opens the page; None when only `access` does.
    """

    def __init__(
        self,
        admin: Admin | Target | None,
        resolver: Resolver | None,
        token: Token | None,
        bearer: Visitor,
        title: str,
        paths: Mapping[str, str],
    ) -> None:
        self._admin = admin if isinstance(admin, Admin) else Admin(admin)
        self._resolver = resolver
        self._bearer = bearer
        self.token = token
        self.paths = paths
        self.pages = Pages(title)
        self.tasks = BackgroundTasks()
        self.last = LastSample(self._admin)

    @property
    def place(self) -> str:
        """The Redis, without its password."""
        return self._admin.place

    def admin(self, layout: str = "") -> Admin:
        """Return the operator's view, of queues in the layout of that name; raise ConfigurationError when it is none."""
        return self._admin.in_layout(Layout.parse(layout)) if layout else self._admin

    async def visitor(self, request: Request) -> Visitor:
        """Return who makes a request: the bearer of the token or of a cookie, else whoever the resolver says."""
        if self.is_bearer(request):
            return self._bearer
        if self._resolver is None:
            return Visitor()
        answer = self._resolver(request)
        return visitor_of(await answer if isawaitable(answer) else answer)

    def is_bearer(self, request: Request) -> bool:
        """Say whether a request has the token in its header, or a cookie that the token was exchanged for."""
        if self.token is None:
            return False
        given = bearer_of(request)
        if given is not None:
            return self.token.is_token(given)
        return self.token.is_login(request.cookies.get(self.token.cookie, ""), time.time())
