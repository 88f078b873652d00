"""The pages: templates, and how numbers, times and curves are written in them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup

from reliq.foreign import moment, printable
from reliq.readable import amount, pretty, rate, spoken, start_of
from reliq.text import count_of, partial, typed
from reliq.web.curves import Curve, ages, share
from reliq.web.marks import cron_marks, is_unwatched, marks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.runtime import Context

TEMPLATES = Path(__file__).parent / "templates"


class Pages:
    """
    Renders templates. Every text is escaped; a character that hides or moves others is shown as its escape.

    Args:
        title: stands in the head of each page and in the browser's tab.
    """

    def __init__(self, title: str = "reliq") -> None:
        self._jinja = jinja = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_harmless,
        )
        jinja.filters.update(FILTERS)
        jinja.globals.update(
            title=title,
            curve=Curve,
            ages=ages,
            share=share,
            marks=marks,
            cron_marks=cron_marks,
            is_unwatched=is_unwatched,
            typed=typed,
        )

    def render(self, template: str, **context: Any) -> str:
        """Return a template's HTML: a whole page, or the live part of one, whose name begins with `live/`."""
        return self._jinja.get_template(template).render(context)


def _harmless(value: Any) -> Any:
    """Return what a template prints, without characters that a browser or a terminal obeys."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _clock(at: float) -> str:
    """Return unix seconds as a date and time in UTC."""
    return f"{datetime.fromtimestamp(moment(at), UTC):%d %b %Y, %H:%M:%S} UTC"


def _iso(at: float) -> str:
    """Return unix seconds as the machine-readable form of HTML's `time`."""
    return f"{datetime.fromtimestamp(moment(at), UTC):%Y-%m-%dT%H:%M:%SZ}"


@pass_context
def _ago(context: Context, at: float) -> str:
    """Return how long ago `at` was, or in how long it will be, by the page's `now`."""
    seconds = context["now"] - at
    if abs(seconds) < 1:
        return "now"
    return f"{spoken(seconds)} ago" if seconds > 0 else f"in {spoken(-seconds)}"


def _body(body: bytes) -> Markup:
    """Return a body laid out in lines, escaped."""
    return Markup("\n").join(printable(line) for line in pretty(body))


FILTERS: Mapping[str, Any] = {
    "amount": amount,
    "rate": rate,
    "spoken": spoken,
    "clock": _clock,
    "iso": _iso,
    "ago": _ago,
    "plural": count_of,
    "partial": partial,
    "body": _body,
    "start": lambda body: start_of(body, 120),
}
