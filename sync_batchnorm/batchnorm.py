"""The names that older code imports from here, and that pickles of the older library look up here."""

from .layers.assertion import *  # noqa: F403
from .layers.conversion import *  # noqa: F403
from .layers.layer import *  # noqa: F403
from .layers.moments import *  # noqa: F403
