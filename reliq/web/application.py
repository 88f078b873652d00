"""
The ASGI application: its addresses, the right that each needs, the login, and the pages of errors.

Pages are made in a few separate threads, apart from the threads of the application in which they are mounted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from asyncio import sleep
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from reliq.admin import Admin
from reliq.admin.session import UnknownQueueError
from reliq.errors import ConfigurationError, ProtocolError, RedisRefusedError, RedisUnavailableError
from reliq.logs import limiter
from reliq.web import actions, pages
from reliq.web.access import (
    HEADERS,
    LOGIN_SECONDS,
    SAFE_METHODS,
    Access,
    Token,
    Visitor,
    bearer_of,
    is_cross_site,
    is_known_host,
    visitor_of,
)
from reliq.web.render import STATIC, templates
from reliq.web.request import VISITOR, PageError, RequestContext, root_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from starlette.types import Receive, Scope, Send

    from reliq.redis.url import Target

    #: It returns the rights of a request; `Access.by` adds the visitor's name.
    Resolver = Callable[[Request], Access | Visitor | Awaitable[Access | Visitor]]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Pages that are made at the same time; further requests wait.
PAGES_AT_ONCE = 16
_threads = ThreadPoolExecutor(PAGES_AT_ONCE, "reliq-web")
#: A form has at most this many bytes.
FORM_BYTES = 65_536
#: A form must arrive within this many seconds.
FORM_SECONDS = 10.0
#: A wrong token is answered after this many seconds.
FAILED_LOGIN_SECONDS = 1.0
#: A page that failed because of Redis refreshes itself after this many seconds.
RETRY_SECONDS = 5
FORM_TYPE = "application/x-www-form-urlencoded"
#: The key under which a scope keeps its first form: there `request.app` is the application in which the pages are mounted.
HOST = "reliq.host"


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


class WebPage(NamedTuple):
    """
    One address.

    Attributes:
        answer: makes the page; it is called in a thread, because it may wait for Redis.
        needs: the right that a visitor must have.
    """

    name: str
    path: str
    answer: Callable[[RequestContext], Response]
    method: str = "GET"
    needs: Access = Access.READ


PAGES = (
    WebPage("queues", "/", pages.queues),
    WebPage("queue", "/queues/{queue}", pages.queue),
    WebPage("messages", "/queues/{queue}/messages/{state}", pages.messages),
    WebPage("dead", "/queues/{queue}/dead", pages.dead),
    WebPage("keys", "/queues/{queue}/keys", pages.keys),
    WebPage("message", "/queues/{queue}/message", pages.message),
    WebPage("task", "/progress/{id}", pages.task),
    WebPage("tasks", "/progress", pages.tasks),
    WebPage("workers", "/workers", pages.workers),
    WebPage("worker", "/workers/{id}", pages.worker),
    WebPage("crons", "/periodic", pages.crons),
    WebPage("cron", "/queues/{queue}/periodic", pages.cron),
    WebPage("account", "/account", pages.account),
    WebPage("doctor", "/doctor", pages.doctor),
    WebPage("check", "/queues/{queue}/check", actions.check, "POST"),
    WebPage("stop", "/progress/{id}/stop", actions.stop, "POST"),
    WebPage("purge", "/queues/{queue}/purge", actions.purge, "POST", Access.WRITE),
    WebPage("redrive", "/queues/{queue}/redrive", actions.redrive, "POST", Access.WRITE),
    WebPage("run_cron", "/queues/{queue}/run_cron", actions.run_cron, "POST", Access.WRITE),
    *(WebPage(one.name, f"{one.parent}/{one.name}", one.answer, "POST", Access.WRITE) for one in actions.ACTIONS),
)
#: Addresses that need no right.
OTHERS = {
    "login": "/login",
    "enter": "/enter/{once}",
    "logout": "/logout",
    "health": "/health",
    "static": "/static/{path:path}",
}


class KeptFiles(StaticFiles):
    """Files that a browser keeps: their addresses have a digest of their contents."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return a file."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


