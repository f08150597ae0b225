"""Random schedules of replicas end as they must; ``python tests/schedules.py`` runs more of them."""

from __future__ import annotations

from collections import Counter

import pytest
from schedules import Schedule, play, switching_often


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 300), marks=pytest.mark.slow)], ids=str)
def test_random_schedules_end_as_they_must(seeds):
    with switching_often():
        ended = Counter(play(seed) for seed in seeds)
    assert ended.total() == len(seeds)
    # All kinds of ends are among them, so that none is left out unseen.
    assert set(ended) == {
        "no error",
        "Planned",
        "RuntimeError",
        "ValueError",
        "ReplicaSyncError: left",
        "ReplicaSyncError: diverged",
    }


def test_schedules_of_a_seed_are_the_same_every_time():
    assert [Schedule.make(seed) for seed in range(50)] == [Schedule.make(seed) for seed in range(50)]
