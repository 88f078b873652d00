"""The guard before every page: headers in every answer, and no write that another site has made a browser send."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Only what the page itself serves is loaded, nothing inline runs, and nobody frames it.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, a browser sends `Origin: null` with our own forms over plain HTTP
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class HeaderGuard:
    """An ASGI application whose every answer has the headers, errors too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a web socket is refused."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def is_known_host(host: str, names: frozenset[str]) -> bool:
    """
    Say whether a Host header is an IP address, localhost or one of `names`.

    Any other name may be a stranger's who has pointed it at this server, so that a page of theirs can read ours in a
    visitor's browser (DNS rebinding).
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    return name == "localhost" or name in names or is_address(name)


def is_address(text: str) -> bool:
    """Say whether a text is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def is_foreign(request: Request) -> bool:
    """
    Say whether a page of another site may have made the browser send this.

    A browser says where a request comes from, in Sec-Fetch-Site or, an older one, in Origin. A program says neither,
    and counts as none of ours without an `Authorization: Bearer`, which no other site can make a browser send.
    """
    if request.method in SAFE_METHODS:
        return False
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site != "same-origin"
    if origin is not None:
        scheme, _, place = origin.partition("://")
        return not scheme or not place or place != request.headers.get("host")
    return bearer_of(request) is None


def bearer_of(request: Request) -> str | None:
    """Return the token that a program sends; None when it sends none."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if kind.lower() == "bearer" else None
