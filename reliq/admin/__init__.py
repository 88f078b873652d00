"""All that a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.admin.acl import AclRule as AclRule
    from reliq.admin.admin import Admin as Admin, ReadOnlyAdmin as ReadOnlyAdmin
    from reliq.admin.aio import AsyncAdmin as AsyncAdmin
    from reliq.admin.bulk import (
        MoveResult as MoveResult,
        OnMoved as OnMoved,
        OnStep as OnStep,
        RemoveResult as RemoveResult,
    )
    from reliq.admin.calls import Place as Place
    from reliq.admin.check import (
        CheckReport as CheckReport,
        Fault as Fault,
        FaultKind as FaultKind,
        FaultName as FaultName,
        OnProgress as OnProgress,
    )
    from reliq.admin.crons import CronView as CronView
    from reliq.admin.dead import (
        DeadGroup as DeadGroup,
        DeadGroups as DeadGroups,
        GroupBy as GroupBy,
        OnRedriven as OnRedriven,
        RedriveOptions as RedriveOptions,
        RedriveResult as RedriveResult,
    )
    from reliq.admin.doctor import Finding as Finding, Verdict as Verdict
    from reliq.admin.filters import Filter as Filter, LetterFilter as LetterFilter
    from reliq.admin.keys import KeyPage as KeyPage, KeysView as KeysView
    from reliq.admin.messages import (
        Entry as Entry,
        EntryMark as EntryMark,
        MessagePage as MessagePage,
        OnLetters as OnLetters,
        OnLook as OnLook,
        SearchResult as SearchResult,
    )
    from reliq.admin.publish import FilePublished as FilePublished, OnBytes as OnBytes, OnError as OnError
    from reliq.admin.queues import (
        Account as Account,
        Failure as Failure,
        MinuteStats as MinuteStats,
        Overview as Overview,
        QueueSample as QueueSample,
        QueueView as QueueView,
        RateHistory as RateHistory,
        Rates as Rates,
        Watcher as Watcher,
    )
    from reliq.admin.resharding import PendingMigration as PendingMigration, ShardsView as ShardsView
    from reliq.admin.show import (
        FinishedKind as FinishedKind,
        FinishedMessage as FinishedMessage,
        MessageState as MessageState,
        MessageView as MessageView,
        Timeline as Timeline,
        TimelineEvent as TimelineEvent,
        TimelineKind as TimelineKind,
    )
    from reliq.admin.workers import Running as Running, WorkerView as WorkerView
    from reliq.lua.transitions import KeyQueue as KeyQueue, KeyQueues as KeyQueues
    from reliq.redis.commands import (
        HandlerStack as HandlerStack,
        RunningJob as RunningJob,
        StackReport as StackReport,
        Worker as Worker,
    )
    from reliq.redis.shards import MapState as MapState, ShardMap as ShardMap
    from reliq.wire_format import FailureNote as FailureNote

if not TYPE_CHECKING:  # a type checker sees every name above, and that there is no other
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "reliq.admin.acl": "AclRule",
            "reliq.admin.admin": "Admin ReadOnlyAdmin",
            "reliq.admin.aio": "AsyncAdmin",
            "reliq.admin.bulk": "MoveResult OnMoved OnStep RemoveResult",
            "reliq.admin.calls": "Place",
            "reliq.admin.check": "CheckReport Fault FaultKind FaultName OnProgress",
            "reliq.admin.crons": "CronView",
            "reliq.admin.dead": "DeadGroup DeadGroups GroupBy OnRedriven RedriveOptions RedriveResult",
            "reliq.admin.doctor": "Finding Verdict",
            "reliq.admin.keys": "KeyPage KeysView",
            "reliq.admin.filters": "Filter LetterFilter",
            "reliq.admin.messages": "Entry EntryMark MessagePage OnLetters OnLook SearchResult",
            "reliq.admin.publish": "FilePublished OnBytes OnError",
            "reliq.admin.queues": "Account Failure MinuteStats Overview QueueSample QueueView RateHistory Rates Watcher",
            "reliq.admin.show": "FinishedKind FinishedMessage MessageState MessageView Timeline TimelineEvent TimelineKind",
            "reliq.admin.workers": "Running WorkerView",
            "reliq.lua.transitions": "KeyQueue KeyQueues",
            "reliq.redis.commands": "HandlerStack RunningJob StackReport Worker",
            "reliq.admin.resharding": "PendingMigration ShardsView",
            "reliq.redis.shards": "MapState ShardMap",
            "reliq.wire_format": "FailureNote",
        },
    )
