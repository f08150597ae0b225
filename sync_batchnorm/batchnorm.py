"""The names that older code imports from here, and that pickles of the older library look up here."""

from .layers import *  # noqa: F403
