"""Import the public names of `layers/`, for older code and older pickles that import these names from this file."""

from .layers.assert_synchronized import *  # noqa: F403
from .layers.conversion import *  # noqa: F403
from .layers.layer import *  # noqa: F403
from .layers.moments import *  # noqa: F403
