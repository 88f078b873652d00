"""One request of a page, as the pages see it, and what they answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.responses import HTMLResponse, RedirectResponse

from reliq.admin.filters import Filter, duration, headers_of
from reliq.errors import ConfigurationError
from reliq.keys import Layout
from reliq.web.access import Access

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

    from reliq.admin import Admin
    from reliq.web.access import Visitor
    from reliq.web.site import Site

#: Stands in an address for letters without a place.
NO_PLACE = "-"
#: Sentences that a page shows after a write; the address names them by these words.
OUTCOMES = {
    "paused": "Paused: consumers stop claiming within a second.",
    "resumed": "Resumed: consumers claim again.",
    "not_paused": "It was not paused.",
    "cancelled": "Cancelled: it does not start.",
    "running": "A worker has it: its handler is told, and it is not retried.",
    "not_found": "It had ended already.",
    "rescheduled": "It has another due time.",
    "still_running": "A worker has it: a message that runs has no due time.",
    "key_paused": "Paused: no message of this key starts.",
    "key_resumed": "Resumed: its messages are served again.",
    "limits_changed": "Changed: the new limits hold within a second.",
    "cron_paused": "Paused: its ticks are skipped, and counted.",
    "cron_resumed": "Resumed: its next tick is published.",
    "asked": "Asked: the stacks are here within 5 seconds.",
    "stopping": "It stops after its step.",
    "ended": "It had ended already.",
}


class PageError(Exception):
    """A page that cannot be given, and why."""

    def __init__(self, status: int, heading: str, detail: str = "", *advice: str) -> None:
        super().__init__(heading)
        self.status = status
        self.heading = heading
        self.detail = detail
        self.advice = advice


class Fields:
    """Names and values of a query or a form; a name may come again."""

    def __init__(self, text: bytes) -> None:
        try:
            self._pairs = parse_qsl(text.decode("ascii", "replace"), errors="surrogateescape", max_num_fields=1000)
        except ValueError:
            raise PageError(400, "Too many fields") from None

    def text(self, name: str) -> str:
        """Return the last value of that name; empty when there is none."""
        return next((value for key, value in reversed(self._pairs) if key == name), "").strip()

    def texts(self, name: str) -> list[str]:
        """Return every value of that name that is not empty."""
        return [value for key, value in self._pairs if key == name and value.strip()]

    def seconds(self, name: str) -> float | None:
        """Return the value, such as `30m`, in seconds; None when there is none."""
        text = self.text(name)
        return duration(text) if text else None

    def number(self, name: str, kind: type[int | float]) -> Any:
        """Return the value as a number; None when there is none; raise ConfigurationError when it is another text."""
        text = self.text(name)
        try:
            return kind(text) if text else None
        except ValueError:
            raise ConfigurationError(f"{name} must be a number, not {text[:40]!r}") from None


@dataclass(frozen=True, slots=True)
class RequestContext:
    """
    One request.

    Attributes:
        route: the name of the route.
        visitor: who makes it.
        path, query, form: what it says.
        root: where the page is mounted.
        asker: the address that it comes from, for the log.
    """

    site: Site
    route: str
    visitor: Visitor
    path: Mapping[str, str]
    query: Fields
    form: Fields
    root: str
    asker: str
    may_log_out: bool

    @property
    def queue(self) -> str:
        """The name of the queue in the path."""
        return self.path["queue"]

    @property
    def admin(self) -> Admin:
        """The operator's view, in the layout that the address names."""
        return self.site.admin(self._layout)

    @property
    def _layout(self) -> str:
        return self.query.text("layout") or self.form.text("layout")

    @property
    def shows_bodies(self) -> bool:
        """Whether bodies, headers and errors were asked for, and may be seen."""
        return self.query.text("bodies") == "1" and self.visitor.may_read_bodies

    def url(self, route: str, **params: Any) -> str:
        """Return the address of a route under the place where the page is mounted; the other parameters are its query."""
        if "queue" in params:
            params.setdefault("layout", self._layout)
        return self.root + address(self.site.paths[route], params)

    def filter(self, fields: Fields) -> Filter:
        """Return which messages the fields describe; raise PageError when the visitor may not search what they carry."""
        self._check_search(fields)
        return Filter(headers=headers_of(fields.texts("header")), match=fields.text("text"), key=fields.text("key"))

    def letter_filter(self, fields: Fields) -> Filter:
        """Return which dead letters the fields describe; as `filter`."""
        self._check_search(fields)
        return Filter(
            headers=headers_of(fields.texts("header")),
            match=fields.text("text"),
            ids=frozenset(fields.texts("id")),
            reason=fields.text("reason"),
            raised={"": None, NO_PLACE: ""}.get(fields.text("raised"), fields.text("raised")),
            error=fields.text("error"),
            older_than=fields.seconds("older"),
            newer_than=fields.seconds("newer"),
        )

    def _check_search(self, fields: Fields) -> None:
        """Raise PageError for a search by one who may not read: it says whether a body holds a text."""
        if not self.visitor.may_read_bodies and any(fields.texts(name) for name in ("text", "header", "error")):
            raise PageError(403, "You may not search bodies, headers or errors", "A search says what they hold.")

    def text(self, template: str, **context: Any) -> str:
        """Return a template's HTML, with what every page has."""
        return self.site.pages.render(
            template,
            url=self.url,
            route=self.route,
            access=self.visitor,
            user=self.visitor.who,
            place=self.site.place if self.visitor.may(Access.READ) else "",
            now=time.time(),
            said=OUTCOMES.get(self.query.text("said"), ""),
            may_log_out=self.may_log_out,
            **context,
        )

    def page(self, template: str, code: int = 200, **context: Any) -> Response:
        """Return a page."""
        return HTMLResponse(self.text(template, **context), code)

    def go(self, route: str, **params: Any) -> Response:
        """Return an answer that leads to another page."""
        return RedirectResponse(self.url(route, **params), 303)


def _segment(value: str) -> str:
    """Return a value without a slash, and not as a dot or two: servers and browsers read these even when escaped once."""
    escaped = value.replace("%", "%25").replace("/", "%2F")
    return escaped if value.strip(".") else escaped.replace(".", "%2E")


def address(path: str, params: Mapping[str, Any]) -> str:
    """Return a route's path with `params` in it; those that it does not have become the query, but the empty ones."""
    rest = dict(params)
    for name in params:
        if f"{{{name}:path}}" in path:
            path = path.replace(f"{{{name}:path}}", quote(str(rest.pop(name))))
        elif f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", quote(_segment(str(rest.pop(name))), safe="", errors="surrogateescape"))
    if rest.get("layout") == str(Layout.RELIQ):
        del rest["layout"]
    pairs = [(name, value) for name, value in rest.items() if value not in (None, "", [], False)]
    pairs = [(name, "1" if value is True else value) for name, value in pairs]
    return path + ("?" + urlencode(pairs, doseq=True, errors="surrogateescape") if pairs else "")
