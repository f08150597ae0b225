"""List the calls of one forward of a layer in the master's thread, and count those from one file into another.

Two replicas on the CPU, each of which computes the statistics of its own input, as with inputs that are not small. The
master arrives first. Counted are the calls of functions of the library that `sys.setprofile` sees between the call of
the layer and its return, with the constructors of its named tuples; not those of functions of torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (2, 8, 2, 2)  # the shape of the input of each replica
GENERATED = "<string>"  # the file of the constructor of a named tuple


class Called(NamedTuple):
    """A function that was called, and the file of its caller."""

    caller: str
    file: str
    function: str

    @property
    def enters(self) -> bool:
        """Whether this goes from one file of the library into another."""
        return self.file != self.caller and self.file != GENERATED and bool(self.caller)


class Watched(nn.Module):
    """A layer, whose calls are listed in the thread of copy 0."""

    def __init__(self, layer: nn.Module, package: Path) -> None:
        super().__init__()
        self.layer, self.package, self.calls = layer, package, list[Called]()
        self.is_master = False

    def __data_parallel_replicate__(self, _: Any, copy_id: int) -> None:
        self.is_master = copy_id == 0

    def forward(self, input: Tensor) -> Tensor:
        """Run the layer; in other copies than 0, once the master waits."""
        if not self.is_master:
            time.sleep(0.2)
            return self._run(input)
        self.calls.clear()
        sys.setprofile(self.record)
        try:
            return self._run(input)
        finally:
            sys.setprofile(None)

    def _run(self, input: Tensor) -> Tensor:
        output: Tensor = self.layer(input)
        return output

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Add a call to the list, which all copies share."""
        if event == "call" and frame.f_back is not None:
            file, caller = self.name_of(frame), self.name_of(frame.f_back)
            if (file or caller) and (file or frame.f_code.co_filename == GENERATED):
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # the former since Python 3.11
                self.calls.append(Called(caller, file or GENERATED, name))

    def name_of(self, frame: FrameType) -> str:
        """Return the name of the file of a function of the library, else an empty text."""
        path = Path(frame.f_code.co_filename)
        return path.name if self.package in path.parents else ""


def calls_of_master(library: Path) -> list[Called]:
    """Return the calls of a forward with the library that lies in a folder."""
    sys.path.insert(0, str(library))
    package = importlib.import_module("sync_batchnorm")
    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "sync_batchnorm"]
    thresholds = [module for module in own if hasattr(module, "JOINED")]  # it is not always the same file that has it
    if not thresholds:
        raise SystemExit("expected a file of the library with JOINED, the size up to which inputs are small")
    for module in thresholds:
        module.JOINED = 0  # type: ignore[attr-defined]
    assert package.__file__ is not None
    watched = Watched(nn.BatchNorm2d(SHAPE[1]), Path(package.__file__).parent)
    parallel = package.DataParallelWithCallback(package.convert_model(watched), ["cpu", "cpu"])
    for _ in range(2):  # what is made once is made in the first forward
        parallel(torch.randn(2 * SHAPE[0], *SHAPE[1:]).requires_grad_())
    return watched.calls


def main() -> None:
    """Print the list and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, default=ROOT, help="folder of the library, instead of this one")
    options = parser.parse_args()
    calls = calls_of_master(options.library.resolve())
    for call in calls:
        print(f"{call.caller if call.enters else '':20} {'->' if call.enters else '  '} {call.file:20} {call.function}")
    entered = sum(call.enters for call in calls)
    print(f"\n{entered} calls from one file into another, {len(calls)} calls in all")


if __name__ == "__main__":
    main()
