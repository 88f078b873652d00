"""The context of a request for the functions of pages: its fields, its visitor, and the responses to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.responses import HTMLResponse, RedirectResponse, Response

from reliq.admin.filters import Filter, duration, headers_of
from reliq.errors import ConfigurationError
from reliq.keys import Layout
from reliq.web.access import Access, Visitor, is_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request

    from reliq.admin import Admin
    from reliq.web.application import Application

T = TypeVar("T")

#: If the form field `raised` has this value, the search finds only dead letters without an exception.
NO_PLACE = "-"
#: The scope key under which the application stores the visitor of a request.
VISITOR = "reliq.visitor"


class PageError(Exception):
    """An error page: heading, the texts below the heading, and HTTP status."""

    def __init__(self, heading: str, detail: str = "", *advice: str, status: int) -> None:
        super().__init__(heading)
        self.status = status
        self.heading = heading
        self.detail = detail
        self.advice = advice


class RequestContext:
    """
    A request with its visitor and fields.

    Args:
        route: the name of the route; empty for an error page.
        texts: the query and the body of the form, which contain the fields of the request.

    Attributes:
        path: the parameters in the path, such as the queue.
        root: the prefix under which the pages are mounted.
        address: the IP address of the client, for log lines. `an unknown address` if it is not an IP address, because
            the header of a proxy can hold any text.
    """

    def __init__(self, app: Application, request: Request, route: str = "", *texts: bytes) -> None:
        self.app = app
        self.route = route
        self.visitor: Visitor = request.scope.get(VISITOR, Visitor())
        self.path = {name: unquote(value, errors="surrogateescape") for name, value in request.path_params.items()}
        self.root = root_of(request)
        client = request.client
        self.address = client.host if client and is_address(client.host) else "an unknown address"
        self._may_log_out = app.token is not None and app.token.cookie in request.cookies
        try:
            self._fields = [
                field
                for text in texts
                for field in parse_qsl(text.decode("ascii", "replace"), errors="surrogateescape", max_num_fields=1000)
            ]
        except ValueError:
            raise PageError("The form has too many fields", status=400) from None

    def text(self, name: str) -> str:
        """Return the last value of a field; empty if the request does not have the field."""
        return next((value for field, value in reversed(self._fields) if field == name), "").strip()

    def texts(self, name: str) -> list[str]:
        """Return all values of a field except empty values."""
        return [value for field, value in self._fields if field == name and value.strip()]

    def value(self, name: str, kind: Callable[[str], T]) -> T | None:
        """Return a field converted by `kind`; None if it is empty; raise ConfigurationError if it is malformed."""
        text = self.text(name)
        try:
            return kind(text) if text else None
        except ConfigurationError:
            raise
        except ValueError:
            raise ConfigurationError(f"{name} must be a number, not {text[:40]!r}") from None

    @property
    def queue(self) -> str:
        """The name of the queue in the path."""
        return self.path.get("queue", "")

    @property
    def admin(self) -> Admin:
        """The `Admin` for the layout that the field `layout` names; raises ConfigurationError for an unknown layout."""
        layout = self.text("layout")
        return self.app.admin.in_layout(Layout.parse(layout)) if layout else self.app.admin

    @property
    def shows_bodies(self) -> bool:
        """Whether the visitor asks for bodies, headers and errors, and may see them."""
        return self.text("bodies") == "1" and self.visitor.may(Access.BODIES)

    def filter(self, state: str) -> Filter:
        """
        Return the message filter in the fields of a search.

        Args:
            state: the state to search in; only dead letters have all fields of the filter.

        Raises:
            PageError: the search is for bodies, headers or errors, and the visitor does not have the right BODIES.
        """
        if not self.visitor.may(Access.BODIES) and any(self.texts(name) for name in ("text", "header", "error")):
            raise PageError(
                "You may not search bodies, headers or errors", "A search would reveal their contents.", status=403
            )
        chosen: dict[str, Any] = {"headers": headers_of(self.texts("header")), "match": self.text("text")}
        chosen["key"] = self.text("key")
        if state == "dead":
            chosen |= {name: self.text(name) for name in ("reason", "error")}
            chosen |= {f"{name}_than": self.value(name, duration) for name in ("older", "newer")}
            raised = self.text("raised")
            chosen |= {"raised": "" if raised == NO_PLACE else raised or None, "ids": frozenset(self.texts("id"))}
        return Filter(**chosen)

    def url(self, route: str, **params: Any) -> str:
        """Return the URL of a route with the prefix; parameters that are not in its path go into the query."""
        if "queue" in params:
            params.setdefault("layout", self.text("layout"))
        return self.root + address(self.app.paths[route], params)

    def page(self, template: str, code: int = 200, **values: Any) -> Response:
        """Return a page: a template rendered with `values` and the values that all pages share."""
        text = self.app.templates.get_template(template).render(
            url=self.url,
            field=self.text,
            route=self.route,
            queue=self.queue,
            user=self.visitor.who,
            may_write=self.visitor.may(Access.WRITE),
            may_read_bodies=self.visitor.may(Access.BODIES),
            place=self.app.admin.place if self.visitor.may(Access.READ) else "",
            now=time.time(),
            notice=self.app.notices.get(self.text("done"), ""),
            may_log_out=self._may_log_out,
            show_bodies=self.shows_bodies,
            **values,
        )
        return HTMLResponse(text, code)

    def go(self, route: str, **params: Any) -> Response:
        """Return a redirect to the page of a route."""
        return RedirectResponse(self.url(route, **params), 303)


def root_of(request: Request) -> str:
    """Return the prefix under which the pages are mounted, such as /ops/reliq; empty if they are served alone."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _segment(value: str) -> str:
    """
    Escape `/`, `.` and `..` in a part of a URL's path; the usual escaping then escapes the result again.

    If these characters were escaped only once, servers and browsers would interpret them.
    """
    escaped = value.replace("%", "%25").replace("/", "%2F")
    return escaped if value.strip(".") else escaped.replace(".", "%2E")


def address(path: str, params: Mapping[str, Any]) -> str:
    """Fill parameters into a route's path; other parameters that are not empty go into the query."""
    rest = dict(params)
    for name in params:
        if f"{{{name}:path}}" in path:
            path = path.replace(f"{{{name}:path}}", quote(str(rest.pop(name))))
        elif f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", quote(_segment(str(rest.pop(name))), safe="", errors="surrogateescape"))
    if rest.get("layout") == str(Layout.RELIQ):
        del rest["layout"]
    query = {name: value for name, value in rest.items() if value}
    return path + ("?" + urlencode(query, doseq=True, errors="surrogateescape") if query else "")
