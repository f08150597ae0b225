"""The quick suite has every pair of values of a product, each listed case, and no case that brings nothing new."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from pairwise import covering, mark_the_rest_slow

AXES = {"a": range(2), "b": range(3), "c": range(4), "d": range(2)}
PRODUCT = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def pairs_of(cases: Any) -> set[Any]:
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


def test_every_pair_of_values_is_covered_by_a_few_cases():
    chosen = covering(PRODUCT)
    assert pairs_of(PRODUCT[position] for position in chosen) == pairs_of(PRODUCT)
    assert 12 <= len(chosen) <= 14  # of 48; the two longest axes have 12 pairs


def test_pairs_that_no_case_has_are_not_asked_for():
    cases = [case for case in PRODUCT if case["a"] == 0 or case["b"] == 0]
    assert pairs_of(cases[position] for position in covering(cases)) == pairs_of(cases)


def test_values_of_an_axis_that_stands_alone_are_there_once():
    chosen = [PRODUCT[position] for position in covering(PRODUCT, once=["c"])]
    assert {case["c"] for case in chosen} == set(AXES["c"])
    assert {pair for pair in pairs_of(PRODUCT) - pairs_of(chosen) if "c" not in dict(pair)} == set()
    assert len(chosen) <= 8  # of 48; without `c`, the two longest axes have 6 pairs


def test_one_axis_is_never_cut():
    assert covering([{"a": value} for value in range(5)]) == set(range(5))


def test_choice_is_the_same_every_time():
    assert covering(PRODUCT) == covering(list(PRODUCT))


class Case(SimpleNamespace):
    """As much of a test as decides whether it is quick."""

    def __init__(self, *marks: Any, **params: Any) -> None:
        super().__init__(callspec=SimpleNamespace(params=params), marks=list(marks), parent=None, originalname="test")

    def iter_markers(self, name: str) -> list[Any]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> Any:
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.mark)


def quick_of(cases: list[Case]) -> list[Case]:
    mark_the_rest_slow(cases)  # type: ignore[arg-type]
    return [case for case in cases if case.get_closest_marker("slow") is None]


ZERO, ONE = object(), object()


def test_cases_that_one_parametrization_lists_are_all_quick():
    listed = pytest.mark.parametrize(("a", "b", "c"), []).mark
    cases = [Case(listed, a=a, b=b, c=c) for a, b, c in product((ZERO, ONE), repeat=3)]
    assert quick_of(cases) == cases


def test_cases_of_a_product_are_cut():
    marks = [pytest.mark.parametrize(name, []).mark for name in "ab"]
    cases = [Case(*marks, a=a, b=b, fixture=c) for a, b, c in product((ZERO, ONE), repeat=3)]
    assert len(quick_of(cases)) == 4


def test_cases_that_are_slow_already_cover_nothing():
    cases = [Case(a=a, b=b, c=c) for a, b, c in product((ZERO, ONE), repeat=3)]
    for case in cases[4:]:
        case.add_marker(pytest.mark.slow)
    assert len(quick_of(cases)) == 4


def test_cases_for_gpus_are_chosen_by_themselves():
    cases = [Case(a=a, b=b, c=c) for a, b, c in product((ZERO, ONE), repeat=3)]
    on_gpus = [Case(pytest.mark.cuda.mark, **case.callspec.params) for case in cases]
    quick = quick_of(cases + on_gpus)
    assert len([case for case in quick if case.get_closest_marker("cuda")]) == 4 == len(quick) / 2
