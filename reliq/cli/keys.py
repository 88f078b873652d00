"""`reliq limits`: the limits of a queue, shown and changed."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

import reliq.admin
from reliq.cli.options import Json, QueueName, WholeQueueAdmin, Yes, state_option
from reliq.cli.output import EXIT_UNFINISHED, confirm, print_facts, print_json, print_table, say
from reliq.cli.queues import describe_sleep, format_time
from reliq.errors import ConfigurationError
from reliq.message import PRIORITY_LINES
from reliq.text import format_missing, pluralize, shell_command

if TYPE_CHECKING:
    from reliq.admin import Admin, KeyQueue, KeysView
    from reliq.admin.shards import ShardsView
    from reliq.settings import Limits


CLEARABLE = ("ordered", "per-key", "rate", "burst", "key-rate", "key-burst", "concurrency", "weights")


def limits(
    queue: QueueName,
    *,
    ordered: Annotated[bool, typer.Option("--ordered", help="One message of a key at a time, in order.")] = False,
    no_ordered: Annotated[bool, typer.Option("--no-ordered", help="Several of a key at a time, in any order.")] = False,
    per_key: Annotated[int | None, typer.Option(help="So many messages of a key at once, over all processes.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="So many starts in all: 100/s, 5/m, 1000/h.")] = None,
    burst: Annotated[int | None, typer.Option(help="So many of them at once after a pause.")] = None,
    key_rate: Annotated[str | None, typer.Option(metavar="N/s", help="So many starts of each key.")] = None,
    key_burst: Annotated[int | None, typer.Option(help="So many of them at once after a pause.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="So many messages at once, over all processes.")] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="KEY=N", help="N turns of KEY for one of others; may be given again.")
    ] = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Have no such limit: {', '.join(CLEARABLE)}, weight:KEY; may be given again.",
            autocompletion=state_option(CLEARABLE),
        ),
    ] = None,
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Show the limits of a queue, or change them while it is in use: order, places, rates and weights of keys.

    Example: reliq limits mail --per-key 4 --rate 100/s --weight vip=4

    A change holds within a second, for 100,000 sleeping keys within seconds, and until a worker starts whose code
    declares other limits than the one before it.
    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue, a limit that is not allowed, or a queue that can
    have none.
    """
    if ordered and no_ordered:
        raise ConfigurationError("say --ordered or --no-ordered, not both")
    weights, order = _weights(weight or ()), True if ordered else False if no_ordered else None
    given = (order, per_key, rate, burst, key_rate, key_burst, concurrency, weights, clear)
    if all(one is None for one in given):
        found = admin.limits(queue)
    else:
        found = admin.set_limits(
            queue,
            ordered=order,
            per_key=per_key,
            rate=rate,
            burst=burst,
            key_rate=key_rate,
            key_burst=key_burst,
            concurrency=concurrency,
            key_weights=weights,
            clear=[_name(one) for one in clear or ()],
        )
    print_json(found) if json else _print_limits(queue, found)


def _weights(given: Sequence[str]) -> dict[str, int] | None:
    """Return `KEY=N` texts as weights; raise ConfigurationError for another form."""
    found = {}
    for one in given:
        key, equals, number = one.rpartition("=")
        if not key or not equals or not (number.isascii() and number.isdecimal() and len(number) < 10):  # noqa: PLR2004
            raise ConfigurationError(f"a weight is written KEY=N, such as vip=4, not {one[:80]!r}")
        found[key] = int(number)
    return found or None


def _name(text: str) -> str:
    """Return what the program calls the limit that a person names."""
    return text if text.startswith("weight:") else {"weights": "key_weights"}.get(text, text.replace("-", "_"))


def _print_limits(queue: str, found: "Limits") -> None:
    lines = lines_of(found)
    if lines:
        print_facts(lines)
    else:
        say(f"{queue} has no limits")


