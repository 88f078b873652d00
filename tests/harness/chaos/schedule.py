"""The schedule of faults, decided by the seed before the run."""

import random
from dataclasses import dataclass

#: Faults of processes and faults of the server or Cluster run side by side, in two tracks. A track has one fault at a time.
OF_PROCESSES = ("consumer_killed", "consumer_paused", "consumer_stopped", "producer_killed")
OF_THE_SERVER = (
    "server_paused",
    "server_killed",
    "server_asleep",
    "clients_killed",
    "writes_paused",
    "scripts_flushed",
    "memory_full",
    "replies_lost",
    "replies_silenced",
    "replies_late",
    "hostile_messages",
)
#: In runs with message keys, an operator changes limits and pauses keys. These runs have no hostile messages.
OF_KEYS = (*OF_THE_SERVER[:-1], "limits_changed", "keys_asleep")
#: Each fault begins when the Cluster has recovered from the previous fault.
OF_THE_CLUSTER = (
    "primary_killed",
    "primary_killed_ahead",
    "primary_paused",
    "primary_cut_off",
    "node_forgotten",
    "slot_moved_by_hand",
    "slot_moved_at_once",
    "shards_added",
    "nodes_disturbed",
)
#: Kind of run -> its faults, in addition to the faults of processes.
OF_THE_GROUND = {"server": OF_THE_SERVER, "keys": OF_KEYS, "cluster": OF_THE_CLUSTER}

CONSUMERS, PRODUCERS = 4, 2
#: Seconds from the start of a fault to the start of the next fault of its track.
SPACING = (2.4, 4.0)
#: Seconds without faults at the start and the end of the run.
FIRST, LAST = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """
    A scheduled fault.

    Attributes:
        at: seconds from the start of the run.
        victim: number of the affected consumer or producer.
        seconds: how long the fault lasts, if the harness decides that.
        length: seconds of the run; in a long run a fault may last longer.
        count: number of lost replies, for faults that lose replies.
    """

    at: float
    kind: str
    victim: int
    seconds: float
    count: int
    length: float

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.kind} (victim {self.victim}, {self.seconds:.2f} s, {self.count})"


def schedule(seed: int, seconds: float, ground: str = "server") -> list[Fault]:
    """Return the faults of a run of this length, by time; each kind occurs before any kind is repeated."""
    chance = random.Random(f"{seed} schedule")
    faults = [*_track(chance, OF_PROCESSES, seconds), *_track(chance, OF_THE_GROUND[ground], seconds)]
    return sorted(faults, key=lambda fault: fault.at)


def _track(chance: random.Random, kinds: tuple[str, ...], seconds: float) -> list[Fault]:
    faults: list[Fault] = []
    deck: list[str] = []
    at = FIRST + chance.uniform(0, 1)
    while at < seconds - LAST:
        deck = deck or chance.sample(kinds, len(kinds))
        kind = deck.pop()
        victim = chance.randrange(PRODUCERS if kind == "producer_killed" else CONSUMERS)
        lasts, count = round(chance.uniform(0.2, 1.5), 3), chance.randint(1, 5)
        faults.append(Fault(round(at, 3), kind, victim, lasts, count, seconds))
        at += chance.uniform(*SPACING)
    return faults
