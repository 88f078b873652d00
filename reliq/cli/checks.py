"""The commands that check and measure a Redis: `check`, `doctor`, `acl` and `bench`."""

import sys
from dataclasses import asdict
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reliq.admin.calls import ROLES
from reliq.admin.screens import format_missing
from reliq.cli.options import (
    DEFAULT_LAYOUT,
    AdminOption,
    Json,
    LayoutText,
    QueueName,
    Url,
    WholeQueueAdmin,
    Yes,
    open_admin,
)
from reliq.cli.output import confirm, console, print_json, print_table, say
from reliq.keys import Keys, Layout
from reliq.text import pluralize

if TYPE_CHECKING:
    from reliq.admin.bench import Bench
    from reliq.admin.check import CheckReport


def check(
    queue: QueueName,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Set right what is wrong.")] = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Look at every message of a queue for what contradicts the model, beside those who use it.

    With --repair, what can be is set right without guessing, and the rest becomes dead letters with the reason `lost`.
    In a layout of the Go original, whose moves take several commands, only what stays wrong for 5 seconds counts.
    Exit 0: nothing is wrong, or nothing any more; what passes by itself does not count. Exit 1: something is wrong.

    Example: reliq check orders --repair
    """
    with console(stderr=True).status("") as status:
        report = admin.check(
            queue,
            repair=repair,
            progress=lambda what, looked_at: status.update(f"reading {what}: {pluralize(looked_at, 'id')} looked at"),
        )
    if json:
        print_json(report)
    else:
        _print_check(report, repair=repair)
    raise typer.Exit(0 if report.is_sound else 1)


def _print_check(report: "CheckReport", *, repair: bool) -> None:
    for fault in report.faults:
        mended = f", {fault.mended} mended" if repair else ""
        say(f"{'passes' if fault.passes else 'wrong':8} {fault.name}: {fault.count}{mended}")
        examples = ", ".join(fault.examples) + (", …" if fault.count > len(fault.examples) else "")
        for label, text in (("means", fault.means), ("such as", examples), ("--repair", fault.repair)):
            say(f"{'':9}{label}: {text}")
    if report.unproved:
        say(
            f"{pluralize(report.unproved, 'id')} may be in no list, or in two; the lists are too long to be looked through."
        )
    if report.away:
        say(f"The check is {format_missing(report.away)}.")
    verdict = "sound" if report.is_sound else "NOT sound"
    say(f"{report.queue}: {pluralize(report.looked_at, 'id')} looked at; the queue is {verdict}.")


def doctor(
    *,
    role: Annotated[
        list[str] | None,
        typer.Option(help=f"Whether this user has the rights of {', '.join(ROLES)}; may be given again."),
    ] = None,
    queue: Annotated[str, typer.Option(help="The queue whose rights are asked for.")] = "reliq-doctor",
    strict: Annotated[bool, typer.Option("--strict", help="A warning or unknown counts as bad.")] = False,
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Say whether a Redis is fit for queues, what each finding means, and how to mend it.

    What it may not read is unknown, never passed. Exit 0: nothing is bad. Exit 1: something is; with --strict a
    warning or an unknown is too.

    Example: reliq doctor --role consumer --queue orders
    """
    findings = admin.doctor(roles=role or (), queue=queue)
    if json:
        print_json(findings)
    else:
        for finding in findings:
            say(f"{finding.verdict:8} {finding.name}: {finding.what}")
            for label, text in (("means", finding.means), ("mend", finding.mend)):
                if text:
                    say(f"{'':9}{label}: {text}")
    fatal = {"bad", "warning", "unknown"} if strict else {"bad"}
    raise typer.Exit(1 if any(finding.verdict in fatal for finding in findings) else 0)


class Server(StrEnum):
    """Which form of rule a server knows."""

    six = "6.2"
    seven = "7.0"


def acl(
    role: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ROLES)}; may be given again.")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="A queue of the user; may be given again.")] = None,
    user: Annotated[str, typer.Option(help="The user's name.", show_default="reliq-ROLE")] = "",
    server: Annotated[
        Server | None, typer.Option(help="The oldest server it is for; without it, the server is asked.")
    ] = None,
    without_eval: Annotated[
        bool, typer.Option("--without-eval", help="Allow only the scripts that `reliq acl --load` has loaded.")
    ] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Load the scripts of this version instead of printing a rule.")
    ] = False,
    layout: LayoutText = DEFAULT_LAYOUT,
    json: Json = False,
    url: Url = None,
) -> None:
    """
    Print the least Redis ACL rule for a role; passwords, and whether the user is on, stay as they are.

    From 7.0 on, each command is bound to the keys it is for. Redis 6.2 cannot do that: there a producer may also read
    and delete bodies, and an operator claim messages. A program that plays several roles needs them all: a worker that
    publishes is a producer too. Publishing with `durability` takes +wait or +waitaof besides. The rule of a Cluster's URL
    has what its connections need; one by --server alone takes +cluster|slots +cluster|info +asking +ping besides.

    A user with EVAL can run a script that never ends, and hold up Redis for all clients. --without-eval allows EVALSHA
    alone. Then run `reliq acl --load` after each start of the server, after a failover, and with each new version of reliq
    before its producers start: Redis forgets loaded scripts. It needs a user who may SCRIPT LOAD.

    Example: reliq acl --role producer --queue orders --server 7.0
    """
    if load:
        loaded = open_admin(url).load_scripts()
        if json:
            print_json(loaded)
        else:
            say(f"{pluralize(len(loaded), 'script is', 'scripts are')} loaded")
        return
    if server is None:
        rule = open_admin(url, layout).acl(role or (), queue or (), user=user, without_eval=without_eval)
    else:
        queues = [Keys(name, Layout.parse(layout)) for name in queue or ()]
        is_seven = server is Server.seven
        from reliq.admin.acl import acl_rule  # noqa: PLC0415  completion does not wait for it

        rule = acl_rule(role or (), queues, user=user, selectors=is_seven, without_eval=without_eval)
    if json:
        print_json(rule)
        return
    say(*str(rule).split("\n"))
    say(f"# Then give it a password: ACL SETUSER {rule.user} on >PASSWORD", stderr=True)


