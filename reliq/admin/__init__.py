"""All that a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from reliq.admin.account import Account
from reliq.admin.admin import Admin
from reliq.admin.aio import AsyncAdmin
from reliq.admin.crons import CronView
from reliq.admin.ends import End
from reliq.admin.filters import Filter, LetterFilter
from reliq.admin.groups import DeadGroup, DeadGroups
from reliq.admin.history import Minute
from reliq.admin.list import Entry
from reliq.admin.message_keys import KeyPage, KeysView
from reliq.admin.move import MoveResult
from reliq.admin.page import MessagePage, SearchResult
from reliq.admin.publish_file import FilePublished
from reliq.admin.queues import Overview, QueueView, Rates
from reliq.admin.reader import Reader
from reliq.admin.redrive import RedriveOptions, RedriveResult
from reliq.admin.remove import RemoveResult
from reliq.admin.show import MessageView
from reliq.admin.story import Story, StoryEvent
from reliq.admin.watch import Failure, Moment, Trend, Watcher
from reliq.admin.workers import Running, WorkerView
from reliq.roster import Slot, Worker
from reliq.stacks import HandlerStack, StackReport
from reliq.transitions import KeyLine

__all__ = [
    "Account",
    "Admin",
    "AsyncAdmin",
    "CronView",
    "DeadGroup",
    "DeadGroups",
    "End",
    "Entry",
    "Failure",
    "FilePublished",
    "Filter",
    "HandlerStack",
    "KeyLine",
    "KeyPage",
    "KeysView",
    "LetterFilter",
    "MessagePage",
    "MessageView",
    "Minute",
    "Moment",
    "MoveResult",
    "Overview",
    "QueueView",
    "Rates",
    "Reader",
    "RedriveOptions",
    "RedriveResult",
    "RemoveResult",
    "Running",
    "SearchResult",
    "Slot",
    "StackReport",
    "Story",
    "StoryEvent",
    "Trend",
    "Watcher",
    "Worker",
    "WorkerView",
]
