"""The commands that check a Redis: `check`, `doctor` and `acl`."""

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.admin.screens import format_missing
from reliq.admin.words import ROLES
from reliq.cli.frame import Answer, command
from reliq.cli.options import DEFAULT_LAYOUT, AdminOption, LayoutText, QueueName, Url, WholeQueueAdmin, open_admin
from reliq.cli.output import console, say
from reliq.keys import Keys, Layout
from reliq.text import pluralize

if TYPE_CHECKING:
    from reliq.admin.check import CheckReport


@command
def check(
    queue: QueueName,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair each fault that can be repaired without guessing.")
    ] = False,
    admin: AdminOption,
) -> Answer:
    """
    Check every message of a queue for contradictions to the model, while others use it.

    With --repair, faults are repaired where that needs no guess; other messages become dead letters with the reason `lost`.
    In a layout of the Go original, whose moves take several commands, a fault counts when it lasts for 5 seconds.
    Exit 0: the queue is sound, or was repaired; faults that pass by themselves do not count. Exit 1: a fault is left.

    Example: reliq check orders --repair
    """
    with console(stderr=True).status("") as status:
        report = admin.check(
            queue,
            repair=repair,
            progress=lambda part, looked_at: status.update(f"reading {part}: {pluralize(looked_at, 'id')} looked at"),
        )
    return Answer(report, _lines_of(report, repair=repair), 0 if report.is_sound else 1)


def _lines_of(report: "CheckReport", *, repair: bool) -> Iterator[str]:
    for fault in report.faults:
        mended = f", {fault.mended} mended" if repair else ""
        examples = ", ".join(fault.examples) + (", …" if fault.count > len(fault.examples) else "")
        yield f"{'passes' if fault.passes else 'wrong':8} {fault.name}: {fault.count}{mended}"
        yield f"{'':9}means: {fault.means}"
        yield f"{'':9}such as: {examples}"
        yield f"{'':9}--repair: {fault.repair}"
    if report.unproved:
        yield f"{pluralize(report.unproved, 'id')} may be in no list, or in two; the lists are too long for one read."
    if report.away:
        yield f"The check is {format_missing(report.away)}."
    verdict = "sound" if report.is_sound else "NOT sound"
    yield f"{report.queue}: {pluralize(report.looked_at, 'id')} looked at; the queue is {verdict}."


@command
def doctor(
    *,
    role: Annotated[
        list[str] | None,
        typer.Option(help=f"Check that this user has the rights of {', '.join(ROLES)}; may be given again."),
    ] = None,
    queue: Annotated[
        str, typer.Option(help="Check these rights on this queue, which need not exist.")
    ] = "reliq-doctor",
    strict: Annotated[bool, typer.Option("--strict", help="A warning or unknown counts as bad.")] = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Check whether a Redis is fit for queues: print each finding, its consequence, and the remedy.

    A fact that this user may not read is unknown, never ok. Exit 0: no finding is bad. Exit 1: a finding is bad, or with
    --strict a warning or unknown.

    Example: reliq doctor --role consumer --queue orders
    """
    findings = admin.doctor(roles=role or (), queue=queue)
    lines = [
        line
        for one in findings
        for line in (
            f"{one.verdict:8} {one.name}: {one.what}",
            *([f"{'':9}means: {one.means}"] if one.means else []),
            *([f"{'':9}mend: {one.mend}"] if one.mend else []),
        )
    ]
    fatal = {"bad", "warning", "unknown"} if strict else {"bad"}
    return Answer(findings, lines, 1 if any(one.verdict in fatal for one in findings) else 0)


class Server(StrEnum):
    """The versions of Redis that differ in their rules."""

    six = "6.2"
    seven = "7.0"


@command
def acl(
    role: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ROLES)}; may be given again.")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="A queue of the user; may be given again.")] = None,
    user: Annotated[str, typer.Option(help="The user's name.", show_default="reliq-ROLE")] = "",
    server: Annotated[
        Server | None,
        typer.Option(help="The oldest server that takes the rule; by default the version is read from Redis."),
    ] = None,
    without_eval: Annotated[
        bool, typer.Option("--without-eval", help="Allow only the scripts that `reliq acl --load` has loaded.")
    ] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Load the scripts of this version instead of printing a rule.")
    ] = False,
    layout: LayoutText = DEFAULT_LAYOUT,
    url: Url = None,
) -> Answer:
    """
    Print the least Redis ACL rule for a role; it leaves passwords, and whether the user is on, as they are.

    From 7.0 on, each command is bound to its keys. Redis 6.2 cannot do that: there a producer may also read
    and delete bodies, and an operator claim messages. A program with several roles needs all of them: a worker that
    publishes is a producer too. Publishing with `durability` needs +wait or +waitaof too. The rule for a Cluster's URL
    has the commands that its connections need; for a rule by --server alone add +cluster|slots +cluster|info +asking +ping.

    A user with EVAL can run a script that never ends, and stop Redis for all clients. --without-eval allows EVALSHA
    alone. Then run `reliq acl --load` after each start of the server, after a failover, and with each new version of reliq
    before its producers start: Redis forgets loaded scripts. --load needs a user with SCRIPT LOAD.

    Example: reliq acl --role producer --queue orders --server 7.0
    """
    if load:
        loaded = open_admin(url).load_scripts()
        return Answer(loaded, [f"{pluralize(len(loaded), 'script is', 'scripts are')} loaded"])
    if server is None:
        rule = open_admin(url, layout).acl(role or (), queue or (), user=user, without_eval=without_eval)
    else:
        from reliq.admin.acl import acl_rule  # noqa: PLC0415  completion does not wait for it

        queues = [Keys(name, Layout.parse(layout)) for name in queue or ()]
        rule = acl_rule(role or (), queues, user=user, selectors=server is Server.seven, without_eval=without_eval)
    say(f"# Then give it a password: ACL SETUSER {rule.user} on >PASSWORD", stderr=True)
    return Answer(rule)
