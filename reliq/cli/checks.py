"""The commands that check and measure a Redis: `check`, `doctor`, `acl` and `bench`."""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reliq.admin.filters import ROLES
from reliq.admin.screens import format_missing
from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import DEFAULT_LAYOUT, AdminOption, LayoutText, QueueName, Url, WholeQueueAdmin, Yes, open_admin
from reliq.cli.output import confirm, console, exit_on_signals, say
from reliq.keys import Keys, Layout
from reliq.settings import check_int
from reliq.text import pluralize

if TYPE_CHECKING:
    from reliq.admin.check import CheckReport

_ROLES = ", ".join(ROLES)


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
    Check every message of a queue for inconsistent data in Redis, while workers run.

    If --repair cannot repair a message without guessing, the message becomes a dead letter with the reason `lost`. In a
    queue of the Go library delayqueue, only a fault that lasts for 5 seconds counts, because Go programs move a message
    with several Redis commands. A fault marked `passes` disappears without a repair and does not count. Exit codes: 0
    the queue is sound or was repaired, 1 a fault is left.

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
        yield f"{pluralize(report.unproved, 'id')} could not be checked, because the lists are too long to search."
    if report.away:
        yield f"The check is {format_missing(report.away)}."
    verdict = "sound" if report.is_sound else "NOT sound"
    yield f"{report.queue}: {pluralize(report.looked_at, 'id')} looked at; the queue is {verdict}."


@command
def doctor(
    *,
    role: Annotated[
        list[str] | None,
        typer.Option(help=f"Check that your Redis user has the rights of this role: {_ROLES}; may be given again."),
    ] = None,
    queue: Annotated[
        str, typer.Option(help="Check the rights of --role on this queue, even if it does not exist yet.")
    ] = "reliq-doctor",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also for a warning or an unknown result.")
    ] = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Check whether a Redis server is fit for queues: print each finding, its consequence and remedy.

    If your Redis user may not read a setting, its finding is `unknown`, never `ok`. Exit codes: 0 no finding is bad, 1 a
    finding is bad. With --strict, the exit code is also 1 if a finding is a warning or unknown.

    Example: reliq doctor --role consumer --queue orders
    """
    findings = admin.doctor(roles=role or (), queue=queue)
    lines = []
    for one in findings:
        lines.append(f"{one.verdict:8} {one.name}: {one.what}")
        lines += [f"{'':9}{label}: {text}" for label, text in (("means", one.means), ("mend", one.mend)) if text]
    fatal = {"bad", "warning", "unknown"} if strict else {"bad"}
    return Answer(findings, lines, 1 if any(one.verdict in fatal for one in findings) else 0)


@command
def acl(
    role: Annotated[
        list[str] | None, typer.Option(help=f"Role of the Redis user: {_ROLES}; may be given again.")
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Queue that the Redis user may use; may be given again.")
    ] = None,
    user: Annotated[str, typer.Option(help="Name of the Redis user in the rule.", show_default="reliq-ROLE")] = "",
    server: Annotated[
        Literal["6.2", "7.0"] | None,
        typer.Option(help="Redis version that must accept the rule: 6.2 or 7.0; by default the version of your Redis."),
    ] = None,
    without_eval: Annotated[
        bool, typer.Option("--without-eval", help="Allow only scripts that `reliq acl --load` has loaded.")
    ] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Load the Lua scripts of this reliq version, instead of printing a rule.")
    ] = False,
    layout: LayoutText = DEFAULT_LAYOUT,
    url: Url = None,
) -> Answer:
    """
    Print the smallest Redis ACL rule for a role; passwords stay unchanged.

    The rule does not enable or disable the user either. From Redis 7.0, it allows each command only on the keys that need
    it. In Redis 6.2, a producer may also read and delete bodies, and an operator may also claim messages. Give a program
    all its roles: a worker that publishes is also a producer. For publishing with `durability`, add +wait or +waitaof to
    the rule. For a Redis Cluster, give its --url without --server, or add +cluster|slots +cluster|info +asking +ping to
    the rule.

    A user with EVAL can run a script that never ends, and so block Redis for all clients. --without-eval allows only
    EVALSHA. Redis forgets loaded scripts, so run `reliq acl --load` after each start of Redis, after a failover, and
    before the producers of a new reliq version start. --load needs a user with SCRIPT LOAD.

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
        rule = acl_rule(role or (), queues, user=user, selectors=server == "7.0", without_eval=without_eval)
    say(f"# Then give it a password: ACL SETUSER {rule.user} on >PASSWORD", stderr=True)
    return Answer(rule)


@command
def bench(
    url: Url = None,
    messages: Annotated[
        int, typer.Option(help="How many messages to publish and process; fewer give less exact figures.")
    ] = 20_000,
    yes: Yes = False,
) -> Answer:
    """
    Measure reliq on your Redis: rates of publishing and processing, and pickup time of an idle worker.

    Messages are processed by one, then by two worker processes. The benchmark uses a new queue, and deletes all Redis
    keys of this queue at the end, also after Ctrl-C.

    Example: reliq bench --url redis://127.0.0.1:6379/0 --messages 100000
    """
    check_int("--messages", messages, least=1000, most=10_000_000)
    measures = import_module("reliq.admin.bench")
    address = url or import_module("reliq.redis.server").default_url()
    version, keys = measures.server_in_use(address, messages)
    if keys:
        confirm(f"This Redis is in use ({pluralize(keys, 'key')}), and the benchmark loads it fully. Go on?", yes=yes)
    exit_on_signals()
    with console(stderr=True).status("measuring"):
        figures = measures.measure(address, messages)
    table = Table(("measurement", "figure"), [(name, f"{value:,.2f}") for name, value in figures.items()])
    value = {"redis": version, "messages": messages, "figures": figures}
    return Answer(value, [f"reliq on Redis {version}, {messages:,} messages", table])
