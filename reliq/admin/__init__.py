"""All that a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from typing import TYPE_CHECKING

from reliq.lazily import names_of

if TYPE_CHECKING:
    from reliq.admin.account import Account
    from reliq.admin.acl.rule import AclRule
    from reliq.admin.admin import Admin
    from reliq.admin.aio import AsyncAdmin
    from reliq.admin.crons import CronView
    from reliq.admin.dead import OnLetters
    from reliq.admin.doctor.facts import Finding, Verdict
    from reliq.admin.ends import End, EndKind
    from reliq.admin.filters import Filter, LetterFilter
    from reliq.admin.fsck.reading import OnProgress
    from reliq.admin.fsck.report import CheckReport, Fault, FaultKind
    from reliq.admin.fsck.state import FaultName
    from reliq.admin.groups import DeadGroup, DeadGroups, GroupBy
    from reliq.admin.history import Minute
    from reliq.admin.list import Entry, EntryMark, OnLook
    from reliq.admin.message_keys import KeyPage, KeysView
    from reliq.admin.move import MoveResult, OnMoved
    from reliq.admin.page import MessagePage, SearchResult
    from reliq.admin.places import Place
    from reliq.admin.publish_file import FilePublished, OnBytes, OnError
    from reliq.admin.queues import Overview, QueueView, Rates
    from reliq.admin.reader import Reader
    from reliq.admin.redrive import OnRedriven, RedriveOptions, RedriveResult
    from reliq.admin.remove import OnStep, RemoveResult
    from reliq.admin.shard_change import Leftover
    from reliq.admin.shards import ShardsView
    from reliq.admin.show import MessageState, MessageView
    from reliq.admin.story import Story, StoryEvent, StoryKind
    from reliq.admin.watch import Failure, Moment, Trend, Watcher
    from reliq.admin.workers import Running, WorkerView
    from reliq.failure_note import FailureNote
    from reliq.roster import Slot, Worker
    from reliq.shardmap import MapState, ShardMap
    from reliq.stacks import HandlerStack, StackReport
    from reliq.transitions import KeyLine, KeyLines

__all__ = [
    "Account",
    "AclRule",
    "Admin",
    "AsyncAdmin",
    "CheckReport",
    "CronView",
    "DeadGroup",
    "DeadGroups",
    "End",
    "EndKind",
    "Entry",
    "EntryMark",
    "Failure",
    "FailureNote",
    "Fault",
    "FaultKind",
    "FaultName",
    "FilePublished",
    "Filter",
    "Finding",
    "GroupBy",
    "HandlerStack",
    "KeyLine",
    "KeyLines",
    "KeyPage",
    "KeysView",
    "Leftover",
    "LetterFilter",
    "MapState",
    "MessagePage",
    "MessageState",
    "MessageView",
    "Minute",
    "Moment",
    "MoveResult",
    "OnBytes",
    "OnError",
    "OnLetters",
    "OnLook",
    "OnMoved",
    "OnProgress",
    "OnRedriven",
    "OnStep",
    "Overview",
    "Place",
    "QueueView",
    "Rates",
    "Reader",
    "RedriveOptions",
    "RedriveResult",
    "RemoveResult",
    "Running",
    "SearchResult",
    "ShardMap",
    "ShardsView",
    "Slot",
    "StackReport",
    "Story",
    "StoryEvent",
    "StoryKind",
    "Trend",
    "Verdict",
    "Watcher",
    "Worker",
    "WorkerView",
]

if not TYPE_CHECKING:  # a type checker sees every name above, and that there is no other
    __getattr__, __dir__ = names_of(
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
