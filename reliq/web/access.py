"""Access to the web pages: rights of visitors, the token, and checks of host names and of forms from other sites."""

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
    "Referrer-Policy": "same-origin",  # with `no-referrer`, a browser would send a form over HTTP with `Origin: null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: How many seconds a login cookie is valid.
LOGIN_SECONDS = 12 * 3600
#: The fewest characters of a token; a shorter token could be guessed.
TOKEN_LENGTH = 16


def is_known_host(host: str, names: frozenset[str]) -> bool:
    """
    Return whether a Host header is an IP address, localhost or in `names`.

    Other names are refused against DNS rebinding: an attacker can point a domain name at this server, and a page under
    that name could then read our pages in a visitor's browser.
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

    A browser reports the origin of a request in Sec-Fetch-Site; an older browser reports it in Origin. A program sends
    neither header. It must send `Authorization: Bearer`, which another site cannot make a browser send.
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
        NONE: nothing.
        READ: see queues, messages and workers, without the contents of messages.
        BODIES: also see bodies, headers and the texts of errors, when the visitor asks for them.
        WRITE: also pause, cancel, redrive, delete.
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
    Convert the return value of an access resolver to a visitor.

    Raise TypeError if the value is neither an `Access` nor a `Visitor`.
    """
    if isinstance(answer, Visitor) and isinstance(answer.access, Access) and isinstance(answer.who, str):
        return answer
    if isinstance(answer, Access):
        return Visitor(answer)
    raise TypeError(f"access must return an Access, or Access.READ.by('name'), not {type(answer).__name__}")


class Token:
    """
    The secret of the web pages: programs send it in a header, and a person exchanges it for a login cookie.

    A cookie holds its expiry time and a signature made with the token. So every process with the same token accepts
    the cookie. One-time tokens and logouts are stored only in this process. Call the methods from one event loop.

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
        # The name depends on the token, because servers on different ports of a host would overwrite a common cookie.
        self.cookie = f"reliq_{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}"

    def is_token(self, text: str) -> bool:
        """Return whether `text` is the token; the comparison takes constant time, against timing attacks."""
        return hmac.compare_digest(hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._key)

    def once(self) -> str:
        """Return a new one-time token: `take` accepts it once, to log one browser in without the site's token."""
        word = secrets.token_urlsafe(24)
        self._once.add(word)
        return word

    def knows(self, word: str) -> bool:
        """Return whether `word` is a one-time token that has not been used yet."""
        return word in self._once

    def take(self, word: str) -> bool:
        """Use up a one-time token; return False if it was used before or never existed."""
        used = word in self._once
        self._once.discard(word)
        return used

    def login(self, now: float) -> str:
        """Return the value of a new login cookie, valid for LOGIN_SECONDS from `now` in unix seconds."""
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
