"""
Every move a message can make, as a `Call` that has not happened yet.

One function for each script, by the same name. `clock` is Redis' own unless a test gives unix
microseconds. A receipt is a `Claimed`; one that no longer holds changes nothing.
"""

from typing import TYPE_CHECKING

from reliq.lazily import names_of

if TYPE_CHECKING:
    from reliq.transitions.delivering import (
        LEASE_DEATHS,
        NOT_WATCHING,
        NOTHING_DUE,
        ClaimAnswer,
        ReclaimAnswer,
        Suspects,
        claim,
        promote,
        reclaim,
    )
    from reliq.transitions.key_lines import KeyLine, KeyLines, KeyState, held_up, lines, sleep
    from reliq.transitions.limiting import limit
    from reliq.transitions.periodic import InForce, Tick, TickStatus, register, tick
    from reliq.transitions.protocol import CallNumber
    from reliq.transitions.publishing import PublishAnswer, cancel, publish, reschedule
    from reliq.transitions.settling import Settled, ack, extend, failure, nack, release, snooze
    from reliq.transitions.sharding import (
        REMAP_KEYED,
        ArriveStatus,
        AskStatus,
        Departure,
        LeavingState,
        arrive,
        ask,
        depart,
        leave,
        remap,
    )
    from reliq.transitions.upkeep import RedriveStatus, collect, counts, forget, purge, redrive, tidy

__all__ = [
    "LEASE_DEATHS",
    "NOTHING_DUE",
    "NOT_WATCHING",
    "REMAP_KEYED",
    "ArriveStatus",
    "AskStatus",
    "CallNumber",
    "ClaimAnswer",
    "Departure",
    "InForce",
    "KeyLine",
    "KeyLines",
    "KeyState",
    "LeavingState",
    "PublishAnswer",
    "ReclaimAnswer",
    "RedriveStatus",
    "Settled",
    "Suspects",
    "Tick",
    "TickStatus",
    "ack",
    "arrive",
    "ask",
    "cancel",
    "claim",
    "collect",
    "counts",
    "depart",
    "extend",
    "failure",
    "forget",
    "held_up",
    "leave",
    "limit",
    "lines",
    "nack",
    "promote",
    "publish",
    "purge",
    "reclaim",
    "redrive",
    "register",
    "release",
    "remap",
    "reschedule",
    "sleep",
    "snooze",
    "tick",
    "tidy",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "reliq.transitions.delivering": (
                "LEASE_DEATHS NOT_WATCHING NOTHING_DUE ClaimAnswer ReclaimAnswer Suspects claim promote reclaim"
            ),
            "reliq.transitions.key_lines": "KeyLine KeyLines KeyState held_up lines sleep",
            "reliq.transitions.limiting": "limit",
            "reliq.transitions.periodic": "InForce Tick TickStatus register tick",
            "reliq.transitions.protocol": "CallNumber",
            "reliq.transitions.publishing": "PublishAnswer cancel publish reschedule",
            "reliq.transitions.settling": "Settled ack extend failure nack release snooze",
            "reliq.transitions.sharding": (
                "REMAP_KEYED ArriveStatus AskStatus Departure LeavingState arrive ask depart leave remap"
            ),
            "reliq.transitions.upkeep": "RedriveStatus collect counts forget purge redrive tidy",
        },
    )
