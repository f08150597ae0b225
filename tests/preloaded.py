"""What the process imports that runs of mutants are forked from: torch and the like, but nothing of this repository.

`mutants.py` names this file to `multiprocessing`, and nothing else imports it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

for name in ("pytest", "torch", "torch._dynamo", "torch.distributed"):
    importlib.import_module(name)
sys.path.insert(0, str(ROOT / "docs" / "examples"))
common = importlib.import_module("common")  # stays alive, with the operators that it may declare
common.import_torchvision()
del sys.path[0]
for name in list(sys.modules):
    if name.partition(".")[0] in ("common", "sync_batchnorm"):
        del sys.modules[name]