def bench(
    url: Url = None,
    only: Annotated[
        str | None, typer.Option(help="Only these parts, of drain, publish, lateness, pickup and idle.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Send fewer messages: rougher figures, sooner.")] = False,
    json: Json = False,
    yes: Yes = False,
) -> None:
    """
    Measure reliq on your Redis: drain, publish, lateness, pickup, idle cost.

    It works on a queue of its own and removes every key of it, also after Ctrl-C.

    Example: reliq bench --url redis://127.0.0.1:6379/0 --quick
    """
    measures = import_module("reliq.admin.bench")
    parts = [part.strip() for part in only.split(",")] if only else []
    benchmark: Bench = measures.Bench(url, only=parts, messages=measures.QUICK if quick else measures.FULL)
    if others := benchmark.in_use():
        confirm(
            f"This Redis is in use ({others}). The benchmark loads it fully for about "
            f"{'half a minute' if quick else 'a minute'}, and needs about {benchmark.mebibytes} MiB there. Go on?",
            yes=yes,
        )
    measures.exit_on_signals()
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None)
        figures = benchmark.run(lambda part, done, of: bar.update(task, description=part, completed=done, total=of))
    version = benchmark.redis_version()
    if json:
        rows = [asdict(figure) for figure in figures]
        print_json({"redis": version, "place": benchmark.place, "quick": quick, "figures": rows})
        return
    title = f"reliq on Redis {version}, {benchmark.place}" + (" (quick: rough figures)" if quick else "")
    columns = ("part", "what", "figure", "unit")
    print_table(
        columns, [(figure.part, figure.name, f"{figure.value:,.2f}", figure.unit) for figure in figures], title=title
    )
