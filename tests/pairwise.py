"""Which cases of a test the quick suite runs, where parametrizations multiply: enough for every pair of values.

What breaks one case of a product nearly always breaks all cases that share one or two of its values. So of four values
times five times six, 30 cases say what all 120 say; the other 90 are slow. Of a test marked `pairs`, which has hundreds
of them, no suite runs the others.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import pytest

__all__ = ["mark_the_rest_slow", "needless"]


def axes_of(item: pytest.Function) -> dict[str, Hashable]:
    """Return the value that a case has from each parametrization and each fixture with params, by their names.

    Names that one parametrization gives together are one axis: whoever lists cases wants all of them. Values are told
    apart as objects: every case of a product has the same ones.
    """
    params = dict(item.callspec.params)
    axes: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = [name.strip() for name in names]
        axes[",".join(names)] = tuple(id(params.pop(name)) for name in names)
    return axes | {name: id(value) for name, value in params.items()}


def meetings_of(case: dict[str, Hashable], once: Iterable[str]) -> set[Hashable]:
    """Return the pairs of values that meet in a case; those of an axis in `once` are there by themselves."""
    alone = {(name, value) for name, value in case.items() if name in once}
    others = sorted((name, value) for name, value in case.items() if name not in once)
    return alone | set(combinations(others, 2) if len(others) > 1 else others)


def covering(cases: Sequence[dict[str, Hashable]], once: Iterable[str] = ()) -> set[int]:
    """Return the positions of some of the `cases` that have every pair of values that any of them has."""
    meetings = {position: meetings_of(case, once) for position, case in enumerate(cases)}
    missing, chosen = set().union(*meetings.values()), set()
    while missing:
        # The first of those with most that is new: the same choice in every process.
        best = max(meetings, key=lambda position: len(meetings[position] & missing))
        missing -= meetings.pop(best)
        chosen.add(best)
    return chosen


def rest(items: Iterable[pytest.Item], once: bool = True) -> Iterator[pytest.Item]:
    """Yield the cases that have no pair of values which others do not have, those for GPUs among themselves."""
    functions: defaultdict[Hashable, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            functions[item.parent, item.originalname, item.get_closest_marker("cuda") is not None].append(item)
    for cases in functions.values():
        alone = {name for mark in cases[0].iter_markers("once") for name in mark.args if once}
        chosen = covering([axes_of(item) for item in cases], alone)
        yield from (item for position, item in enumerate(cases) if position not in chosen)


def needless(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that no suite runs: the rest of the tests marked `pairs`."""
    return set(rest([item for item in items if item.get_closest_marker("pairs")], once=False))


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Leave to the whole suite what the quick one does not need."""
    for item in rest([item for item in items if not item.get_closest_marker("slow")]):
        item.add_marker(pytest.mark.slow)
