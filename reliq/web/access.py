"""The rights of visitors, the token, and the checks before every page: host names, and forms of other web sites."""

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


#: The page loads only its own files, runs nothing inline, and cannot be framed.
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
#: A cookie is valid for this many seconds.
LOGIN_SECONDS = 12 * 3600
#: A shorter token could be guessed.
TOKEN_LENGTH = 16


def is_known_host(host: str, names: frozenset[str]) -> bool:
    """
    Return whether a Host header is an IP address, localhost or in `names`.

    An attacker can point any other name at this server, so that a page of the attacker can read ours in a visitor's
    browser (DNS rebinding).
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

    A browser sends the origin of a request in Sec-Fetch-Site or, an older browser, in Origin. A program sends neither, and
    needs an `Authorization: Bearer`, which no other site can make a browser send.
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
    """Return the token in the header of a request; None when there is none."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if kind.lower() == "bearer" else None


class Access(Flag):
    """
    The rights of a visitor; `Access.WRITE | Access.BODIES` is everything, because each of them includes READ.

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
        """Return a visitor of that name with these rights."""
        return Visitor(self, who)


@dataclass(frozen=True, slots=True)
class Visitor:
    """
    The person or program that makes a request.

    Attributes:
        access: the rights.
        who: a name for the log, and for the pauses that the visitor makes; empty when it is unknown.
    """

    access: Access = Access.NONE
    who: str = ""

    def may(self, needs: Access) -> bool:
        """Return whether the visitor has a right; each right includes READ."""
        return bool(self.access) if needs is Access.READ else needs in self.access


def visitor_of(answer: object) -> Visitor:
    """Return the answer of an access resolver as a visitor; raise TypeError for anything else."""
    if isinstance(answer, Visitor) and isinstance(answer.access, Access) and isinstance(answer.who, str):
        return answer
    if isinstance(answer, Access):
        return Visitor(answer)
    raise TypeError(f"access must return an Access, or Access.READ.by('name'), not {type(answer).__name__}")


class Token:
    """
    A secret that programs send in a header, and that a person exchanges for a cookie.

    The cookie is no copy of the token: it has its expiry, signed with the token, so every process with the token accepts
    it. The paths of `once` and the logouts are known in this process only. Call the methods from one event loop.

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
        self._once: set[str] = set()
        self._ended: dict[str, float] = {}
        #: Browsers send a cookie to every port of a host: two servers must not overwrite each other's.
        self.cookie = f"reliq_{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}"

    def is_token(self, text: str) -> bool:
        """Return whether `text` is the token, in the same time for every text."""
        return hmac.compare_digest(hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._key)

    def once(self) -> str:
        """Return a word that `take` accepts once."""
        word = secrets.token_urlsafe(24)
        self._once.add(word)
        return word

    def knows(self, word: str) -> bool:
        """Return whether `take` would accept `word`."""
        return word in self._once

    def take(self, word: str) -> bool:
        """Return whether `word` comes from `once` and was not used before."""
        used = word in self._once
        self._once.discard(word)
        return used

    def login(self, now: float) -> str:
        """Return a cookie's value that is valid from `now` on, in unix seconds."""
        text = f"{round(now) + LOGIN_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{text}.{self._sign(text)}"

    def is_login(self, value: str, now: float) -> bool:
        """Return whether `value` is a cookie's value that is still valid."""
        text, _, signature = value.rpartition(".")
        if not value.isascii() or not hmac.compare_digest(signature, self._sign(text)):
            return False
        return int(text.partition(".")[0]) > now and value not in self._ended

    def logout(self, value: str, now: float) -> None:
        """Make a cookie's value invalid, in this process."""
        if self.is_login(value, now):
            self._ended = {old: until for old, until in self._ended.items() if until > now}
            self._ended[value] = now + LOGIN_SECONDS

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, b"login" + text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
