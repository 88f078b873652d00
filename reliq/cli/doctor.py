"""`reliq doctor`: whether a server is fit for queues."""

from typing import TYPE_CHECKING, Annotated

import typer

from reliq.admin.acl.roles import ROLES
from reliq.cli.options import Json, WholeDesk
from reliq.cli.output import print_json, say

if TYPE_CHECKING:
    from reliq.admin.doctor.facts import Finding


def doctor(
    *,
    role: Annotated[
        list[str] | None,
        typer.Option(help=f"Whether this user has the rights of {', '.join(ROLES)}; may be given again."),
    ] = None,
    queue: Annotated[str, typer.Option(help="The queue whose rights are asked for.")] = "reliq-doctor",
    strict: Annotated[bool, typer.Option("--strict", help="A warning or unknown counts as bad.")] = False,
    json: Json = False,
    desk: WholeDesk,
) -> None:
    """
    Say whether a Redis is fit for queues, what each finding means, and how to mend it.

    What it may not read is unknown, never passed. Exit 0: nothing is bad. Exit 1: something is; with --strict a
    warning or an unknown is too.

    Example: reliq doctor --role consumer --queue orders
    """
    found = desk.doctor(roles=role or (), queue=queue)
    if json:
        print_json(found)
    else:
        for one in found:
            _print(one)
    fatal = {"bad", "warning", "unknown"} if strict else {"bad"}
    raise typer.Exit(1 if any(one.verdict in fatal for one in found) else 0)


def _print(finding: "Finding") -> None:
    say(f"{finding.verdict:8} {finding.name}: {finding.what}")
    for label, text in (("means", finding.means), ("mend", finding.mend)):
        if text:
            say(f"{'':9}{label}: {text}")
