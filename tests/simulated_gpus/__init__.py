"""Simulated GPUs: every CUDA path runs, and its order is checked, on a machine without a GPU (see README.md).

Nothing here imports torch before `simulate` does: torch asks once, when it is imported, whether there is CUDA.
"""

from __future__ import annotations

from simulated_gpus.install import NotPossible, is_simulated, simulate
from simulated_gpus.reports import Entry, Recording, clear, recording, reports, settle

__all__ = ["Entry", "NotPossible", "Recording", "clear", "is_simulated", "recording", "reports", "settle", "simulate"]
