"""Names for older code, and for pickles of the older library that import them from this file."""

from .layers.assertion import *  # noqa: F403
from .layers.conversion import *  # noqa: F403
from .layers.layer import *  # noqa: F403
from .layers.moments import *  # noqa: F403