def lines_of(found: "Limits") -> list[tuple[str, str]]:
    """Return the names and values of the limits that there are."""
    said = [("ordered", "one message of a key at a time")] if found.ordered else []
    said += [("per key", f"{found.per_key:,} at once")] if found.per_key is not None else []
    for name, rate, burst in (("rate", found.rate, found.burst), ("key rate", found.key_rate, found.key_burst)):
        said += [(name, f"{rate}, {burst:,} at once after a pause" if burst else rate)] if rate is not None else []
    said += [("concurrency", f"{found.concurrency:,} at once in all")] if found.concurrency is not None else []
    return said + [("weight", f"{key}: {number}") for key, number in found.key_weights.items()]


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
    admin: WholeQueueAdmin,
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
        _print_keys(admin.key(queue, key), json=json)
    elif every and json:
        print_json(list(_every_key(admin, queue)))
    elif every:
        for one in _every_key(admin, queue):
            say("  ".join(str(cell) for cell in row_of(one) if cell != ""))
    else:
        found = admin.keys(queue, limit=limit)
        if json:
            print_json(found)
            return
        if found.largest:
            print_table(KEY_COLUMNS, [row_of(one) for one in found.largest], long=("key",))
        say(*_summary(queue, found))


def row_of(line: "KeyQueue") -> tuple[Any, ...]:
    """Return what a table shows of a key."""
    return name_of(line.key), line.waiting, line.in_flight, f"{line.weight:g}", describe_wait(line)


def name_of(key: str) -> str:
    """Return how a person calls a key; of a priority its name."""
    return PRIORITY_NAMES.get(key, key)


def describe_wait(line: "KeyQueue") -> str:
    """Return what the messages of a key wait for."""
    if line.state == "asleep" and line.asleep_until is not None:
        return f"asleep until {format_time(line.asleep_until)} UTC"
    return {
        "in turn": "in turn for a worker",
        "paused": "paused until `reliq resume --key`",
        "saturated": "saturated: all its places are taken",
        "standing": "standing for no reason: `reliq check --repair` mends it",
    }.get(line.state, "")


def _print_keys(line: "KeyQueue", *, json: bool) -> None:
    if json:
        print_json(line)
    else:
        print_table(KEY_COLUMNS, [row_of(line)], long=("key",))


def _every_key(admin: "Admin", queue: str) -> Iterator["KeyQueue"]:
    """Yield every key once, page by page."""
    after, seen = None, set[str]()
    while True:
        page = admin.key_page(queue, after=after)
        for one in page.items:
            if one.key not in seen:
                seen.add(one.key)
                yield one
        if (after := page.after) is None:
            return


def _summary(queue: str, found: "KeysView") -> list[str]:
    said = [
        f"{found.waiting:,} waiting, {found.running:,} running; {pluralize(found.in_turn, 'key')} in turn, {found.asleep:,} asleep"
    ]
    if found.asleep_until is not None:
        said.append(f"{describe_sleep(queue, found.asleep_until)}.")
    elif found.is_full:
        said.append(
            f"None may start now: the rate or concurrency of {queue} is used up; see `{shell_command('limits', queue)}`."
        )
    return said


def shards(
    queue: QueueName,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", help="Have so many: a power of two.")] = None,
    *,
    finish: Annotated[bool, typer.Option("--finish", help="End a change at once: workers do it too.")] = False,
    yes: Yes = False,
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Show the shards of a queue, or change how many there are while it is in use.

    A change begins at once. Workers move what lies where only the earlier number looks for it, and finish the change; with
    --finish that is done now. Until then publishers ask twice for ids of their own, and no other change can begin.

    Example: reliq shards orders 16 --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or a wrong number, 3 not finished.
    """
    if number is not None:
        confirm(f"Have {number} shards of {queue}? Every publisher must be of a version that knows of shards.", yes=yes)
        admin.resize(queue, number)
    left = admin.finish_resize(queue) if finish else reliq.admin.PendingMigration()
    view = admin.shards(queue)
    if json:
        print_json({"map": view.map, "counts": view.counts, "away": view.away, "left": left})
    else:
        _print_shards(queue, view)
        if left:
            say(f"not finished: {left}")
    if left:
        raise typer.Exit(EXIT_UNFINISHED)


def _print_shards(queue: str, view: "ShardsView") -> None:
    print_table(
        ("shard", "pending", "ready", "unack", "retry", "dead"),
        [
            (at, one.pending, one.ready, one.unack, one.retry, one.dead) if one else (at, *"?????")
            for at, one in enumerate(view.counts)
        ],
    )
    now = view.map
    change = (
        ""
        if now.was == now.n
        else f"; {now.state}, there were {now.was}: workers end it, and `{shell_command('shards', queue, options=['--finish'])}` does"
    )
    say(f"{queue} has {pluralize(now.n, 'shard')} (epoch {now.epoch}){change}")
    if view.away:
        say(f"{queue} is {format_missing(view.away)}")
