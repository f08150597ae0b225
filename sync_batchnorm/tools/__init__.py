"""What users call beside training: statistics over all replicas, for norms of their own."""

from .moments import merge_messages, sync_moments

__all__ = ["merge_messages", "sync_moments"]
