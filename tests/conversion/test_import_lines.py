"""The import lines of public repositories run without their folder, or `docs/migrating.md` names a replacement."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from repository import ROOT
from torch import nn

import sync_batchnorm

TEXT = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
# Found on 2026-11-21 in an index of public GitHub files. These work here, without the folder in front of the name.
WORKING = [
    "from sync_batchnorm import DataParallelWithCallback",
    "from sync_batchnorm import SynchronizedBatchNorm2d as BatchNorm2d",
    "from sync_batchnorm import patch_sync_batchnorm, convert_model as convert_sync_batchnorm",
    "from sync_batchnorm import *",
    "import sync_batchnorm",
    "import sync_batchnorm as syncBN",
    "from . import sync_batchnorm as sync_bn",
    "from models.networks import sync_batchnorm  # noqa",
    "from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d",
    "from .sync_batchnorm import DataParallelWithCallback",
    "from models.networks.sync_batchnorm import DataParallelWithCallback",
    "from modeling.sync_batchnorm.batchnorm import patch_sync_batchnorm, convert_model",
    "from metrics.methods.opusDSD.cryodrgn.sync_batchnorm.batchnorm import set_sbn_eps_mode",
    "from net.sync_batchnorm.batchnorm import *",
    "from modeling.sync_batchnorm.replicate import DataParallelWithCallback, patch_replication_callback",
    "from networks.sync_batchnorm.replicate import DataParallelWithCallback, DataParallel",
    "from model.sync_batchnorm.replicate import *",
]
# These do not; the page says what to write instead.
ELSEWHERE = [
    "from sync_batchnorm.unittest import TorchTestCase",
    "from sync_batchnorm.batchnorm_reimpl import BatchNorm2dReimpl",
    "from sync_batchnorm import _SynchronizedBatchNorm as BatchNorm",
    "from models.modules.sync_batchnorm.batchnorm import _ChildMessage, _sum_ft, _unsqueeze_ft",
]

# What the modules of the older library have in their `__all__`, and its package by its imports.
LAYERS = ("SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d")
NAMES = {
    "sync_batchnorm.batchnorm": (*LAYERS, "set_sbn_eps_mode", "patch_sync_batchnorm", "convert_model"),
    "sync_batchnorm.replicate": (
        "CallbackContext",
        "execute_replication_callbacks",
        "DataParallelWithCallback",
        "patch_replication_callback",
    ),
    "sync_batchnorm.comm": ("SlavePipe", "SyncMaster"),
}
NAMES["sync_batchnorm"] = (*NAMES["sync_batchnorm.batchnorm"], "DataParallelWithCallback", "patch_replication_callback")


@pytest.mark.parametrize("line", WORKING)
def test_line_works_without_the_folder_in_front(line):
    strip = r"^(from|import) [\w.]*\.sync_batchnorm\b", r"\1 sync_batchnorm"
    edited = re.sub(*strip, re.sub(r"^from [\w.]+ (import sync_batchnorm\b)", r"\1", line))
    assert re.match(r"(from|import) sync_batchnorm", edited)
    namespace: dict[str, Any] = {}
    exec(edited, namespace)
    assert namespace.get("DataParallel", nn.DataParallel) is nn.DataParallel


@pytest.mark.parametrize("module", NAMES)
def test_modules_give_all_that_those_of_the_older_library_list(module):
    namespace: dict[str, Any] = {}
    exec(f"from {module} import *", namespace)
    for name in NAMES[module]:
        assert namespace[name] is getattr(sync_batchnorm, name)


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_is_not_here_is_named_with_what_to_write_instead(line):
    names = [alias.name for alias in ast.parse(line).body[0].names]
    old = re.findall(r"^\| (.+?) \| .+ \|$", TEXT.split("### What to write instead")[1].split("###")[0], re.M)
    assert all(any(f"`{name}" in cell for cell in old) for name in names)
    module = re.sub(r"^from .*?(sync_batchnorm\S*) .+$", r"\1", line)
    with pytest.raises(ImportError):
        exec(f"from {module} import {', '.join(names)}", {})
