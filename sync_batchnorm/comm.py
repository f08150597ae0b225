"""The names that older code imports from here, and that pickles of a `SyncMaster` look up here."""

from .meeting import *  # noqa: F403
