"""
The ASGI application: its addresses, who may see each, what every refusal says, and the login.

Pages are made in threads, few and apart from those of the application in which the page is mounted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from asyncio import sleep
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import unquote, urlencode

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from reliq.admin.session import UnknownQueueError
from reliq.errors import ConfigurationError, ProtocolError, RedisRefusedError, RedisUnavailableError
from reliq.logs import limiter
from reliq.web import actions, pages
from reliq.web.access import (
    LOGIN_SECONDS,
    SAFE_METHODS,
    Access,
    HeaderGuard,
    Token,
    Visitor,
    is_address,
    is_cross_site,
    is_known_host,
    visitor_of,
)
from reliq.web.pages import STATIC
from reliq.web.request import Fields, PageError, RequestContext
from reliq.web.site import Site

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from reliq.admin import Admin
    from reliq.redis.url import Target
    from reliq.web.site import Resolver

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Pages that are made at once; who asks for a further one waits.
PAGES_AT_ONCE = 16
_limiter: RunVar[CapacityLimiter] = RunVar("reliq.web.application")


async def in_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function in a thread, and return what it returns."""
    try:
        limiter = _limiter.get()
    except LookupError:  # the first page of this event loop
        limiter = CapacityLimiter(PAGES_AT_ONCE)
        _limiter.set(limiter)
    return await to_thread.run_sync(partial(function, *args, **options), limiter=limiter)


@dataclass(frozen=True, slots=True)
class WebPage:
    """
    One address.

    Attributes:
        needs: what a visitor must be allowed.
        answer: makes the page; it is called in a thread, for it may ask Redis.
    """

    name: str
    path: str
    needs: Access
    answer: Callable[[RequestContext], Response]
    method: str = "GET"


PAGES = (
    WebPage("queues", "/", Access.READ, pages.queues),
    WebPage("queue", "/queues/{queue}", Access.READ, pages.queue),
    WebPage("messages", "/queues/{queue}/messages/{state}", Access.READ, pages.messages),
    WebPage("dead", "/queues/{queue}/dead", Access.READ, pages.dead),
    WebPage("keys", "/queues/{queue}/keys", Access.READ, pages.keys),
    WebPage("message", "/queues/{queue}/message", Access.READ, pages.message),
    WebPage("task", "/progress/{id}", Access.READ, pages.task),
    WebPage("tasks", "/progress", Access.READ, pages.tasks),
    WebPage("workers", "/workers", Access.READ, pages.workers),
    WebPage("worker", "/workers/{id}", Access.READ, pages.worker),
    WebPage("crons", "/periodic", Access.READ, pages.crons),
    WebPage("cron", "/queues/{queue}/periodic", Access.READ, pages.cron),
    WebPage("account", "/account", Access.READ, pages.account),
    WebPage("doctor", "/doctor", Access.READ, pages.doctor),
    WebPage("check", "/queues/{queue}/check", Access.READ, actions.check, "POST"),
    WebPage("pause", "/queues/{queue}/pause", Access.WRITE, actions.pause, "POST"),
    WebPage("resume", "/queues/{queue}/resume", Access.WRITE, actions.resume, "POST"),
    WebPage("pause_key", "/queues/{queue}/keys/pause", Access.WRITE, actions.pause_key, "POST"),
    WebPage("resume_key", "/queues/{queue}/keys/resume", Access.WRITE, actions.resume_key, "POST"),
    WebPage("limits", "/queues/{queue}/limits", Access.WRITE, actions.limits, "POST"),
    WebPage("purge", "/queues/{queue}/purge", Access.WRITE, actions.purge, "POST"),
    WebPage("cancel", "/queues/{queue}/cancel", Access.WRITE, actions.cancel, "POST"),
    WebPage("reschedule", "/queues/{queue}/reschedule", Access.WRITE, actions.reschedule, "POST"),
    WebPage("redrive", "/queues/{queue}/dead/redrive", Access.WRITE, actions.redrive, "POST"),
    WebPage("delete", "/queues/{queue}/dead/delete", Access.WRITE, actions.delete, "POST"),
    WebPage("run_cron", "/queues/{queue}/periodic/run", Access.WRITE, actions.run_cron, "POST"),
    WebPage("pause_cron", "/queues/{queue}/periodic/pause", Access.WRITE, actions.pause_cron, "POST"),
    WebPage("resume_cron", "/queues/{queue}/periodic/resume", Access.WRITE, actions.resume_cron, "POST"),
    WebPage("stacks", "/workers/{id}/stacks", Access.WRITE, actions.stacks, "POST"),
    WebPage("stop", "/progress/{id}/stop", Access.READ, actions.stop, "POST"),
)
#: The addresses that the application answers itself; they need no access.
OTHERS = {
    "login": "/login",
    "enter": "/enter/{once}",
    "logout": "/logout",
    "health": "/health",
    "static": "/static/{path:path}",
}
PATHS = {page.name: page.path for page in PAGES} | OTHERS


