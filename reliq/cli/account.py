"""`reliq account`: whether every message that came in has ended in one way or is alive."""

from typing import TYPE_CHECKING

import typer

from reliq.cli.options import Desk, Json, QueueName
from reliq.cli.output import print_json, say
from reliq.text import partial

if TYPE_CHECKING:
    from reliq.admin import Account

EXIT_UNBALANCED = 1


def account(queue: QueueName, *, json: Json = False, desk: Desk) -> None:
    """
    Show what came in, how it ended and what is alive, as Redis itself counts; say what does not add up.

    In a layout of the Go original, whose programs count nothing, it is what reliq did, and need not add up.

    Exit codes: 0 it adds up or need not, 1 it does not (or Redis is away or refuses), 2 wrong usage or an
    unknown queue.

    Example: reliq account orders
    """
    found = desk.account(queue)
    if json:
        print_json(found)
    else:
        say(*_lines(found), *([f"The account is {partial(found.away)}."] if found.away else []))
    if found.balanced is False:
        raise typer.Exit(EXIT_UNBALANCED)


def _lines(found: "Account") -> list[str]:
    came = [("published", found.published), ("redriven", found.redriven)]
    went = [(kind, getattr(found, kind)) for kind in ("acked", "dead", "expired", "cancelled", "purged", "alive")]
    width = len(f"{max(number for _, number in came + went):,}")
    lines = [f"{kind:>10} {number:>{width},}" for kind, number in came]
    lines += [f"{kind:>10} {number:>{width},}" for kind, number in went]
    lines.insert(len(came), " " * 11 + "=")
    if found.missing is None:
        return [
            *lines,
            "Above `alive` is what reliq itself did. A program in Go that shares the queue counts nothing:",
            "what it published, acked or deleted nobody knows, so that this need not add up.",
        ]
    if found.missing == 0:
        return [*lines, "It adds up."]
    many = f"{abs(found.missing):,}"
    if found.missing > 0:
        return [
            *lines,
            f"It does not add up: what came in is {many} more than what has ended or is alive.",
            "Something else than reliq took them out, such as a deleted key, or a lost write.",
        ]
    return [
        *lines,
        f"It does not add up: what has ended or is alive is {many} more than what came in.",
        "Something else than reliq put them in, such as a script of yours, or the totals were lost.",
    ]
