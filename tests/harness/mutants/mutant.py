"""A mutant: a fault that is written into a copy of the package, and the tests that must fail."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODEL, KEYED, HARNESS = "model", "keyed model", "harness"


@dataclass(frozen=True, slots=True)
class Mutant:
    """
    One fault.

    Attributes:
        file: path below `reliq`.
        old, new: the text to replace, which must occur exactly once, and its replacement.
        by: the test that must fail: the model, the model of queues with keys, or the harness.
        examples: number of examples in which the model must fail; 0 if that is too slow for a quick check.
    """

    name: str
    file: str
    old: str
    new: str
    by: str = MODEL
    examples: int = 0

    def apply(self, package: Path) -> None:
        """Write the fault into a copy of the package; raise ValueError if its text does not occur exactly once."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"mutant {self.name!r}: its text is {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))