class Application:
    """
    The pages of one Redis as an ASGI application, to be served, or mounted in another under a prefix.

    Args:
        admin: the Redis: an `Admin`, a URL or a redis-py client; None for RELIQ_URL.
        access: is called with each request, a Starlette `Request`, and returns the rights of its visitor, with or
            without a name: `Access.READ`, `Access.WRITE.by("alice")`. It may be async.
        token: opens the pages too: a person enters it once, a program sends it as `Authorization: Bearer`.
        grants: the rights of the bearer of the token.
        login: the URL of your login page, which gets the page's path as `next`. Visitors without any right are sent
            there; empty: they see an error. With a `token` they are asked for the token.
        hosts: the host names under which visitors reach the pages, such as `ops.example.com`; IP addresses and localhost
            need no entry. A request under another name is refused, against DNS rebinding.
        title: the name in the browser's tab.

    Attributes:
        last: the sample of all queues that pages share.
        tasks: the background tasks.
        paths: the route's name -> its path.
        notices: word in the address of a page -> sentence.

    Raises:
        ConfigurationError: neither `access` nor `token` is given; the token is too short; or reliq cannot use the Redis.
    """

    paths = {page.name: page.path for page in PAGES} | OTHERS
    notices = actions.NOTICES

    def __init__(
        self,
        admin: Admin | Target | None = None,
        *,
        access: Resolver | None = None,
        token: str | None = None,
        grants: Access | Visitor = Access.READ,
        login: str = "",
        hosts: Iterable[str] = (),
        title: str = "reliq",
    ) -> None:
        if access is None and not token:
            raise ConfigurationError(
                "set who may see the page: access=..., which is called with each request, or token=..."
            )
        logger.addFilter(limiter)
        self.admin = admin if isinstance(admin, Admin) else Admin(admin)
        self.token = Token(token) if token else None
        self.last = pages.LastSample(self.admin)
        self.tasks = actions.BackgroundTasks()
        self.templates = templates(title)
        self._resolver = access
        self._bearer = visitor_of(grants)
        self._login_url = login
        self._hosts = frozenset(name.lower().removesuffix(".") for name in hosts)
        routes: list[Any] = [
            Route(page.path, self._safe(partial(self._page, page)), methods=[page.method], name=page.name)
            for page in PAGES
        ]
        routes += [
            Route(OTHERS["health"], self._health),
            Mount("/static", KeptFiles(directory=STATIC)),
        ]
        if self.token is not None:
            answer = self._safe(partial(self._login, self.token))
            routes += [Route(OTHERS[name], answer, methods=["GET", "POST"]) for name in ("login", "enter")]
            answer = self._safe(partial(self._logout, self.token))
            routes.append(Route(OTHERS["logout"], answer, methods=["POST"]))
        self._inner = Starlette(routes=routes, exception_handlers={HTTPException: self._error})
        self._inner.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with headers that confine every page, errors too; refuse a web socket."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.update(HEADERS)
            await send(message)

        await self._inner({**scope, HOST: scope}, receive, send_with_headers)

    def enter_path(self) -> str:
        """Return a path that lets one browser in, once; without a token, the path of the first page."""
        return f"/enter/{self.token.once()}" if self.token else "/"

    def _safe(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Return `answer` with a check of the host name, and with a page in place of an exception."""

        async def endpoint(request: Request) -> Any:
            refusal: Exception = PageError(
                400,
                "This host name is not allowed",
                "Add it to the allowed hosts: reliq web --allowed-host NAME, or web.app(hosts=[...]).",
            )
            if is_known_host(request.headers.get("host", ""), self._hosts):
                try:
                    return await answer(request)
                except Exception as error:
                    refusal = error
            return await self._error(request, refusal)

        return endpoint

    async def _page(self, page: WebPage, request: Request) -> Response:
        visitor = request.scope[VISITOR] = await self._visitor(request)
        if not visitor.may(page.needs):
            if visitor.access:
                raise PageError(403, "You may only look", f"This needs {page.needs.name}.")
            raise PageError(403, "You may not see this") if self.token is None else PageError(401, "A token is needed")
        form = await _form(request)
        return await in_thread(
            page.answer, RequestContext(self, request, page.name, request.scope["query_string"], form)
        )

    async def _visitor(self, request: Request) -> Visitor:
        """Return the bearer of the token or of a cookie, else the resolver's answer; log its exception, without the text."""
        if self.token is not None:
            bearer = bearer_of(request)
            cookie = request.cookies.get(self.token.cookie, "")
            if self.token.is_login(cookie, time.time()) if bearer is None else self.token.is_token(bearer):
                return self._bearer
        if self._resolver is None:
            return Visitor()
        try:
            answer = self._resolver(Request(request.scope[HOST]))
            return visitor_of(await answer if isawaitable(answer) else answer)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            logger.error("web: the access resolver failed, so the visitor is refused: %s", line)  # noqa: TRY400  one line
            raise PageError(500, "The page failed", "The log has the error.") from None

    async def _login(self, token: Token, request: Request) -> Response:
        """Exchange the token, or the word of an address that was printed, for a cookie."""
        context = RequestContext(self, request, "login", await _form(request))
        once = context.path.get("once", "")
        # A browser that prefetches, or a link preview, sends GET too: only POST uses the address up.
        if request.method != "POST" and (not once or (request.method == "GET" and token.knows(once))):
            entry = context.url("enter", once=once) if once else ""
            return context.page("login.html", failed=False, entry=entry)
        if once and not (request.method == "POST" and token.take(once)):
            raise PageError(401, "This address was used", "It works once.")
        if not once and not token.is_token(context.text("token")):
            logger.warning("web: failed login from %s", context.address)
            await sleep(FAILED_LOGIN_SECONDS)
            raise PageError(401, "A token is needed", "That is not the token")
        response = RedirectResponse(f"{context.root}/", 303)
        response.set_cookie(
            token.cookie,
            token.login(time.time()),
            max_age=LOGIN_SECONDS,
            path=context.root or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        logger.info("web: login from %s", context.address)
        return response

    async def _logout(self, token: Token, request: Request) -> Response:
        root = root_of(request)
        await _form(request)
        token.logout(request.cookies.get(token.cookie, ""), time.time())
        response = RedirectResponse(f"{root}{OTHERS['login']}", 303)
        response.delete_cookie(token.cookie, path=root or "/")
        return response

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _error(self, request: Request, error: Exception) -> Response:
        return await in_thread(self._refused, request, error)

    def _refused(self, request: Request, error: Exception) -> Response:
        """Return the page of an error."""
        context = RequestContext(self, request)
        refusal = _refusal(error, request.method)
        is_safe = request.method in SAFE_METHODS
        if self._login_url and refusal.status == HTTPStatus.FORBIDDEN and not context.visitor.access and is_safe:
            return RedirectResponse(f"{self._login_url}?{urlencode({'next': request.url.path})}", 303)
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            response = context.page("login.html", refusal.status, failed=bool(refusal.detail), entry="")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        retries = refusal.status == HTTPStatus.SERVICE_UNAVAILABLE and is_safe
        return context.page("error.html", refusal.status, error=refusal, retry_seconds=RETRY_SECONDS if retries else 0)


def _refusal(error: Exception, method: str) -> PageError:
    """Return an exception as the page of an error, which shows nothing of an unexpected exception."""
    text = str(error)
    match error:
        case PageError():
            return error
        case HTTPException(status_code=HTTPStatus.NOT_FOUND):
            return PageError(404, "There is no such page")
        case HTTPException():
            return PageError(error.status_code, "This address does not do that")
        case RedisUnavailableError():
            return PageError(503, "Redis does not answer", text, "This page tries again by itself.")
        case ProtocolError():
            return PageError(503, "Redis holds data that reliq cannot read", text, "`reliq check` names what is wrong.")
        case RedisRefusedError():
            advice = "The page needs the rights of the role `operator`: see `reliq acl`."
            return PageError(503, "Redis refuses", text, advice)
        case UnknownQueueError():
            return PageError(404, "There is no such queue", text)
        case ConfigurationError() if method in SAFE_METHODS:
            return PageError(404, "There is no such thing here", text)
        case ConfigurationError():
            return PageError(400, "That cannot be done", text)
    logger.error("web: a page failed", exc_info=error)
    return PageError(500, "The page failed", "The log has the error.")


async def _form(request: Request) -> bytes:
    """Return the body of a form; raise PageError for a form of another site, a large form, or a body that is no form."""
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
