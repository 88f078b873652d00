"""Which fault begins when: decided by the seed before the run."""

import random
from dataclasses import dataclass

#: Faults of processes and faults of the server go side by side; of each sort one at a time.
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
KINDS = OF_PROCESSES + OF_THE_SERVER

CONSUMERS, PRODUCERS = 4, 2
#: Seconds from the beginning of a fault to that of the next of its sort.
SPACING = (2.4, 4.0)
#: Quiet seconds at either end of the run.
FIRST, LAST = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """
    One fault to come.

    Attributes:
        at: seconds from the start of the run.
        victim: which consumer or producer.
        seconds: how long it lasts, where that is for us to choose.
        count: how many replies, where there are some to lose.
    """

    at: float
    kind: str
    victim: int
    seconds: float
    count: int

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.kind} (victim {self.victim}, {self.seconds:.2f} s, {self.count})"


def schedule(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a run so long, by time; every kind comes before any comes again."""
    chance = random.Random(f"{seed} schedule")
    faults = [*_track(chance, OF_PROCESSES, seconds), *_track(chance, OF_THE_SERVER, seconds)]
    return sorted(faults, key=lambda fault: fault.at)


def _track(chance: random.Random, kinds: tuple[str, ...], seconds: float) -> list[Fault]:
    faults: list[Fault] = []
    deck: list[str] = []
    at = FIRST + chance.uniform(0, 1)
    while at < seconds - LAST:
        deck = deck or chance.sample(kinds, len(kinds))
        kind = deck.pop()
        victim = chance.randrange(PRODUCERS if kind == "producer_killed" else CONSUMERS)
        faults.append(Fault(round(at, 3), kind, victim, round(chance.uniform(0.2, 1.5), 3), chance.randint(1, 5)))
        at += chance.uniform(*SPACING)
    return faults
