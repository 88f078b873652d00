"""The tables of the manual list every option and default of the code, and no other."""

import inspect
import re

from pages import ROOT

from reliq import OutgoingMessage
from reliq.cli.app import Commands
from reliq.handlers.registration import Periodic
from reliq.settings import HandlerSettings, LimitOptions, QueueSettings

WORKER = {option: one.default for one in Commands.load("worker").params if not one.hidden for option in one.opts}


def page(name):
    return (ROOT / "docs" / name).read_text("utf-8")


def options(name):
    """Return the default of each option in the table of a page."""
    column, found = 0, {}
    for line in page(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| option"):
            column = cells.index("default")
        elif column and line.startswith("| `") and len(cells) > column:
            found |= dict.fromkeys(re.findall(r"`([\w-]+)(?:=[^`]*)?`", cells[0]), cells[column])
        elif not line.startswith("|"):
            column = 0
    return found


def test_tables_have_every_option():
    known = {
        "guides/publishing.md": {
            *QueueSettings.__dataclass_fields__,
            *OutgoingMessage.__annotations__,
            "layout",
            "validate",
        }
        - {"body"},
        "guides/ordering.md": set(LimitOptions.__annotations__),
        "guides/handlers.md": set(HandlerSettings.__dataclass_fields__),
        "guides/periodic.md": {*inspect.signature(Periodic).parameters, "tz"} - {"schedule"},
        "production/workers.md": {option for option in WORKER if option.startswith("--")} - {"--help", "--json"},
    }

    assert {name: set(options(name)) for name in known} == known


def test_defaults_in_the_tables_are_those_of_the_code():
    queue, published = QueueSettings(), options("guides/publishing.md")
    handler, handled = HandlerSettings(), options("guides/handlers.md")
    days = f"{queue.dead_letter_ttl / 86_400:g} days"

    assert [
        published[name] for name in ("retries", "ttl", "dedup", "keep_completed", "max_body", "dead_letter_limit")
    ] == [
        f"{queue.retries}",
        f"{queue.ttl / 86_400:g} days",
        f"{queue.dedup:g} s",
        f"{queue.keep_completed}",
        f"{queue.max_body >> 20} MiB",
        f"{queue.dead_letter_limit:,}, {days}",
    ]
    assert [handled[name] for name in ("lease", "timeout", "weight", "on_decode_error")] == [
        f"{handler.lease:g} s",
        f"{handler.timeout:g} s",
        f"{handler.weight}",
        f'`"{handler.on_decode_error}"`',
    ]
    periodic, entry = options("guides/periodic.md"), inspect.signature(Periodic).parameters
    assert [periodic[name] for name in ("jitter", "catch_up", "misfire_grace_time", "overlap")] == [
        f"{entry['jitter'].default:g}",
        f"`{entry['catch_up'].default}`",
        f"{entry['misfire_grace_time'].default / 86_400:g} day",
        f"`{entry['overlap'].default}`",
    ]
    for option in ("--processes", "--concurrency", "--grace", "--gil-timeout", "--log-level", "--log-format"):
        assert options("production/workers.md")[option] == f"{WORKER[option]}".removesuffix(".0")
