"""Use Django's login for reliq's web pages, if one ASGI application serves both Django and these pages."""

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
    """A copy of the session data that is never saved, so that reliq's web pages never change the session."""

    def flush(self) -> None:
        """Clear the copy. Django calls this method if the user's password has changed since the login."""
        self.clear()

    def cycle_key(self) -> None:
        """Do nothing. Django calls this method to change the session key; the next Django view can change it."""


async def user_of(request: Request) -> Any:
    """
    Return the Django user of a request, the same user as `request.user` in a view.

    Call this function in the `access` function that you pass to `reliq.web.app`. Each call reads the session and the
    user from the database, in the thread of synchronous Django views.

    Args:
        request: the Starlette request.

    Returns:
        The user; `AnonymousUser` if the user is not logged in.
    """
    async with ThreadSensitiveContext():
        return await sync_to_async(_user)(request.cookies.get(conf.settings.SESSION_COOKIE_NAME))


def _user(session_key: str | None) -> Any:
    from django.contrib.auth import get_user  # noqa: PLC0415  it needs the settings

    close_old_connections()  # Django does this before and after each request
    try:
        store = import_module(conf.settings.SESSION_ENGINE).SessionStore(session_key)
        return get_user(SimpleNamespace(session=_Copy(store.load() if session_key else {})))
    finally:
        close_old_connections()
