"""Operators' tools: every command of the terminal is a method of `Admin`."""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.admin.acl import AclRule as AclRule
    from reliq.admin.admin import Admin as Admin, ReadOnlyAdmin as ReadOnlyAdmin
    from reliq.admin.aio import AsyncAdmin as AsyncAdmin
    from reliq.admin.bulk import FilePublished as FilePublished
    from reliq.admin.check import CheckReport as CheckReport, Fault as Fault
    from reliq.admin.doctor import Finding as Finding
    from reliq.admin.filters import Filter as Filter
    from reliq.admin.keys import SharedLimit as SharedLimit
    from reliq.admin.messages import (
        DeadGroup as DeadGroup,
        DeadGroups as DeadGroups,
        Entry as Entry,
        MessageEvent as MessageEvent,
        MessagePage as MessagePage,
        Tally as Tally,
    )
    from reliq.admin.queues import MinuteStats as MinuteStats, Overview as Overview, ShardsView as ShardsView
    from reliq.admin.show import MessageView as MessageView
    from reliq.admin.watch import Failure as Failure, QueueSample as QueueSample, Watcher as Watcher
    from reliq.admin.workers import Running as Running, WorkerView as WorkerView
    from reliq.lua.transitions import KeyQueue as KeyQueue, KeyQueues as KeyQueues
    from reliq.metrics.crons import CronState as CronState
    from reliq.metrics.snapshot import QueueSnapshot as QueueSnapshot, Rates as Rates
    from reliq.redis.commands import (
        HandlerStack as HandlerStack,
        RunningJob as RunningJob,
        StackReport as StackReport,
        Worker as Worker,
    )
    from reliq.redis.shards import ShardMap as ShardMap
    from reliq.wire_format import FailureNote as FailureNote

if not TYPE_CHECKING:  # type checkers see only the names imported above, so they reject any other name
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "reliq.admin.acl": "AclRule",
            "reliq.admin.admin": "Admin ReadOnlyAdmin",
            "reliq.admin.aio": "AsyncAdmin",
            "reliq.admin.check": "CheckReport Fault",
            "reliq.admin.doctor": "Finding",
            "reliq.admin.filters": "Filter",
            "reliq.admin.keys": "SharedLimit",
            "reliq.admin.messages": "DeadGroup DeadGroups Entry MessageEvent MessagePage Tally",
            "reliq.admin.bulk": "FilePublished",
            "reliq.admin.queues": "MinuteStats Overview ShardsView",
            "reliq.admin.watch": "Failure QueueSample Watcher",
            "reliq.metrics.crons": "CronState",
            "reliq.metrics.snapshot": "QueueSnapshot Rates",
            "reliq.admin.show": "MessageView",
            "reliq.admin.workers": "Running WorkerView",
            "reliq.lua.transitions": "KeyQueue KeyQueues",
            "reliq.redis.commands": "HandlerStack RunningJob StackReport Worker",
            "reliq.redis.shards": "ShardMap",
            "reliq.wire_format": "FailureNote",
        },
    )
