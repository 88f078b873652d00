"""`reliq acl`: the least Redis ACL rule for a role."""

from enum import StrEnum
from typing import Annotated

import typer

from reliq.admin.acl.roles import ROLES
from reliq.admin.acl.rule import acl_rule
from reliq.cli.options import DEFAULT_LAYOUT, Json, LayoutText, Url, admin
from reliq.cli.output import print_json, say
from reliq.keys import Keys, Layout


class Server(StrEnum):
    """Which form of rule a server knows."""

    six = "6.2"
    seven = "7.0"


def acl(
    role: Annotated[list[str], typer.Option(help=f"{', '.join(ROLES)}; may be given again.")],
    queue: Annotated[list[str], typer.Option(help="A queue of the user; may be given again.")],
    user: Annotated[str, typer.Option(help="The user's name.", show_default="reliq-ROLE")] = "",
    server: Annotated[
        Server | None, typer.Option(help="The oldest server it is for; without it, the server is asked.")
    ] = None,
    without_eval: Annotated[
        bool, typer.Option("--without-eval", help="No scripts but those that `reliq scripts load` has loaded.")
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

    Who may EVAL can run a script that never ends, and hold up Redis for everybody. --without-eval allows EVALSHA alone;
    run `reliq scripts load` then, after each start of the server and with each new version.

    Example: reliq acl --role producer --queue orders --server 7.0
    """
    if server is None:
        rule = admin(url, layout).acl(role, queue, user=user, without_eval=without_eval)
    else:
        queues = [Keys(name, Layout.parse(layout)) for name in queue]
        is_seven = server is Server.seven
        rule = acl_rule(role, queues, user=user, selectors=is_seven, without_eval=without_eval)
    if json:
        print_json(rule)
        return
    say(*str(rule).split("\n"))
    say(f"# Then give it a password: ACL SETUSER {rule.user} on >PASSWORD", stderr=True)
