"""`Admin`: everything the command line can see and do, for programs."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin.account import Account, account_of
from reliq.admin.acl.rule import acl_roles, acl_rule
from reliq.admin.acting import Acting
from reliq.admin.discover import scanned
from reliq.admin.doctor.probe import examine
from reliq.admin.ends import End, check_kind, ends_of
from reliq.admin.existing import check_known
from reliq.admin.forget import forget
from reliq.admin.fsck.check import Checker
from reliq.admin.queues import Overview, overview, with_rates
from reliq.admin.scripts import load_scripts
from reliq.admin.session import ANSWER_SECONDS, TRY_SECONDS
from reliq.admin.show import MessageView, inspected
from reliq.admin.watch import Watcher
from reliq.admin.workers import Running, running_in, workers_alive
from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.keys import Keys, is_name
from reliq.settings import seconds, whole
from reliq.snapshot.snapshot import Chosen, registered
from reliq.transport.cluster import ClusterWire
from reliq.wireformat import ServerVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.admin.acl.rule import AclRule
    from reliq.admin.doctor.findings import Finding
    from reliq.admin.fsck.report import CheckReport
    from reliq.message import Duration
    from reliq.roster import Worker


class Admin(Acting):
    """
    The operator's view of one Redis.

    Args:
        url: a Redis URL or a redis-py client; None for RELIQ_URL.
        layout: how the keys of its queues are spelled.

    Raises:
        ConfigurationError: there is no Redis to look at, or it is none that reliq can use.
    """

    # ---- whether all is well --------------------------------------------------

    def check(
        self,
        queue: str,
        *,
        repair: bool = False,
        patience: Duration = 5.0,
        progress: Callable[[str, int], None] | None = None,
    ) -> CheckReport:
        """
        Look at every id of a queue for what contradicts the model, in bounded steps beside those who use it.

        Args:
            repair: set right what can be without guessing; move the rest to the dead letters with a reason.
            patience: in a layout of the Go original, which makes a move in several commands: seconds for which a thing
                must stay wrong to be told and set right.
            progress: is told what is being read, and how many ids were looked at so far.

        Raises:
            ConfigurationError: there is no such queue.
        """
        _, keys = self._known(queue)
        wait = partial(time.sleep, seconds("patience", patience, most=3600))
        return Checker(self._ask, keys, repair=repair, progress=progress or _silent, wait=wait).run()

    def forget(self, queue: str, *, letters: bool = False) -> int:
        """
        Remove a queue in which nothing is alive, its name from the registry too; return how many letters went with it.

        One that is published to, or served, after that is there again.

        Args:
            letters: remove its dead letters too.

        Raises:
            ConfigurationError: there is no such queue, or it has messages, dead letters or a worker, or was in use
                less than a minute ago.
        """
        return forget(self._client(), self.keys(queue), self.workers(), letters=letters, for_seconds=TRY_SECONDS)

    def acl(
        self, roles: Sequence[str], queues: Sequence[str], *, user: str = "", without_eval: bool = False
    ) -> AclRule:
        """
        Return the least ACL rule, as this server knows them, for a user who plays `roles` on `queues`.

        Args:
            roles: of `producer`, `consumer`, `operator`, `exporter`.
            user: its name, by default reliq-ROLE.
            without_eval: whether it may run no scripts but those that `load_scripts` has loaded.
        """
        try:
            facts = self._ask(commands.server_facts("server"))
        except RedisRefusedError:
            facts = {}  # one that hides its version is taken to be new
        return acl_rule(
            roles,
            [self.keys(queue) for queue in queues],
            user=user,
            selectors=not ServerVersion.read(facts).is_before((7, 0)),
            select=self._connection.address.database != 0,
            without_eval=without_eval,
        )

    def load_scripts(self) -> list[str]:
        """
        Load the scripts of this version, for users who may not EVAL; return their names.

        Redis forgets them when it restarts, and a replica that is promoted may not have them.

        Raises:
            ConfigurationError: it is a Cluster, where each node needs them: give one node's URL after another.
            RedisRefusedError: this user may not SCRIPT LOAD.
        """
        if isinstance(self._connection.wire(ANSWER_SECONDS), ClusterWire):
            raise ConfigurationError("each node of a Cluster needs the scripts; give one node's URL after another")
        return load_scripts(self._ask)

    def doctor(self, *, roles: Sequence[str] = (), queue: str = "reliq-doctor") -> list[Finding]:
        """
        Say whether this Redis is fit for queues: a finding for each thing that was looked at.

        Args:
            roles: whether this user has the rights of each, on the keys of `queue`, which need not exist.
        """
        known = acl_roles(roles)
        return examine(self._client(), self._connection.address, known, self.keys(queue), TRY_SECONDS)

    # ---- what a person sees -------------------------------------------------

    def queues(self, names: Sequence[str] = (), *, scan: bool = False, interval: Duration = 0.5) -> Overview:
        """
        Return the queues named, or all that the registry has: what is where, how late, how fast, who works.

        Args:
            names: in this admin's layout.
            scan: also find queues that no registry names, in any layout, by a walk over all keys in short steps.
            interval: seconds over which the rates are counted; 0 tells none, and waits for nothing.

        Raises:
            ConfigurationError: there is no such queue, the interval is not allowed, or a Cluster is to be scanned.
        """
        over = seconds("interval", interval, most=60)
        queues = self._chosen(names, scan=scan)
        if over:
            return with_rates(self._client(), queues, TRY_SECONDS, over)
        return overview(self._client(), queues, TRY_SECONDS)

    def watch(self, names: Sequence[str] = ()) -> Watcher:
        """Return what looks at the queues named, or at all of the registry, again and again; raise for an unknown one."""
        chosen = self._chosen(names) if names else None
        return Watcher(self._client(), lambda: chosen or self._chosen(), TRY_SECONDS)

    def workers(self) -> list[Worker]:
        """Return what every worker process that is alive says of itself, at most 5 s ago."""
        return workers_alive(self._client(), TRY_SECONDS)

    def running(self, queue: str, *, longer_than: Duration = 0.0) -> list[Running]:
        """Return the handlers that run for `longer_than`, the longest running first; raise for an unknown queue."""
        at_least = seconds("longer_than", longer_than)
        check_known(self._client(), self.keys(queue), TRY_SECONDS)
        return running_in(self.workers(), queue, at_least)

    def account(self, queue: str) -> Account:
        """Return what came in, how it ended and what is alive, at one moment; raise for an unknown queue."""
        _, keys = self._known(queue)
        return account_of(keys, self._ask(transitions.counts(keys)))

    def show(self, queue: str, id: str) -> MessageView:
        """
        Return where a message is, what it holds and who has it, or what became of it.

        Raises:
            ConfigurationError: there is no such queue, or nothing is known of such a message.
        """
        keys = self.keys(queue)
        check_known(self._client(), keys, TRY_SECONDS)
        return inspected(self._client(), keys, id, TRY_SECONDS)

    def ends(self, queue: str, *, kind: str | None = None, limit: int = 100) -> list[End]:
        """
        Return how the last messages ended, newest first: all that were not acked, or those of one kind.

        Raises:
            ConfigurationError: there is no such queue or kind, or the limit is not 1 to 100,000.
        """
        most = whole("limit", limit, least=1, most=100_000)
        check_kind(kind)
        check_known(self._client(), self.keys(queue), TRY_SECONDS)
        return ends_of(self._client(), self.keys(queue), kind=kind, limit=most, for_seconds=TRY_SECONDS)

    def _chosen(self, names: Sequence[str] = (), *, scan: bool = False) -> Chosen:
        """Return the queues named, or those of the registry, the ones with workers first, and of a scan."""
        if names:
            chosen = [self.keys(name) for name in names]
            for keys in chosen:
                check_known(self._client(), keys, TRY_SECONDS)
            return Chosen(chosen)
        known = registered(self._client(), self._served)
        found = {keys.totals: keys for keys in known.queues}
        if scan:
            if isinstance(self._connection.wire(ANSWER_SECONDS), ClusterWire):
                raise ConfigurationError("a Cluster cannot be scanned as one; give the URL of one node after another")
            found |= {keys.totals: keys for keys in scanned(self._client(), TRY_SECONDS)}
        return Chosen(sorted(found.values(), key=lambda keys: keys.name), known.left_out)

    def _served(self) -> list[Keys]:
        """Return the queues that workers serve."""
        return [Keys(name) for name in {name for one in self.workers() for name in one.queues} if is_name(name)]


def _silent(_what: str, _looked_at: int) -> None:
    """Show nothing."""
