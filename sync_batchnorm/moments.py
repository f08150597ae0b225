"""The names that pickles of norms of the user's own look up here."""

from .tools import merge_messages, sync_moments

__all__ = ["merge_messages", "sync_moments"]
