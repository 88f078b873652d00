"""
Every move a message can make, as a `Call` that has not happened yet.

One function for each script, by the same name. `clock` is Redis' own unless a test gives unix
microseconds. A receipt is a `Claimed`; one that no longer holds changes nothing.
"""

from typing import TYPE_CHECKING

from reliq.lazily import names_of

if TYPE_CHECKING:
    from reliq.transitions.delivering import (
        LEASE_DEATHS as LEASE_DEATHS,
        NOT_WATCHING as NOT_WATCHING,
        NOTHING_DUE as NOTHING_DUE,
        ClaimAnswer as ClaimAnswer,
        FoundBody as FoundBody,
        Oversized as Oversized,
        ReclaimAnswer as ReclaimAnswer,
        Suspects as Suspects,
        bodies as bodies,
        claim as claim,
        delivery as delivery,
        promote as promote,
        reclaim as reclaim,
    )
    from reliq.transitions.key_lines import (
        KeyLine as KeyLine,
        KeyLines as KeyLines,
        KeyState as KeyState,
        held_up as held_up,
        lines as lines,
        sleep as sleep,
    )
    from reliq.transitions.limiting import limit as limit
    from reliq.transitions.periodic import (
        InForce as InForce,
        Tick as Tick,
        TickStatus as TickStatus,
        register as register,
        tick as tick,
    )
    from reliq.transitions.protocol import CallNumber as CallNumber
    from reliq.transitions.publishing import (
        PublishAnswer as PublishAnswer,
        cancel as cancel,
        publish as publish,
        reschedule as reschedule,
    )
    from reliq.transitions.settling import (
        Settled as Settled,
        ack as ack,
        extend as extend,
        failure as failure,
        nack as nack,
        release as release,
        snooze as snooze,
    )
    from reliq.transitions.sharding import (
        REMAP_KEYED as REMAP_KEYED,
        ArriveStatus as ArriveStatus,
        AskStatus as AskStatus,
        Departure as Departure,
        LeavingState as LeavingState,
        arrive as arrive,
        ask as ask,
        depart as depart,
        leave as leave,
        remap as remap,
    )
    from reliq.transitions.upkeep import (
        RedriveStatus as RedriveStatus,
        collect as collect,
        counts as counts,
        forget as forget,
        purge as purge,
        redrive as redrive,
        tidy as tidy,
    )

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = names_of(
        __name__,
        {
            "reliq.transitions.delivering": (
                "LEASE_DEATHS NOT_WATCHING NOTHING_DUE ClaimAnswer FoundBody Oversized ReclaimAnswer Suspects bodies claim delivery "
                "promote reclaim"
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
