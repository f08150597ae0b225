"""What the thread of a replica takes over from the thread that calls the wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

__all__: list[str] = []


class CallerState:
    """Grad mode, inference mode, and autocast with its dtype, as they are in the thread that makes this object.

    All of it is local to a thread. Torch's own `parallel_apply` carries the grad mode, and whether autocast is on.
    """

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        accelerator = torch.accelerator.current_accelerator()
        device_types = ["cpu", accelerator.type] if accelerator is not None else ["cpu"]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in device_types if torch.is_autocast_enabled(kind)
        ]

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which another thread has them too."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode() if self._inference else torch.set_grad_enabled(self._grad))
        for device_type, dtype in self._autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self._cache))
        return stack
