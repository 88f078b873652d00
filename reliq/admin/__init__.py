"""All that a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from typing import TYPE_CHECKING

from reliq.lazily import names_of

if TYPE_CHECKING:
    from reliq.admin.account import Account as Account
    from reliq.admin.acl.rule import AclRule as AclRule
    from reliq.admin.admin import Admin as Admin
    from reliq.admin.aio import AsyncAdmin as AsyncAdmin
    from reliq.admin.crons import CronView as CronView
    from reliq.admin.dead import OnLetters as OnLetters
    from reliq.admin.doctor.facts import Finding as Finding, Verdict as Verdict
    from reliq.admin.ends import End as End, EndKind as EndKind
    from reliq.admin.filters import Filter as Filter, LetterFilter as LetterFilter
    from reliq.admin.fsck.reading import OnProgress as OnProgress
    from reliq.admin.fsck.report import CheckReport as CheckReport, Fault as Fault, FaultKind as FaultKind
    from reliq.admin.fsck.state import FaultName as FaultName
    from reliq.admin.groups import DeadGroup as DeadGroup, DeadGroups as DeadGroups, GroupBy as GroupBy
    from reliq.admin.history import Minute as Minute
    from reliq.admin.list import Entry as Entry, EntryMark as EntryMark, OnLook as OnLook
    from reliq.admin.message_keys import KeyPage as KeyPage, KeysView as KeysView
    from reliq.admin.move import MoveResult as MoveResult, OnMoved as OnMoved
    from reliq.admin.page import MessagePage as MessagePage, SearchResult as SearchResult
    from reliq.admin.places import Place as Place
    from reliq.admin.publish_file import FilePublished as FilePublished, OnBytes as OnBytes, OnError as OnError
    from reliq.admin.queues import Overview as Overview, QueueView as QueueView, Rates as Rates
    from reliq.admin.reader import Reader as Reader
    from reliq.admin.redrive import (
        OnRedriven as OnRedriven,
        RedriveOptions as RedriveOptions,
        RedriveResult as RedriveResult,
    )
    from reliq.admin.remove import OnStep as OnStep, RemoveResult as RemoveResult
    from reliq.admin.shard_change import Leftover as Leftover
    from reliq.admin.shards import ShardsView as ShardsView
    from reliq.admin.show import MessageState as MessageState, MessageView as MessageView
    from reliq.admin.story import Story as Story, StoryEvent as StoryEvent, StoryKind as StoryKind
    from reliq.admin.watch import Failure as Failure, Moment as Moment, Trend as Trend, Watcher as Watcher
    from reliq.admin.workers import Running as Running, WorkerView as WorkerView
    from reliq.failure_note import FailureNote as FailureNote
    from reliq.roster import Slot as Slot, Worker as Worker
    from reliq.shardmap import MapState as MapState, ShardMap as ShardMap
    from reliq.stacks import HandlerStack as HandlerStack, StackReport as StackReport
    from reliq.transitions import KeyLine as KeyLine, KeyLines as KeyLines

if not TYPE_CHECKING:  # a type checker sees every name above, and that there is no other
    __getattr__, __dir__, __all__ = names_of(
        __name__,
        {
            "reliq.admin.account": "Account",
            "reliq.admin.acl.rule": "AclRule",
            "reliq.admin.admin": "Admin",
            "reliq.admin.aio": "AsyncAdmin",
            "reliq.admin.crons": "CronView",
            "reliq.admin.dead": "OnLetters",
            "reliq.admin.doctor.facts": "Finding Verdict",
            "reliq.admin.ends": "End EndKind",
            "reliq.admin.filters": "Filter LetterFilter",
            "reliq.admin.fsck.check": "OnProgress",
            "reliq.admin.fsck.report": "CheckReport Fault FaultKind",
            "reliq.admin.fsck.state": "FaultName",
            "reliq.admin.groups": "DeadGroup DeadGroups GroupBy",
            "reliq.admin.history": "Minute",
            "reliq.admin.list": "Entry EntryMark OnLook",
            "reliq.admin.message_keys": "KeyPage KeysView",
            "reliq.admin.move": "MoveResult OnMoved",
            "reliq.admin.page": "MessagePage SearchResult",
            "reliq.admin.places": "Place",
            "reliq.admin.publish_file": "FilePublished OnBytes OnError",
            "reliq.admin.queues": "Overview QueueView Rates",
            "reliq.admin.reader": "Reader",
            "reliq.admin.redrive": "OnRedriven RedriveOptions RedriveResult",
            "reliq.admin.remove": "OnStep RemoveResult",
            "reliq.admin.shard_change": "Leftover",
            "reliq.admin.shards": "ShardsView",
            "reliq.admin.show": "MessageState MessageView",
            "reliq.admin.story": "Story StoryEvent StoryKind",
            "reliq.admin.watch": "Failure Moment Trend Watcher",
            "reliq.admin.workers": "Running WorkerView",
            "reliq.failure_note": "FailureNote",
            "reliq.roster": "Slot Worker",
            "reliq.shardmap": "MapState ShardMap",
            "reliq.stacks": "HandlerStack StackReport",
            "reliq.transitions": "KeyLine KeyLines",
        },
    )
