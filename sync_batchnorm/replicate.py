"""Import the public names of `wrapper/`, for older code and for models pickled by versions 2.0 and 2.1.

Both import these names from this file.
"""

from torch.nn.parallel import DataParallel as DataParallel

from .derived import derive_again as _derived  # noqa: F401 - for pickles
from .wrapper.callbacks import *  # noqa: F403
from .wrapper.data_parallel import *  # noqa: F403
from .wrapper.data_parallel import _ReplicationMixin as _ReplicationMixin
