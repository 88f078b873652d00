"""`reliq account`: whether every message that came in has ended in one way or is alive."""

import typer

from reliq.admin import Account
from reliq.cli.common import DEFAULT_LAYOUT, Json, LayoutText, QueueName, Url, admin, print_json, say

EXIT_UNBALANCED = 1


def account(queue: QueueName, json: Json = False, url: Url = None, layout: LayoutText = DEFAULT_LAYOUT) -> None:
    """
    Show what came in, how it ended and what is alive, as Redis itself counts; say what does not add up.

    Exit codes: 0 it adds up, 1 it does not (or Redis is away or refuses), 2 asked for wrongly, an unknown queue
    included.

    Example: reliq account orders
    """
    found = admin(url, layout).account(queue)
    if json:
        print_json(found)
    else:
        say(*_lines(found))
    if not found.balanced:
        raise typer.Exit(EXIT_UNBALANCED)


def _lines(found: Account) -> list[str]:
    came = [("published", found.published), ("redriven", found.redriven)]
    went = [(kind, getattr(found, kind)) for kind in ("acked", "dead", "expired", "cancelled", "purged", "alive")]
    width = len(f"{max(number for _, number in came + went):,}")
    lines = [f"{kind:>10} {number:>{width},}" for kind, number in came]
    lines += [f"{kind:>10} {number:>{width},}" for kind, number in went]
    lines.insert(len(came), " " * 11 + "=")
    if found.balanced:
        return [*lines, "It adds up."]
    many = f"{abs(found.missing):,}"
    if found.missing > 0:
        return [
            *lines,
            f"It does not add up: {many} came in and have neither ended nor are alive.",
            "Something else than reliq took them out, such as a consumer in Go, a deleted key, or a lost write.",
        ]
    return [
        *lines,
        f"It does not add up: {many} more have ended or are alive than came in.",
        "Something else than reliq put them in, such as a producer in Go, or the totals were lost.",
    ]
