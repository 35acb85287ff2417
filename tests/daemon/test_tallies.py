"""Counters stay monotonic over restarts of what counts them."""

from __future__ import annotations

import pytest

from canaryd.control.messages import Distribution, Series
from canaryd.metrics.tallies import Tally

NAME = "canaryd_suspects_total"


def test_a_new_source_goes_on_where_the_old_one_ended() -> None:
    tally = Tally()
    seen = []
    for source, values in ((b"a", [1, 4]), (b"b", [0, 2, 9]), (b"c", [0])):
        for value in values:
            tally.report(source, [Series(NAME, (), value)])
            seen.append(tally.counters()[NAME, ()])
        tally.retire(source)
        seen.append(tally.counters()[NAME, ()])
    assert seen == [1, 4, 4, 4, 6, 13, 13, 13, 13]


def test_sources_and_own_counts_are_summed_by_label() -> None:
    tally = Tally()
    tally.count("x", "one", by=2)
    tally.report(b"a", [Series("x", ("one",), 3), Series("x", ("two",), 5)])
    tally.report(b"b", [Series("x", ("one",), 7)])
    assert tally.counters() == {("x", ("one",)): 12, ("x", ("two",)): 5}


def test_retiring_twice_or_the_unknown_adds_nothing() -> None:
    tally = Tally()
    tally.report(b"a", [Series("x", (), 3)])
    tally.retire(b"a")
    tally.retire(b"a")
    tally.retire(b"never")
    assert tally.counters() == {("x", ()): 3}


def test_histograms_are_summed_and_a_copy() -> None:
    tally = Tally()
    tally.report(b"a", [], [Distribution("h", (1.0, 2.0), (1, 0, 2), 7.0)])
    tally.retire(b"a")
    tally.report(b"b", [], [Distribution("h", (1.0, 2.0), (1, 1, 0), 2.5)])
    (histogram,) = tally.histograms().values()
    assert (histogram.counts, histogram.total) == ([2, 1, 2], 9.5)
    histogram.counts[0] = 99
    assert tally.histograms()["h"].counts == [2, 1, 2]


def test_histograms_of_different_bounds_do_not_mix() -> None:
    tally = Tally()
    tally.report(b"a", [], [Distribution("h", (1.0,), (1, 0), 1.0)])
    tally.retire(b"a")
    tally.report(b"b", [], [Distribution("h", (2.0,), (1, 0), 1.0)])
    with pytest.raises(ValueError, match="bounds differ"):
        tally.histograms()
