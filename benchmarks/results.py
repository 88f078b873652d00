"""What was measured, by peer and round: kept on disk as it comes, so that a run that was stopped can go on."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.works import Work

#: Of these figures more is better, of all others less.
RATES = ("drain", "one", "bulk")


@dataclass(slots=True)
class Results:
    """
    Figures of every peer.

    Attributes:
        about: what they were measured on and how, as facts by name.
        figures: peer -> name of a figure -> one value for each round.
        failures: peer -> name of a measure -> why it failed, the last time that it did.
        done: which rounds of a peer are complete.
        tried: peer -> kind of work -> setting -> messages a second, from one short drain.
    """

    about: dict[str, Any]
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=dict)
    tried: dict[str, dict[Work, dict[str, float]]] = field(default_factory=dict)

    def add(self, peer: str, found: dict[str, float], failed: dict[str, str]) -> None:
        """Note what a peer's round gave: figures, and measures that failed with why."""
        for name, value in found.items():
            self.figures.setdefault(peer, {}).setdefault(name, []).append(value)
        if failed:
            self.failures.setdefault(peer, {}).update(failed)

    def fastest(self, peer: str, work: Work) -> str | None:
        """Return the setting with which a peer did the work fastest, None when none was tried."""
        rates = self.tried.get(peer, {}).get(work)
        return max(rates, key=rates.__getitem__) if rates else None

    def best(self, peer: str, name: str) -> float | None:
        """Return the best of the rounds, None when there is no figure: what else a machine does can only slow it."""
        values = self.figures.get(peer, {}).get(name)
        return (max if name.startswith(RATES) else min)(values) if values else None

    def spread(self, peer: str, name: str) -> tuple[float, float] | None:
        """Return the least and the greatest value over the rounds."""
        values = self.figures.get(peer, {}).get(name)
        return (min(values), max(values)) if values else None

    def save(self, path: Path) -> None:
        """Write everything as JSON; a crash leaves the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".half")
        half.write_text(json.dumps(asdict(self), indent=1) + "\n")
        half.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Return what was saved."""
        return cls(**json.loads(path.read_text()))
