"""
The ASGI application of the web pages: routes and the rights they need, login, and error pages.

Pages are rendered in threads of their own. So they do not block the threads of an application that mounts the pages.
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

    #: The type of the argument `access`: a function that returns the rights of the visitor who sent a request.
    Resolver = Callable[[Request], Access | Visitor | Awaitable[Access | Visitor]]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The maximum number of pages that are rendered at the same time. Further requests wait.
PAGES_AT_ONCE = 16
_threads = ThreadPoolExecutor(PAGES_AT_ONCE, "reliq-web")
#: The maximum size of a sent form in bytes.
FORM_BYTES = 65_536
#: A client must send a form within this many seconds.
FORM_SECONDS = 10.0
#: The response to a login with a wrong token is delayed by this many seconds, to slow down attackers who guess tokens.
FAILED_LOGIN_SECONDS = 1.0
#: If Redis was unavailable, the error page reloads itself after this many seconds.
RETRY_SECONDS = 5
FORM_TYPE = "application/x-www-form-urlencoded"
#: The ASGI scope of a page contains the original scope under this key, as `Application` received it. The `access`
#: function gets a request with the original scope, so that `request.app` is the application that mounts the pages.
HOST = "reliq.host"


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function in one of the threads for pages, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


class WebPage(NamedTuple):
    """
    A route of the web pages.

    Attributes:
        answer: a function that returns the response. It is called in a thread, because it may wait for Redis.
        needs: the right that a visitor needs for this route.
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
    WebPage("schedules", "/queues/{queue}/schedules", pages.schedules),
    WebPage("account", "/account", pages.account),
    WebPage("doctor", "/doctor", pages.doctor),
    WebPage("check", "/queues/{queue}/check", actions.check, "POST"),
    WebPage("stop", "/progress/{id}/stop", actions.stop, "POST"),
    WebPage("purge", "/queues/{queue}/purge", actions.purge, "POST", Access.WRITE),
    WebPage("redrive", "/queues/{queue}/redrive", actions.redrive, "POST", Access.WRITE),
    WebPage("run_cron", "/queues/{queue}/run_cron", actions.run_cron, "POST", Access.WRITE),
    *(WebPage(one.name, f"{one.parent}/{one.name}", one.answer, "POST", Access.WRITE) for one in actions.ACTIONS),
)
#: The paths of routes that need no rights, by route name.
OTHERS = {
    "login": "/login",
    "enter": "/enter/{once}",
    "logout": "/logout",
    "health": "/health",
    "static": "/static/{path:path}",
}


