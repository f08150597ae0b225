"""The errors of replicas that cannot exchange."""

from __future__ import annotations

import pickle

import pytest

from sync_batchnorm import ReplicaSyncError
from sync_batchnorm.errors import ReplicaTimeoutError


@pytest.mark.parametrize("kind", [ReplicaSyncError, ReplicaTimeoutError])
def test_errors_pickle(kind):
    error = pickle.loads(pickle.dumps(kind("text")))
    assert type(error) is kind
    assert str(error) == "text"


def test_timeout_is_a_timeout_error():
    assert issubclass(ReplicaTimeoutError, TimeoutError)
    assert issubclass(ReplicaTimeoutError, ReplicaSyncError)
