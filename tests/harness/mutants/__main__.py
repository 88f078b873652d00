"""Try the mutants, two at a time, and print which test caught which. Exit code 1 if a mutant survives."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.harness.mutants.catalogue import MUTANTS
from tests.harness.mutants.mutant import HARNESS, KEYED, MODEL
from tests.harness.mutants.trial import HandlerOutcome, try_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.mutants", description=__doc__)
    parser.add_argument("--long", action="store_true", help="all, not only those that the model finds at once")
    parser.add_argument("--by", choices=[MODEL, KEYED, HARNESS], help="run only this checker, for any mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("name", nargs="*", help="only mutants whose name begins so")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if given.long or given.name or one.examples]
    chosen = [one for one in chosen if not given.name or one.name.startswith(tuple(given.name))]
    print("| mutant | caught by | after | by the words |\n| --- | --- | --- | --- |")

    outcomes = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for outcome in pool.map(try_out, chosen, [given.by or one.by for one in chosen]):
            outcomes.append(outcome)
            print(row(outcome, given.by or outcome.mutant.by), flush=True)
    survivors = [outcome for outcome in outcomes if not outcome.caught]
    print(f"\n{len(outcomes)} mutants, {len(survivors)} survived.")
    return 1 if survivors else 0


def row(outcome: HandlerOutcome, by: str) -> str:
    by = by if outcome.caught else f"not by {by}"
    words = outcome.words[:90].replace("|", "\\|")
    return f"| {outcome.mutant.name} | {by} | {outcome.seconds:.1f} s | {words} |"


if __name__ == "__main__":
    sys.exit(main())
