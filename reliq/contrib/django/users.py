"""Django's signed-in user for requests to reliq's web pages, which are mounted beside a Django application."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django import conf
from django.db import close_old_connections

if TYPE_CHECKING:
    from starlette.requests import Request


class _Copy(dict[str, Any]):
    """A copy of a session's data. It is never written back: a request to a page ends no session and begins none."""

    def flush(self) -> None:
        """Forget a session because the user has changed the password since."""
        self.clear()

    def cycle_key(self) -> None:
        """Keep the key of a session that an older secret has signed: the next view changes it."""


async def user_of(request: Request) -> Any:
    """
    Return the signed-in user, like `request.user` in a view: an `AnonymousUser` without a login.

    Call it in a resolver of `reliq.web.app`. It reads session and user at each request, in a thread like Django's views.
    """
    async with ThreadSensitiveContext():
        return await sync_to_async(_user)(request.cookies.get(conf.settings.SESSION_COOKIE_NAME))


def _user(session_key: str | None) -> Any:
    from django.contrib.auth import get_user  # noqa: PLC0415  it needs the settings

    close_old_connections()  # as Django does around each request
    try:
        store = import_module(conf.settings.SESSION_ENGINE).SessionStore(session_key)
        return get_user(SimpleNamespace(session=_Copy(store.load() if session_key else {})))
    finally:
        close_old_connections()
