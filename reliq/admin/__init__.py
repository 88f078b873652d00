"""What a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from reliq.admin.accounting import Account
from reliq.admin.admin import Admin
from reliq.admin.alive import Running
from reliq.admin.ending import End
from reliq.admin.inspecting import MessageView
from reliq.admin.overview import Overview, QueueView, Rates
from reliq.admin.watching import Failure, Moment, Trend, Watcher
from reliq.roster import Slot, Worker

__all__ = [
    "Account",
    "Admin",
    "End",
    "Failure",
    "MessageView",
    "Moment",
    "Overview",
    "QueueView",
    "Rates",
    "Running",
    "Slot",
    "Trend",
    "Watcher",
    "Worker",
]
