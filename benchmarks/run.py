"""A whole run: every peer is tried with each of its settings, then measured with the fastest in rounds."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.catalogue import Peer
from benchmarks.drains import drain
from benchmarks.environments import WORK, InstallError, command
from benchmarks.measures import FULL, QUICK, Measures
from benchmarks.results import Results
from benchmarks.server import CountedRedis
from benchmarks.stage import Stage
from benchmarks.steps import StepError
from benchmarks.works import WORKS, Work

STATE = WORK / "state.json"


class OutOfTimeError(Exception):
    """Nothing more may be begun."""


class Run:
    """
    All rounds over all peers.

    Args:
        until: monotonic seconds after which nothing more is begun.
    """

    def __init__(
        self, peers: Sequence[Peer], client: CountedRedis, url: str, results: Results, *, quick: bool, until: float
    ) -> None:
        self._peers, self._client, self._url, self._results = peers, client, url, results
        self._scale, self._until = QUICK if quick else FULL, until

    def install(self) -> None:
        """Make every environment first, so that no round waits for it; one that cannot be made fails its measures."""
        for peer in self._peers:
            print(f"{peer.name}: ", end="", flush=True)
            try:
                command(peer, "work")
                print("ready")
            except InstallError as error:
                print(f"not installed: {error}")

    def all(self, rounds: int) -> None:
        """Try settings, then measure, as far as the time allows."""
        try:
            self._try_settings()
            self._rounds(rounds)
        except OutOfTimeError:
            print("There is no time left; --resume goes on from here.")

    def _try_settings(self) -> None:
        """Work a short queue with each setting of each peer, for each kind of work."""
        for peer in self._peers:
            for work, settings in peer.tries.items():
                tried = self._results.tried.setdefault(peer.name, {})
                if work not in tried and len(settings) > 1:
                    found = self._tried(peer, work, settings[:: self._scale.every])
                    print(f"{peer.name}, {work}: " + ", ".join(f"{one} {rate:,.0f}" for one, rate in found.items()))
                    tried[work] = found
                    self._results.save(STATE)

    def _tried(self, peer: Peer, work: Work, settings: Sequence[str]) -> dict[str, float]:
        """Return messages a second with each setting; one that fails is left out, and told."""
        rates: dict[str, float] = {}
        for setting in settings:
            self._look_at_the_clock()
            with tempfile.TemporaryDirectory() as folder:
                stage = Stage(peer, self._client, self._url, Path(folder), {work: setting})
                try:
                    rates[setting] = drain(stage, work, WORKS[work], self._scale.trial).rate
                except Exception as error:  # whatever a peer does, its other settings are tried
                    print(f"{peer.name}, {work}, {setting}: FAILED: {_told(error)}", flush=True)
        return rates

    def _rounds(self, number: int) -> None:
        """Measure each peer once in a round, each round beginning with another; one that cannot end is not begun."""
        for at in range(number):
            began = time.monotonic()
            turn = at % len(self._peers) if self._peers else 0
            for peer in [*self._peers[turn:], *self._peers[:turn]]:
                if at not in self._results.done.get(peer.name, []):
                    self._measure(peer, at)
            self._results.about["rounds"] = at + 1
            self._results.save(STATE)
            if 2 * time.monotonic() - began > self._until and at + 1 < number:
                print(f"No time for another round after {at + 1} of {number}.")
                return

    def _measure(self, peer: Peer, round_number: int) -> None:
        """Measure one peer; what is cut short leaves nothing, so that it is measured anew."""
        print(f"round {round_number + 1}, {peer.name}:", flush=True)
        found: dict[str, float] = {}
        failed: dict[str, str] = {}
        settings = {work: self._results.fastest(peer.name, work) or tries[0] for work, tries in peer.tries.items()}
        with tempfile.TemporaryDirectory() as folder:
            stage = Stage(peer, self._client, self._url, Path(folder), settings)
            for name, measure in Measures(stage, self._scale).all():
                self._look_at_the_clock()
                try:
                    figures = measure()
                except Exception as error:  # whatever a peer does, the others are measured
                    failed[name] = _told(error)
                    print(f"  {name}: FAILED: {failed[name]}", flush=True)
                else:
                    found |= figures
                    print("  " + ", ".join(f"{key} {value:,.1f}" for key, value in figures.items()), flush=True)
        self._results.add(peer.name, found, failed)
        self._results.done.setdefault(peer.name, []).append(round_number)
        self._results.save(STATE)

    def _look_at_the_clock(self) -> None:
        if time.monotonic() > self._until:
            raise OutOfTimeError


def _told(error: Exception) -> str:
    known = isinstance(error, StepError | InstallError)
    return str(error) if known else f"{type(error).__name__}: {error}"
