"""`reliq limits`: the limits of a queue, shown and changed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.cli.options import Json, QueueName, WholeDesk, state_option
from reliq.cli.output import print_facts, print_json, say
from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliq.limits import Limits

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
    desk: WholeDesk,
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
        found = desk.limits(queue)
    else:
        found = desk.set_limits(
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
    print_json(found) if json else _print(queue, found)


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


def _print(queue: str, found: "Limits") -> None:
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
