"""`reliq keys`: how many messages of which key wait, and why."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.cli.ends import asleep_text, clock
from reliq.cli.options import Json, QueueName, WholeDesk
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table
from reliq.errors import ConfigurationError
from reliq.message import PRIORITY_LINES
from reliq.text import count_of, typed

if TYPE_CHECKING:
    from reliq.admin import Admin, KeyLine, KeysView

KEY_COLUMNS = ("key", "waiting", "in flight", "weight", "why it waits")
#: How a person calls the lines that stand for priorities.
PRIORITY_NAMES = {line: f"(priority {priority})" for priority, line in PRIORITY_LINES.items()}


def keys(
    queue: QueueName,
    *,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="This key alone.")] = None,
    limit: Annotated[int, typer.Option(help="The most to show, up to 200.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Every key, in no order.")] = False,
    json: Json = False,
    desk: WholeDesk,
) -> None:
    """
    Show which keys have messages that wait or run, those with most first, and why they wait.

    Example: reliq keys mail

    A key waits in turn for a worker, asleep for its rate or as a handler asked, paused for `reliq resume --key`, or
    saturated until a message that has a place ends. Of a queue of very many keys those with a share of what waits are
    shown; --all walks over every key. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong key.
    """
    if every and key is not None:
        raise ConfigurationError("say --key or --all, not both")
    if key is not None:
        _print(desk.key(queue, key), json=json)
    elif every and json:
        print_json(list(_every_key(desk, queue)))
    elif every:
        for one in _every_key(desk, queue):
            say("  ".join(str(cell) for cell in row_of(one) if cell != ""))
    else:
        found = desk.keys(queue, limit=limit)
        if json:
            print_json(found)
            return
        if found.largest:
            print_table(KEY_COLUMNS, [row_of(one) for one in found.largest], long=("key",))
        say(*_summary(queue, found))


def row_of(line: "KeyLine") -> tuple[Any, ...]:
    """Return what a table shows of a key."""
    return name_of(line.key), line.waiting, line.in_flight, f"{line.weight:g}", why_waits(line)


def name_of(key: str) -> str:
    """Return how a person calls a key; of a priority its name."""
    return PRIORITY_NAMES.get(key, key)


def why_waits(line: "KeyLine") -> str:
    """Return what the messages of a key wait for."""
    if line.state == "asleep" and line.asleep_until is not None:
        return f"asleep until {clock(line.asleep_until)} UTC"
    return {
        "in turn": "in turn for a worker",
        "paused": "paused until `reliq resume --key`",
        "saturated": "saturated: all its places are taken",
        "standing": "standing for no reason: `reliq check --repair` mends it",
    }.get(line.state, "")


def _print(line: "KeyLine", *, json: bool) -> None:
    if json:
        print_json(line)
    else:
        print_table(KEY_COLUMNS, [row_of(line)], long=("key",))


def _every_key(desk: "Admin", queue: str) -> Iterator["KeyLine"]:
    """Yield every key once, page by page."""
    after, seen = None, set[str]()
    while True:
        page = desk.key_page(queue, after=after)
        for one in page.items:
            if one.key not in seen:
                seen.add(one.key)
                yield one
        if (after := page.after) is None:
            return


def _summary(queue: str, found: "KeysView") -> list[str]:
    said = [
        f"{found.waiting:,} waiting, {found.running:,} running; {count_of(found.in_turn, 'key')} in turn, {found.asleep:,} asleep"
    ]
    if found.asleep_until is not None:
        said.append(f"{asleep_text(queue, found.asleep_until)}.")
    elif found.is_full:
        said.append(
            f"None may start now: the rate or concurrency of {queue} is used up; see `{typed('limits', queue)}`."
        )
    return said
