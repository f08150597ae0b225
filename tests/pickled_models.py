"""The whole models in `tests/conversion/pickles/`, and the program that pickled them: run it once with a version.

    PYTHONPATH=CHECKOUT python tests/pickled_models.py 2.1

CHECKOUT is that version of this repository: 2.0 is commit cf3bc6f, 2.1 is 8761d57. Only public names of the package are
used here, and none from the files of other tests, so that later versions of this file still run with old ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import sync_batchnorm
from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SyncMaster,
    convert_model,
    merge_messages,
    patch_replication_callback,
    sync_moments,
)

FOLDER = Path(__file__).parent / "conversion" / "pickles"
Models = Callable[[], nn.Module]


class Tagged(nn.BatchNorm1d):
    """A class of a user, from which the synchronized one is derived at run time."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.tag = "a tag"


class OfNoDimension(_BatchNorm):
    """Another one, which is none of torch's three."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class NormTanh(nn.BatchNorm1d):
    """A class of a user with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


class SynchronizedNormTanh(NormTanh, SynchronizedBatchNorm1d):
    """What `classes=` replaces it with."""


class KeepsMaster(nn.Module):
    """A norm of a user that keeps its `SyncMaster` across forward passes."""

    pipe: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.master = SyncMaster(merge_messages)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.master = self.master
        self.pipe = ctx.master if copy_id == 0 else ctx.master.register_slave(copy_id)

    def forward(self, input: Tensor) -> Tensor:
        mean, var, _ = sync_moments(input, self.pipe)
        return (input - mean) / (var + 1e-5).sqrt()


def replica_of(module: nn.Module) -> nn.Module:
    replica = module._replicate_for_data_parallel()
    replica._parameters.update(module._parameters)
    replica._modules.update({name: replica_of(child) for name, child in module._modules.items()})
    return replica


class OnTheCpu(nn.DataParallel):
    """A wrapper of a user, who has written what torch does on GPUs only."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.dim, self.device_ids = module, 0, ["cpu", "cpu"]
        self.output_device = self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return [(chunk,) for chunk in inputs[0].chunk(2)], [{}, {}]

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        return [replica_of(module) for _ in device_ids]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(lambda replica, args: replica(*args), replicas, inputs))

    def gather(self, outputs: Any, output_device: Any) -> Tensor:
        return torch.cat(list(outputs))


def small(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2))


def of_users() -> nn.Sequential:
    return small(nn.Sequential(Tagged(4), nn.SiLU(), OfNoDimension(4)))


def of_every_kind() -> nn.Sequential:
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.SiLU(), nn.Unflatten(1, (4, 1, 1)), nn.BatchNorm2d(4), nn.SiLU()]
    layers += [nn.Unflatten(2, (1, 1)), nn.BatchNorm3d(4), nn.SiLU(), nn.Flatten(), nn.BatchNorm1d(4, eps=1e-13)]
    return nn.Sequential(*layers)


def with_options() -> nn.Sequential:
    # With that eps, "clamp" and "plus" differ by less than a test tolerates.
    model = convert_model(of_every_kind())
    model[-1] = SynchronizedBatchNorm(4, eps=1e-13, eps_mode="clamp", group_size=2)
    return model


def of_timm() -> nn.Module:
    from timm.layers import BatchNormAct2d

    return nn.Sequential(nn.Unflatten(1, (3, 1, 1)), BatchNormAct2d(3, act_layer=nn.SiLU), nn.Flatten())


class Case(NamedTuple):
    plain: Models  # on one device
    ours: Models  # what is pickled, with the same state dict
    versions: tuple[str, ...] = ("2.0", "2.1")


ALONE = ("2.1",)  # Those of 2.0 name `glue.py` or `timm.py`, and 2.1 does not load them: its changelog says so.
CASES = {
    "layers": Case(of_every_kind, with_options),
    "wrapper": Case(
        lambda: small(nn.BatchNorm1d(4)),
        lambda: DataParallelWithCallback(small(SynchronizedBatchNorm1d(4)), ["cpu"] * 2, timeout=5.0),
    ),
    "patched": Case(
        lambda: small(nn.BatchNorm1d(4)),
        lambda: patch_replication_callback(OnTheCpu(small(SynchronizedBatchNorm1d(4))), timeout=5.0),
        ALONE,
    ),
    "derived": Case(of_users, lambda: convert_model(of_users()), ALONE),
    "classes": Case(
        lambda: small(NormTanh(4)),
        lambda: convert_model(small(NormTanh(4)), classes={NormTanh: SynchronizedNormTanh}),
    ),
    "master": Case(
        lambda: small(nn.BatchNorm1d(4, affine=False, track_running_stats=False)), lambda: small(KeepsMaster())
    ),
    "groups": Case(  # A group itself cannot be pickled.
        lambda: small(nn.BatchNorm1d(4)),
        lambda: convert_model(small(nn.SyncBatchNorm(4, process_group="former")), process_group="given"),
    ),
    "timm": Case(of_timm, lambda: convert_model(of_timm()), ALONE),
}


def make(version: str) -> None:
    """Train each model for a step in two replicas, and pickle it."""
    if not sync_batchnorm.__version__.startswith(version):
        raise SystemExit(f"expected sync_batchnorm {version}, but got {sync_batchnorm.__version__}; set PYTHONPATH")
    for name, case in CASES.items():
        if version in case.versions:
            torch.manual_seed(0)
            model = case.ours().double()
            parallel = model if isinstance(model, nn.DataParallel) else DataParallelWithCallback(model, ["cpu"] * 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            parallel(torch.randn(6, 3, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model, FOLDER / f"{name}-{version}.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
    import pickled_models  # so that pickles do not name `__main__`
    from common import import_torchvision

    import_torchvision()  # which timm imports
    pickled_models.make(sys.argv[1])