#: A form has at most this many bytes.
FORM_BYTES = 65_536
#: A form must arrive within this many seconds.
FORM_SECONDS = 10.0
#: A wrong token is answered after this many seconds.
FAILED_LOGIN_SECONDS = 1.0
#: A page that Redis did not let us make asks again after this many seconds.
RETRY_SECONDS = 5
FORM_TYPE = "application/x-www-form-urlencoded"
#: Under this key a scope keeps who makes the request.
VISITOR = "reliq.visitor"
#: Under this key a scope keeps what it was before it came here: `request.app` is that of the application in which the
#: page is mounted.
HOST = "reliq.host"


class KeptFiles(StaticFiles):
    """Files that a browser keeps: their addresses have a digest of their contents."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return a file."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


class Application:
    """
    The page of one Redis.

    Attributes:
        site: what its pages share.
    """

    def __init__(self, site: Site, login: str, hosts: Iterable[str]) -> None:
        self.site = site
        self._login_url = login
        self._hosts = frozenset(name.lower().removesuffix(".") for name in hosts)
        routes: list[Any] = [
            Route(page.path, self._safe(partial(self._page, page)), methods=[page.method], name=page.name)
            for page in PAGES
        ]
        routes += [
            Route(OTHERS["login"], self._safe(self._login), methods=["GET", "POST"]),
            Route(OTHERS["enter"], self._safe(self._enter), methods=["GET", "POST"]),
            Route(OTHERS["logout"], self._safe(self._logout), methods=["POST"]),
            Route(OTHERS["health"], self._health),
            Mount("/static", KeptFiles(directory=STATIC)),
        ]
        inner = Starlette(routes=routes, exception_handlers={HTTPException: self._missing})
        inner.router.redirect_slashes = False
        self._guarded = HeaderGuard(inner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._guarded({**scope, HOST: scope}, receive, send)

    def enter_path(self) -> str:
        """Return a path that lets one browser in, once; raise PageError when there is no token."""
        return f"/enter/{self._token().once()}"

    def _safe(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Return `answer` with a page in place of an exception."""

        async def endpoint(request: Request) -> Any:
            try:
                self._check_host(request)
                return await answer(request)
            except Exception as error:
                return await in_thread(self._refused, request, error)

        return endpoint

    def _check_host(self, request: Request) -> None:
        """Raise PageError for a request under a host name that is not allowed."""
        if not is_known_host(request.headers.get("host", ""), self._hosts):
            raise PageError(
                400,
                "This host name is not known here",
                "Add it to the allowed hosts: reliq web --allowed-host NAME, or web.app(hosts=[...]).",
            )

    async def _page(self, page: WebPage, request: Request) -> Response:
        visitor = request.scope[VISITOR] = await self._visitor(request)
        if not visitor.may(page.needs):
            raise self._not_allowed(visitor, page.needs)
        context = self._context(request, page.name, request.scope["query_string"], await _form(request))
        return await in_thread(page.answer, context)

    async def _visitor(self, request: Request) -> Visitor:
        """Return who makes a request; an exception of the resolver is logged and not shown."""
        try:
            return await self.site.visitor(Request(request.scope[HOST]))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            logger.error("web: the access resolver failed, so nobody is let in: %s", line)  # noqa: TRY400  one line
            raise PageError(500, "The page failed", "Its log says more.") from None

    def _not_allowed(self, visitor: Visitor, needs: Access) -> PageError:
        if not visitor.access and self.site.token is not None:
            return PageError(401, "A token is wanted")
        if not visitor.access:
            return PageError(403, "You may not see this")
        return PageError(403, "You may only look", f"This needs {needs.name}.")

    def _context(self, request: Request, route: str, query: bytes = b"", form: bytes = b"") -> RequestContext:
        return RequestContext(
            site=self.site,
            route=route,
            visitor=request.scope.get(VISITOR, Visitor()),
            path={name: unquote(value, errors="surrogateescape") for name, value in request.path_params.items()},
            query=Fields(query),
            form=Fields(form),
            root=root_of(request),
            asker=_asker(request),
            may_log_out=self.site.token is not None and self.site.token.cookie in request.cookies,
        )

    async def _login(self, request: Request) -> Response:
        token = self._token()
        if request.method != "POST":
            return self._context(request, "login").page("login.html", failed=False)
        if not token.is_token(Fields(await _form(request)).text("token")):
            logger.warning("web: failed login from %s", _asker(request))
            await sleep(FAILED_LOGIN_SECONDS)
            raise PageError(401, "A token is wanted", "That is not the token")
        return self._logged_in(request, token)

    async def _enter(self, request: Request) -> Response:
        token = self._token()
        once = request.path_params["once"]
        # A browser that prefetches, or a link preview, sends GET too: only POST uses the address up.
        if request.method == "GET" and token.knows(once):
            context = self._context(request, "enter")
            return context.page("login.html", failed=False, entry=context.url("enter", once=once))
        await _form(request)
        if request.method != "POST" or not token.take(once):
            raise PageError(401, "This address was used", "It works once.")
        return self._logged_in(request, token)

    async def _logout(self, request: Request) -> Response:
        token = self._token()
        root = root_of(request)
        await _form(request)
        token.logout(request.cookies.get(token.cookie, ""), time.time())
        response = RedirectResponse(f"{root}{PATHS['login']}", 303)
        response.delete_cookie(token.cookie, path=root or "/")
        return response

    def _token(self) -> Token:
        """Return the token; raise PageError when there is none."""
        if self.site.token is None:
            raise PageError(404, "There is no token here", "Who may see this page is decided elsewhere.")
        return self.site.token

    def _logged_in(self, request: Request, token: Token) -> Response:
        """Return the answer that gives a browser its cookie."""
        root = root_of(request)
        response = RedirectResponse(f"{root}/", 303)
        response.set_cookie(
            token.cookie,
            token.login(time.time()),
            max_age=LOGIN_SECONDS,
            path=root or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        logger.info("web: login from %s", _asker(request))
        return response

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _missing(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
        heading = "There is no such page" if status == HTTPStatus.NOT_FOUND else "That is not done here"
        return await in_thread(self._refused, request, PageError(status, heading))

    def _refused(self, request: Request, error: Exception) -> Response:
        """Return the page that says why there is no other."""
        context = self._context(request, "")
        refusal = _refusal(error, request.method)
        is_safe = request.method in SAFE_METHODS
        if self._login_url and refusal.status == HTTPStatus.FORBIDDEN and not context.visitor.access and is_safe:
            return RedirectResponse(f"{self._login_url}?{urlencode({'next': request.url.path})}", 303)
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            response = context.page("login.html", refusal.status, failed=bool(refusal.detail))
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return context.page(
            "error.html",
            refusal.status,
            status=int(refusal.status),
            heading=refusal.heading,
            detail=refusal.detail,
            advice=list(refusal.advice),
            retry_seconds=RETRY_SECONDS if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE and is_safe else 0,
        )


def _refusal(error: Exception, method: str) -> PageError:
    """Return what a page says about an error: nothing about one that nobody expects."""
    match error:
        case PageError():
            return error
        case RedisUnavailableError():
            return PageError(503, "Redis does not answer", str(error), "This page asks again by itself.")
        case ProtocolError():
            return PageError(
                503, "Redis holds data that reliq cannot read", str(error), "`reliq check` names what is wrong."
            )
        case RedisRefusedError():
            return PageError(
                503, "Redis refuses", str(error), "The page needs the rights of the role `operator`: see `reliq acl`."
            )
        case UnknownQueueError():
            return PageError(404, "There is no such queue", str(error))
        case ConfigurationError() if method in SAFE_METHODS:
            return PageError(404, "There is no such thing here", str(error))
        case ConfigurationError():
            return PageError(400, "That cannot be done", str(error))
    logger.error("a page failed", exc_info=error)
    return PageError(500, "The page failed", "Its log says more.")


async def _form(request: Request) -> bytes:
    """Return the body of a form; raise PageError for one of another site, one that is too large, or what is no form."""
    if request.method in SAFE_METHODS:
        return b""
    if is_cross_site(request):
        raise PageError(403, "This came from another site", "A page of another site may not act here.")
    if request.headers.get("content-type", FORM_TYPE).partition(";")[0].strip().lower() != FORM_TYPE:
        raise PageError(415, "That is no form", f"Send {FORM_TYPE}.")
    body = b""
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > FORM_BYTES:
                    raise PageError(413, "That form is too large", f"A form has at most {FORM_BYTES:,} bytes.")
    except TimeoutError:
        raise PageError(408, "That form took too long", f"Send it within {FORM_SECONDS:g} seconds.") from None
    return body


def _asker(request: Request) -> str:
    """Return the address of the visitor; a proxy's header may hold any text."""
    return request.client.host if request.client and is_address(request.client.host) else "an unknown address"


def root_of(request: Request) -> str:
    """Return where the page is mounted: empty at the top, else such as /ops/reliq."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def app(
    admin: Admin | Target | None = None,
    *,
    access: Resolver | None = None,
    token: str | None = None,
    grants: Access | Visitor = Access.READ,
    login: str = "",
    hosts: Iterable[str] = (),
    title: str = "reliq",
) -> Application:
    """
    Return the page of one Redis as an ASGI application, to be served, or mounted in another under a prefix.

    Args:
        admin: the Redis: an `Admin`, a URL or a redis-py client; None for RELIQ_URL.
        access: is called with each request, a Starlette `Request`, and returns what its visitor may do, with or without
            a name: `Access.READ`, `Access.WRITE.by("alice")`. It may be async.
        token: opens the page too: a person enters it once, a program sends it as `Authorization: Bearer`.
        grants: what the bearer of the token may do.
        login: where whoever may see nothing is sent to sign in, with the page's path as `next`; empty: they are told
            that they may not. With a `token` they are asked for that.
        hosts: the host names under which visitors reach the page, such as `ops.example.com`; IP addresses and localhost
            need no entry. A request under another name is refused, against DNS rebinding.
        title: stands in the browser's tab.

    Raises:
        ConfigurationError: neither `access` nor `token` says who may see the page; the token is too short; or reliq
            cannot use the Redis.
    """
    if access is None and not token:
        raise ConfigurationError(
            "say who may see the page: access=..., which is called with each request, or token=..."
        )
    logger.addFilter(limiter)
    site = Site(admin, access, Token(token) if token else None, visitor_of(grants), title, PATHS)
    return Application(site, login, hosts)