class KeptFiles(StaticFiles):
    """Serves static files. Browsers may cache them for a year, because their URLs contain a digest of the contents."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the response with a file, and set its header Cache-Control."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


class Application:
    """
    The web pages of one Redis as an ASGI application, to be served alone or mounted in another application.

    Args:
        admin: an `Admin`, or the URL or redis-py client of the Redis; None uses RELIQ_URL.
        access: a function, which may be async. It gets each request as a Starlette `Request` and returns the rights of
            the visitor, with or without a name: `Access.READ`, `Access.WRITE.by("alice")`.
        token: a secret that also gives access to the pages. A person enters it once to log in; a program sends it as
            `Authorization: Bearer`.
        grants: the rights of visitors who use the token.
        login: the URL of your login page. Visitors without any rights are redirected to it, with the path of the page
            in the query field `next`. If `token` is set, they are asked for the token instead. If neither is set, they
            see an error.
        hosts: the host names under which visitors open the pages, such as `ops.example.com`; IP addresses and localhost
            are always allowed. Requests with other host names are refused, to prevent DNS rebinding.
        title: the title of the browser tab.

    Attributes:
        last: the last sample of the state of all queues, which all pages share.
        tasks: the background tasks of this process.
        paths: the paths of the routes, by route name.
        notices: the sentence that a page shows after a form was sent, for each value of the query field `done` in the
            page's URL.

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
                "set who may see the page: access=..., a function that is called with each request, or token=..."
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
            Route(OTHERS["health"], PlainTextResponse("ok\n"), methods=["GET"]),
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
        """Respond to a request. All responses get the security headers, also error pages. WebSockets are refused."""
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
        """
        Return a path with a one-time token, which logs in the first browser that uses it.

        If the application has no token, return `/`.
        """
        return f"/enter/{self.token.once()}" if self.token else "/"

    def _safe(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """
        Return a function that calls `answer` to respond to a request.

        It refuses requests with an unknown host name, and returns an error page for an exception of `answer`.
        """

        async def endpoint(request: Request) -> Any:
            refusal: Exception = PageError(
                "This host name is not allowed",
                "Add it to the allowed hosts: reliq web --allowed-host NAME, or web.app(hosts=[...]).",
                status=400,
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
                raise PageError("You may only read", f"This form needs the right {page.needs.name}.", status=403)
            raise PageError("A token is needed", status=401) if self.token else PageError("No access", status=403)
        form = await _form(request)
        return await in_thread(
            page.answer, RequestContext(self, request, page.name, request.scope["query_string"], form)
        )

    async def _visitor(self, request: Request) -> Visitor:
        """
        Return the visitor who sent a request: from the token or login cookie, or else from the `access` function.

        If the `access` function raises, log the exception without its text, which may contain secrets, and raise
        PageError.
        """
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
            raise PageError("The access check failed", "The log has the error.", status=500) from None

    async def _login(self, token: Token, request: Request) -> Response:
        """
        Show the login form, or set a login cookie if the request has the token or a one-time token.

        The URL that `reliq web` prints contains a one-time token.
        """
        context = RequestContext(self, request, "login", await _form(request))
        once = context.path.get("once", "")
        # Only a POST uses up the one-time token. A GET may come from a link preview, or from a browser that loads pages
        # ahead.
        if request.method != "POST" and (not once or (request.method == "GET" and token.knows(once))):
            entry = context.url("enter", once=once) if once else ""
            return context.page("login.html", failed=False, entry=entry)
        if once and not (request.method == "POST" and token.take(once)):
            raise PageError("This login address was used already", "A login address works only once.", status=401)
        if not once and not token.is_token(context.text("token")):
            logger.warning("web: failed login from %s", context.address)
            await sleep(FAILED_LOGIN_SECONDS)
            raise PageError("A token is needed", "The token is wrong", status=401)
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

    async def _error(self, request: Request, error: Exception) -> Response:
        return await in_thread(self._refused, request, error)

    def _refused(self, request: Request, error: Exception) -> Response:
        """Return the response for an exception: an error page, the login form, or a redirect to the URL in `login`."""
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
    """
    Return the error page for an exception.

    Log an unexpected exception, and do not show its text on the page.
    """
    text = str(error)
    match error:
        case PageError():
            return error
        case HTTPException(status_code=HTTPStatus.NOT_FOUND):
            return PageError("There is no such page", status=404)
        case HTTPException():
            return PageError("This address does not accept this method", status=error.status_code)
        case RedisUnavailableError():
            return PageError("Redis does not answer", text, "This page tries again by itself.", status=503)
        case ProtocolError():
            return PageError("Redis holds data that reliq cannot read", text, "See `reliq check`.", status=503)
        case RedisRefusedError():
            advice = "The page needs the rights of the role `operator`: see `reliq acl`."
            return PageError("Redis refuses", text, advice, status=503)
        case UnknownQueueError():
            return PageError("There is no such queue", text, status=404)
        case ConfigurationError() if method in SAFE_METHODS:
            return PageError("There is no such thing here", text, status=404)
        case ConfigurationError():
            return PageError("That cannot be done", text, status=400)
    logger.error("web: could not answer a request; the visitor gets an error page", exc_info=error)
    return PageError("The page failed", "The log has the error.", status=500)


async def _form(request: Request) -> bytes:
    """
    Return the body of a request that sends a form. For GET, HEAD and OPTIONS, return an empty body.

    Raises:
        PageError: the form comes from another site, is too large, or takes too long; or the body is not a form.
    """
    if request.method in SAFE_METHODS:
        return b""
    if is_cross_site(request):
        raise PageError(
            "This form came from another site", "Pages of other sites may not send forms to this server.", status=403
        )
    if request.headers.get("content-type", FORM_TYPE).partition(";")[0].strip().lower() != FORM_TYPE:
        raise PageError("The body is not a form", f"Send the content type {FORM_TYPE}.", status=415)
    body = b""
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > FORM_BYTES:
                    raise PageError("The form is too large", f"A form has at most {FORM_BYTES:,} bytes.", status=413)
    except TimeoutError:
        raise PageError(
            "The form arrived too slowly", f"Send it within {FORM_SECONDS:g} seconds.", status=408
        ) from None
    return body
