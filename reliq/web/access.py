"""Access control of the web pages: rights of visitors, login by token, and checks against requests from other sites."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import Flag
from ipaddress import ip_address
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.requests import Request


#: Content-Security-Policy of all pages: load only own files, run no inline scripts, and allow no frames.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with `no-referrer`, forms over HTTP have `Origin: null`, which is refused
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: How many seconds a login cookie is valid.
LOGIN_SECONDS = 12 * 3600
#: A token must have at least this many characters, because a shorter token could be guessed.
TOKEN_LENGTH = 16


def is_known_host(host: str, names: frozenset[str]) -> bool:
    """
    Return whether a Host header is an IP address, localhost or in `names`.

    This check prevents DNS rebinding. In this attack, an attacker lets a domain name point to this server. A page of
    the attacker under that name could then read the web pages of reliq in a visitor's browser.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    return name == "localhost" or name in names or is_address(name)


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def is_cross_site(request: Request) -> bool:
    """
    Return whether a page of another site may have made the browser send this request.

    A browser reports where a request comes from in the header Sec-Fetch-Site, and an older browser in the header
    Origin. A program sends neither header. So a program must send the header `Authorization: Bearer`, because another
    site cannot make a browser send this header.
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
    """Return the token in the Authorization header of a request; None without such a header."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if kind.lower() == "bearer" else None


class Access(Flag):
    """
    The rights of a visitor. BODIES and WRITE include READ, so `Access.WRITE | Access.BODIES` gives all rights.

    Attributes:
        NONE: no rights.
        READ: see queues, messages and workers, without the contents of messages.
        BODIES: also see message bodies, message headers and error texts, when the visitor asks for them.
        WRITE: also change queues and messages: pause, cancel, redrive, delete.
    """

    NONE = 0
    READ = 1
    BODIES = 2
    WRITE = 4

    def by(self, who: str) -> Visitor:
        """Return a visitor with these rights and the name `who`."""
        return Visitor(self, who)


@dataclass(frozen=True, slots=True)
class Visitor:
    """
    The person or program that makes a request.

    Attributes:
        access: the rights of the visitor.
        who: the name of the visitor in log lines and in pauses; empty if unknown.
    """

    access: Access = Access.NONE
    who: str = ""

    def may(self, needs: Access) -> bool:
        """Return whether the visitor has all rights in `needs`."""
        return bool(self.access) if needs is Access.READ else needs in self.access


def visitor_of(answer: object) -> Visitor:
    """
    Return the visitor for the return value of the application's `access` function.

    Raise TypeError if the value is neither an `Access` nor a `Visitor`.
    """
    if isinstance(answer, Visitor) and isinstance(answer.access, Access) and isinstance(answer.who, str):
        return answer
    if isinstance(answer, Access):
        return Visitor(answer)
    raise TypeError(f"access must return an Access, or Access.READ.by('name'), not {type(answer).__name__}")


class Token:
    """
    The token of the web pages: programs send it with each request, and a person logs in with it and gets a cookie.

    A login cookie contains its expiry time and a signature made with the token. So every process with the same token
    accepts the cookie. One-time tokens and logouts are stored only in this process. The class is not thread-safe: call
    all methods from the same event loop.

    Args:
        text: the token.

    Attributes:
        cookie: the name of the cookie.

    Raises:
        ConfigurationError: the token is too short.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or len(text) < TOKEN_LENGTH:
            raise ConfigurationError(
                f"the token must have at least {TOKEN_LENGTH} characters; "
                "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
            )
        self._key = hashlib.sha256(text.encode()).digest()
        self._once: set[str] = set()
        self._ended: dict[str, float] = {}
        # The name of the cookie depends on the token. Otherwise, servers on different ports of a host would overwrite
        # each other's cookies, because browsers ignore the port.
        self.cookie = f"reliq_{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}"

    def is_token(self, text: str) -> bool:
        """Return whether `text` is the token. The comparison takes constant time, to prevent timing attacks."""
        return hmac.compare_digest(hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._key)

    def once(self) -> str:
        """Return a new one-time token, with which one browser can log in once."""
        word = secrets.token_urlsafe(24)
        self._once.add(word)
        return word

    def knows(self, word: str) -> bool:
        """Return whether `word` is a one-time token that was not used yet; the token stays valid."""
        return word in self._once

    def take(self, word: str) -> bool:
        """Use up a one-time token. Return False if it was used before or never existed."""
        used = word in self._once
        self._once.discard(word)
        return used

    def login(self, now: float) -> str:
        """Return the value of a new login cookie. It is valid for LOGIN_SECONDS from `now`, in unix seconds."""
        text = f"{round(now) + LOGIN_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{text}.{self._sign(text)}"

    def is_login(self, value: str, now: float) -> bool:
        """Return whether `value` is the value of a login cookie that is valid at `now` in unix seconds."""
        text, _, signature = value.rpartition(".")
        if not value.isascii() or not hmac.compare_digest(signature, self._sign(text)):
            return False
        return int(text.partition(".")[0]) > now and value not in self._ended

    def logout(self, value: str, now: float) -> None:
        """Make the value of a login cookie invalid in this process; other processes still accept it."""
        if self.is_login(value, now):
            self._ended = {old: until for old, until in self._ended.items() if until > now}
            self._ended[value] = now + LOGIN_SECONDS

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, b"login" + text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
