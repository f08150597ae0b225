"""The quick suite has every pair of values of a product, in a few of its cases."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from pairwise import covering

AXES = {"a": range(2), "b": range(3), "c": range(4), "d": range(2)}
PRODUCT = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def pairs_of(cases: Any) -> set[Any]:
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


def test_every_pair_of_values_is_covered_by_a_few_cases():
    chosen = covering(PRODUCT)
    assert pairs_of(PRODUCT[position] for position in chosen) == pairs_of(PRODUCT)
    assert 12 <= len(chosen) <= 14  # of 48; the two longest axes have 12 pairs


def test_values_of_an_axis_that_stands_alone_are_there_once():
    chosen = [PRODUCT[position] for position in covering(PRODUCT, once=["c"])]
    assert {case["c"] for case in chosen} == set(AXES["c"])
    assert {pair for pair in pairs_of(PRODUCT) - pairs_of(chosen) if "c" not in dict(pair)} == set()
    assert len(chosen) <= 8  # of 48; without `c`, the two longest axes have 6 pairs
