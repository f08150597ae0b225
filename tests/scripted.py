"""A model whose replicas do what a test tells them, and every kind of wrapper that can run them on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import assert_equal, in_threads
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, patch_replication_callback
from sync_batchnorm.wrapper.data_parallel import as_device
from sync_batchnorm.wrapper.replicate import make_replicas
from sync_batchnorm.wrapper.scatter_gather import gather_trees

R = 3  # replicas of most tests; every replica gets two rows


class Scripted(nn.Module):
    """Two layers, and one place before, between and after them where a replica may be made to do something else.

    The second input says in which replica a row will be, so that a step knows where it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(SynchronizedBatchNorm1d(4))
        self.head = SynchronizedBatchNorm1d(4)
        self.steps: dict[tuple[int, str], Callable[[Scripted, Tensor], Any]] = {}

    def at(self, replica: int, place: str, x: Tensor) -> Any:
        step = self.steps.get((replica, place))
        return None if step is None else step(self, x)

    def forward(self, x: Tensor, replica: Tensor) -> Tensor:
        number = int(replica[0])
        if (early := self.at(number, "before", x)) is not None:
            return early
        y = self.stem(x)
        if (early := self.at(number, "between", y)) is not None:
            return early
        y = self.head(y * 2)
        self.at(number, "after", y)
        return y


class TorchStyle(nn.DataParallel):
    """A subclass with four steps of its own, as far as the CPU needs them; its threads are like those of torch."""

    def __init__(self, module: nn.Module, number: int) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.dim = 0
        self.device_ids = ["cpu"] * number
        self.output_device = self.src_device_obj = torch.device("cpu")

    def forward(self, *inputs: Any) -> Any:
        parts = list(zip(*[input.chunk(len(self.device_ids)) for input in inputs], strict=True))
        replicas = self.replicate(self.module, self.device_ids[: len(parts)])
        return gather_trees(self.call(replicas, parts), torch.device("cpu"), 0)

    def call(self, replicas: Sequence[nn.Module], parts: Any) -> list[Any]:
        return self.parallel_apply(replicas, parts, [{} for _ in parts])

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        return make_replicas(module, [as_device(device) for device in device_ids], not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        """Keep only an `Exception` for the caller, as torch does; the rest ends its thread."""
        calls = zip(replicas, inputs, kwargs, strict=True)
        return in_threads(*[functools.partial(replica, *args, **own) for replica, args, own in calls])


class OwnForward(TorchStyle):
    """Never calls the `parallel_apply` method: replicas run in threads that its `forward` starts."""

    def call(self, replicas: Sequence[nn.Module], parts: Any) -> list[Any]:
        return TorchStyle.parallel_apply(self, replicas, parts, [{} for _ in parts])


class OneThread(TorchStyle):
    """Runs its replicas one after another in one thread, where they can never meet."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        return [replica(*args, **kw) for replica, args, kw in zip(replicas, inputs, kwargs, strict=True)]


def of_class(cls: type[nn.DataParallel[Any]], module: nn.Module, devices: Sequence[Any]) -> Any:
    """Return an object of a class of `DataParallel` on any devices, also on those that torch refuses."""
    parallel = DataParallelWithCallback(module, devices)
    object.__setattr__(parallel, "__class__", cls)
    return parallel


WRAPPERS: dict[str, Callable[..., nn.DataParallel]] = {
    "wrapper": lambda module, **options: DataParallelWithCallback(module, ["cpu"] * R, **options),
    "patched": lambda module, **options: patch_replication_callback(
        of_class(nn.DataParallel, module, ["cpu"] * R), **options
    ),
    "own-parallel_apply": lambda module, **options: patch_replication_callback(TorchStyle(module, R), **options),
    "own-forward": lambda module, **options: patch_replication_callback(OwnForward(module, R), **options),
}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2 * R, 4, dtype=torch.float64), torch.arange(R).repeat_interleave(2)


def scripted(*steps: tuple[int, str, Callable[[Scripted, Tensor], Any]]) -> Scripted:
    model = Scripted().double()
    model.steps = {(replica, place): step for replica, place, step in steps}
    return model


def raising(error: BaseException) -> Callable[[Scripted, Tensor], Any]:
    """Return a step that raises a copy of `error`: one that is raised again keeps all frames it ever went through."""

    def step(model: Scripted, x: Tensor) -> None:
        raise copy.copy(error)

    return step


def assert_next_forward_is_right(parallel: nn.DataParallel, calls: Sequence[int]) -> None:
    """The running statistics hold `calls` completed calls of stem and head, and a good step equals one device."""
    model = parallel.module
    assert [int(model.stem[0].num_batches_tracked), int(model.head.num_batches_tracked)] == list(calls)
    model.steps = {}
    plain = copy.deepcopy(model)
    inputs = batch()
    expected, actual = plain(*inputs), parallel(*inputs)
    assert_equal(actual, expected, "output")
    for name, value in plain.state_dict().items():
        assert_equal(model.state_dict()[name], value, name)
