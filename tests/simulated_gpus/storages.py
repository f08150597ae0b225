"""Storages of simulated GPUs: deepcopy, pickle and `torch.save` go through these, and the CPU build leaves them out."""

from __future__ import annotations

from typing import Any

import torch

from simulated_gpus.devices import index_of

__all__ = ["install"]


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def install() -> None:
    """Replace the methods of `torch.UntypedStorage` that copy, for storages of a simulated GPU only."""
    kind: Any = torch.UntypedStorage
    clone_on_host, to_on_host = kind.clone, kind.to

    def clone(self: Any) -> Any:
        return _as_bytes(self).clone().untyped_storage() if self.device.type == "cuda" else clone_on_host(self)

    def cpu(self: Any) -> Any:
        return _as_bytes(self).cpu().untyped_storage() if self.device.type == "cuda" else self

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        target = torch.device("cuda", index_of(device))
        return (
            self if self.device == target else _as_bytes(self).to(target, non_blocking=non_blocking).untyped_storage()
        )

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if device.type == "cuda":
            return cuda(self, device, non_blocking)
        return cpu(self) if device.type == "cpu" else to_on_host(self, device=device, non_blocking=non_blocking)

    kind.clone, kind.cpu, kind.cuda, kind.to = clone, cpu, cuda, to
