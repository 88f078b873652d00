"""What a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from reliq.admin.accounting import Account
from reliq.admin.admin import Admin
from reliq.admin.alive import Running
from reliq.admin.browsing import Entry
from reliq.admin.bulk import Removed
from reliq.admin.ending import End
from reliq.admin.filters import Filter, LetterFilter
from reliq.admin.inspecting import MessageView
from reliq.admin.letters import Redriven, Terms
from reliq.admin.lines import FilePublished
from reliq.admin.moving import Moved
from reliq.admin.overview import Overview, QueueView, Rates
from reliq.admin.publishing import Wish
from reliq.admin.watching import Failure, Moment, Trend, Watcher
from reliq.roster import Slot, Worker

__all__ = [
    "Account",
    "Admin",
    "End",
    "Entry",
    "Failure",
    "FilePublished",
    "Filter",
    "LetterFilter",
    "MessageView",
    "Moment",
    "Moved",
    "Overview",
    "QueueView",
    "Rates",
    "Redriven",
    "Removed",
    "Running",
    "Slot",
    "Terms",
    "Trend",
    "Watcher",
    "Wish",
    "Worker",
]
