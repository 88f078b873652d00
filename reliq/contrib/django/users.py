"""Use Django's login for the web pages of reliq in an ASGI application that also serves Django."""

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
    """A copy of the session data. It is not saved, so a request to a page never changes the session."""

    def flush(self) -> None:
        """Drop the data, as Django does if the user has changed the password since the login."""
        self.clear()

    def cycle_key(self) -> None:
        """Do nothing; the next Django view changes the key of a session signed with an old secret."""


async def user_of(request: Request) -> Any:
    """
    Return the Django user of a request, like `request.user` in a view.

    Call it in the function that you pass to `reliq.web.app` to find the user. It reads session and user from the
    database at each request, in a thread like synchronous Django views.

    Args:
        request: the Starlette request.

    Returns:
        The user, or an `AnonymousUser` without a login.
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
