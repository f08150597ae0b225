"""What users call beside training: a comparison of replicas with one device, and statistics for norms of their own."""

from .moments import merge_messages, sync_moments
from .one_device import assert_matches_one_device

__all__ = ["assert_matches_one_device", "merge_messages", "sync_moments"]
