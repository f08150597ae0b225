"""What the process imports that runs of mutants are forked from: torch and the like, but nothing of this repository.

`mutants.py` names this file to `multiprocessing`, and nothing else imports it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest  # noqa: F401  (imported for the processes that are forked)

ROOT = Path(__file__).parents[1]

sys.path.insert(0, str(ROOT / "docs" / "examples"))
common = importlib.import_module("common")  # stays alive, with the operators that it may declare
common.import_torchvision()
del sys.path[0]
for name, module in list(sys.modules.items()):
    if name != __name__ and ROOT in Path(getattr(module, "__file__", None) or "/").parents:
        del sys.modules[name]
