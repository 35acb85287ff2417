"""Faults of tables and bookkeeping: one op of a broken engine, told as it happened."""

from __future__ import annotations

import random

import numpy as np

from canaryd.client.facts import Final
from canaryd.watch.counters import Check
from tests.simulation.engine import Engine
from tests.simulation.features import PAGE
from tests.simulation.memory import FULL

ROW = "broken"


def break_a_table(engine: Engine, rng: random.Random) -> tuple[str, Check]:
    """Runs one faulty op on an idle engine; its class and the check that must find it."""
    free = engine.pages.free[FULL]
    held = [page for row in engine.told.rows.values() for page in row.pages[FULL][1 : row.length // PAGE]]
    classes = {"slot_out_of_group": Check.RANGE, "reserved_page": Check.RANGE, "position_jump": Check.INPUT}
    if held:
        classes["page_of_two_rows"] = Check.OWNER
    if len(free) < 2:
        del classes["position_jump"]
    else:
        classes["page_twice"] = Check.RANGE
    fault_class = rng.choice(sorted(classes))
    first, pages = 0, [0]
    match fault_class:
        case "slot_out_of_group":
            pages = [engine.pool.num_pages + rng.randrange(3)]
        case "position_jump":
            first, pages = rng.randrange(1, PAGE), [free[0]]
        case "page_twice":
            pages = [free[0], free[0]]
        case "page_of_two_rows":
            pages = [held[rng.randrange(len(held))]]
    positions = np.arange(first, len(pages) * PAGE)
    slots = np.array(pages)[positions // PAGE] * PAGE + positions % PAGE
    op = engine.ops.begin("main", None, 0)
    inside = slots[slots < engine.pool.num_pages * PAGE]
    if inside.size:
        engine.pool.write(FULL, inside, op)
    final = Final()
    final.open(ROW, FULL, pages, 0)
    final.write(FULL, [ROW], [positions.size], positions, [rng.randrange(1000) for _ in positions], slots)
    engine.ops.end(op, "done", final, 0)
    return fault_class, classes[fault_class]
