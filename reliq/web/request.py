"""The class `RequestContext`: the fields and visitor of a request to the web pages, and methods to build a response."""

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

#: If the form field `raised` has this value, the search finds only dead letters whose failure was not an exception.
NO_PLACE = "-"
#: The application stores the visitor under this key in the ASGI scope of a request.
VISITOR = "reliq.visitor"


class PageError(Exception):
    """An error that is shown to the visitor as a page with a heading, texts below it, and an HTTP status."""

    def __init__(self, heading: str, detail: str = "", *advice: str, status: int) -> None:
        super().__init__(heading)
        self.status = status
        self.heading = heading
        self.detail = detail
        self.advice = advice


class RequestContext:
    """
    A request to a web page, with its visitor and its fields. The methods build responses.

    Args:
        route: the name of the route that handles the request; empty for an error page.
        texts: the query of the URL and the body of the form, in URL encoding. They contain the fields of the request.

    Attributes:
        path: the values of the parameters in the URL's path, such as the queue.
        root: the prefix under which the pages are mounted.
        address: the IP address of the client, for log lines. A proxy reports this address in a header, which can hold
            any text: if it is not an IP address, `an unknown address`.
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
        """Return the last value of a field of the request; an empty text if the request does not have the field."""
        return next((value for field, value in reversed(self._fields) if field == name), "").strip()

    def texts(self, name: str) -> list[str]:
        """Return all values of a field of the request that are not empty."""
        return [value for field, value in self._fields if field == name and value.strip()]

    def value(self, name: str, kind: Callable[[str], T]) -> T | None:
        """
        Return the value of a field, converted by the function `kind`; None if the field is empty.

        Raises:
            ConfigurationError: the value is malformed.
        """
        text = self.text(name)
        try:
            return kind(text) if text else None
        except ConfigurationError:
            raise
        except ValueError:
            raise ConfigurationError(f"{name} must be a number, not {text[:40]!r}") from None

    @property
    def queue(self) -> str:
        """The name of the queue in the URL's path; empty if the path has no queue."""
        return self.path.get("queue", "")

    @property
    def admin(self) -> Admin:
        """The `Admin` for the key layout in the field `layout`. Raises ConfigurationError for an unknown layout."""
        layout = self.text("layout")
        return self.app.admin.in_layout(Layout.parse(layout)) if layout else self.app.admin

    @property
    def shows_bodies(self) -> bool:
        """Whether the visitor asks for bodies, headers and error texts, and has the right to see them."""
        return self.text("bodies") == "1" and self.visitor.may(Access.BODIES)

    def filter(self, state: str) -> Filter:
        """
        Return the filter for messages that the visitor has entered in the fields of a search form.

        Args:
            state: the state of the messages to search. Some fields apply only to dead letters, and are ignored in other
                states.

        Raises:
            PageError: the visitor searches in bodies, headers or errors, and does not have the right BODIES.
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
        """
        Return the URL of a route with the prefix `root`.

        Parameters that are not in the route's path go into the query.
        """
        if "queue" in params:
            params.setdefault("layout", self.text("layout"))
        return self.root + address(self.app.paths[route], params)

    def page(self, template: str, code: int = 200, **values: Any) -> Response:
        """Return a page: the template, rendered with `values` and with the values that all templates need."""
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
        """Return a redirect to the URL of a route; the browser opens this URL with GET."""
        return RedirectResponse(self.url(route, **params), 303)


def root_of(request: Request) -> str:
    """Return the path under which the pages are mounted, such as /ops/reliq; empty if they are served alone."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _segment(value: str) -> str:
    """
    Escape `%`, `/`, `.` and `..` in a parameter of a URL's path. The caller then quotes the result again.

    If these characters were quoted only once, servers and browsers would treat them as separators or as folders.
    """
    escaped = value.replace("%", "%25").replace("/", "%2F")
    return escaped if value.strip(".") else escaped.replace(".", "%2E")


def address(path: str, params: Mapping[str, Any]) -> str:
    """Return a route's path with its parameters filled in. Other parameters go into the query unless they are empty."""
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
