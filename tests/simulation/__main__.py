"""`make simulate SEEDS=N [SEED=k]`: runs seeds and prints what they did; a failing seed is replayed by its number."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.world import STEPS, run_seed


def main() -> int:
    """Exit status 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="run this one and print its line")
    parser.add_argument("--first", type=int, default=None, help="first of the seeds; drawn if not given")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    seeds = [chosen.seed] if chosen.seed is not None else range(first_seed(chosen.first), sys.maxsize)
    failed = 0
    totals: Counter[str] = Counter()
    classes: dict[str, Counter[str]] = {"injected": Counter(), "settled": Counter(), "found": Counter()}
    started = time.monotonic()
    oldest = 0.0
    for number, seed in enumerate(seeds):
        if number >= chosen.seeds:
            break
        outcome = run_seed(seed, chosen.steps)
        totals += outcome.counts
        for name, counter in classes.items():
            counter.update(getattr(outcome, name))
        oldest = max(oldest, outcome.max_age)
        if outcome.problems or chosen.seed is not None:
            print(outcome.line(), "|", outcome.features)
            print("\n".join(f"  {problem}" for problem in outcome.problems[:8]), flush=True)
        failed += bool(outcome.problems)
        if number % 500 == 499:
            print(f"... {number + 1} seeds, {totals['slot_writes']:,} slot-writes, {failed} failed", flush=True)
    count = min(chosen.seeds, 1 if chosen.seed is not None else chosen.seeds)
    print(f"seeds {count}, failed {failed}, {time.monotonic() - started:.0f} s")
    print(" ".join(f"{name}={totals[name]:,}" for name in sorted(totals)))
    print(f"{'fault class':<14}{'injected':>10}{'settled slots':>15}{'found':>10}")
    for name in sorted(classes["injected"]):
        print(
            f"{name:<14}" + "".join(f"{classes[key][name]:>{w}}" for key, w in zip(classes, (10, 15, 10), strict=True))
        )
    print(f"oldest fault found after {oldest:.2f} s")
    return 1 if failed else 0


def first_seed(given: int | None) -> int:
    """The first seed, printed."""
    first = time.time_ns() % (1 << 40) if given is None else given
    print(f"first seed {first}")
    return first


if __name__ == "__main__":
    sys.exit(main())
