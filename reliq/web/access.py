"""
Who may see and do what, and the guard before every page.

Every answer has headers that confine the page, and a write that another site has made a browser send is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from dataclasses import dataclass
from enum import Flag
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

from reliq.errors import ConfigurationError

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
}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: A cookie is good for this many seconds.
LOGIN_SECONDS = 12 * 3600
#: A shorter token could be guessed.
TOKEN_LENGTH = 16


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
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.update(HEADERS)
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


def is_cross_site(request: Request) -> bool:
    """
    Say whether a page of another site may have made the browser send this.

    A browser says where a request comes from, in Sec-Fetch-Site or, an older one, in Origin. A program says neither,
    and counts as none of ours without an `Authorization: Bearer`, which no other site can make a browser send.
    """
    if request.method in SAFE_METHODS:
        return False
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site != "same-origin"
    origin = request.headers.get("origin")
    if origin is not None:
        scheme, _, place = origin.partition("://")
        return not scheme or not place or place != request.headers.get("host")
    return bearer_of(request) is None


def bearer_of(request: Request) -> str | None:
    """Return the token that a program sends; None when it sends none."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if kind.lower() == "bearer" else None


class Access(Flag):
    """
    The rights of a visitor; `Access.WRITE | Access.BODIES` is everything, for each of them lets one look.

    Attributes:
        NONE: nothing.
        READ: see queues, messages and workers, without what a message carries.
        BODIES: also see bodies, headers and the texts of errors, when the visitor asks for them.
        WRITE: also pause, cancel, redrive, delete.
    """

    NONE = 0
    READ = 1
    BODIES = 2
    WRITE = 4

    def by(self, who: str) -> Visitor:
        """Return a visitor of that name who may do this."""
        return Visitor(self, who)


@dataclass(frozen=True, slots=True)
class Visitor:
    """
    Who makes a request.

    Attributes:
        access: what they may do.
        who: a name for the log, and for the pauses that they make; empty when nobody knows.
    """

    access: Access = Access.NONE
    who: str = ""

    def may(self, needs: Access) -> bool:
        """Say whether they may do what `needs` it; who may do anything may look."""
        return bool(self.access) if needs is Access.READ else needs in self.access

    @property
    def may_read_bodies(self) -> bool:
        """Whether they may see bodies, headers and the texts of errors."""
        return self.may(Access.BODIES)

    @property
    def may_write(self) -> bool:
        """Whether they may change anything."""
        return self.may(Access.WRITE)


def visitor_of(answer: object) -> Visitor:
    """Return what an access resolver answered as a visitor; raise TypeError for anything else."""
    if isinstance(answer, Visitor) and isinstance(answer.access, Access) and isinstance(answer.who, str):
        return answer
    if isinstance(answer, Access):
        return Visitor(answer)
    raise TypeError(f"access must return an Access, or Access.READ.by('name'), not {type(answer).__name__}")


class Token:
    """
    A secret that programs send in a header, and that a person exchanges for a cookie.

    The cookie is no copy of the token: it says until when it is good, signed with the token, so every process that has
    the token knows it. The path of `once` is known to this process alone.

    Args:
        text: the token.

    Raises:
        ConfigurationError: it is too short.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or len(text) < TOKEN_LENGTH:
            raise ConfigurationError(
                f"the token must have at least {TOKEN_LENGTH} characters; "
                "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
            )
        self._key = hashlib.sha256(text.encode()).digest()
        self._lock = threading.Lock()
        self._once: set[str] = set()
        self._ended: dict[str, float] = {}
        #: Browsers send a cookie to every port of a host: two servers must not overwrite each other's.
        self.cookie = f"reliq_{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}"

    def is_token(self, text: str) -> bool:
        """Say whether `text` is the token, in the same time for every text."""
        return hmac.compare_digest(hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._key)

    def once(self) -> str:
        """Return a word that `take` accepts once."""
        word = secrets.token_urlsafe(24)
        with self._lock:
            self._once.add(word)
        return word

    def knows(self, word: str) -> bool:
        """Say whether `take` would accept `word`."""
        with self._lock:
            return word in self._once

    def take(self, word: str) -> bool:
        """Say whether `word` is one of `once` that nobody has used."""
        with self._lock:
            used = word in self._once
            self._once.discard(word)
        return used

    def login(self, now: float) -> str:
        """Return a cookie's value that is good from `now` on, in unix seconds."""
        text = f"{round(now) + LOGIN_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{text}.{self._sign(text)}"

    def is_login(self, value: str, now: float) -> bool:
        """Say whether `value` is a cookie's value that is still good."""
        text, _, signature = value.rpartition(".")
        if not value.isascii() or not hmac.compare_digest(signature, self._sign(text)):
            return False
        with self._lock:
            return int(text.partition(".")[0]) > now and value not in self._ended

    def logout(self, value: str, now: float) -> None:
        """Let a cookie's value be good no more, in this process."""
        if self.is_login(value, now):
            with self._lock:
                self._ended = {old: until for old, until in self._ended.items() if until > now}
                self._ended[value] = now + LOGIN_SECONDS

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, b"login" + text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
