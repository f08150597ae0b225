"""The check on one device: whether replicas of a model compute what it computes alone, and what differs.

What the caller of a training sees decides. Why it differs is found out by experiments, or not said.
"""

from .one_device import assert_matches_one_device

__all__ = ["assert_matches_one_device"]
