"""Whether copies between devices arrive is asked where there are two, and not on a machine without them."""

import copy
from collections.abc import Iterator

import pytest
import torch
from conftest import CUDA_COUNT, needs_two_gpus
from helpers import assert_same_step, doubles
from scripted import TorchStyle
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model, patch_replication_callback
from sync_batchnorm.wrapper.devices import as_device, check_transfers


@pytest.fixture(autouse=True)
def _not_checked_yet() -> Iterator[None]:
    check_transfers.cache_clear()
    yield
    check_transfers.cache_clear()


@pytest.mark.parametrize("ids", [[0], [0, 0], ["cuda:1"], ["cpu"], ["cpu", "cpu"], ["meta", "meta"]], ids=str)
def test_replicas_on_one_device_ask_nothing(ids, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", None)
    monkeypatch.setattr(torch.Tensor, "to", None)
    check_transfers(frozenset(map(as_device, ids)))


def losing_copies(source, target):
    """Return a `Tensor.to` whose copies from one device to another leave zeros."""
    right = torch.Tensor.to

    def to(self, *args, **kwargs):
        copied = right(self, *args, **kwargs)
        return copied.zero_() if (self.device.index, copied.device.index) == (source, target) else copied

    return to


@needs_two_gpus
@pytest.mark.parametrize("pair", [(0, 1), (1, 0)], ids=str)
def test_copies_that_lose_data_are_refused_before_the_first_forward(pair, monkeypatch):
    parallel = DataParallelWithCallback(convert_model(nn.BatchNorm1d(3)).cuda(), [0, 1])
    before = copy.deepcopy(parallel.state_dict())
    with monkeypatch.context() as faulty:
        faulty.setattr(torch.Tensor, "to", losing_copies(*pair))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"a copy from cuda:{pair[0]} to cuda:{pair[1]} does not arrive"):
                parallel(torch.randn(4, 3, device="cuda"))
    for name, value in parallel.state_dict().items():
        assert torch.equal(value, before[name])
    parallel(torch.randn(4, 3, device="cuda"))


@pytest.mark.skipif(CUDA_COUNT > 0, reason="for machines without a GPU")
@pytest.mark.parametrize("ids", [[0, 0], [0, 1]], ids=str)
def test_patched_wrapper_of_gpus_runs_in_a_test_without_any_if_it_replaces_the_steps_on_devices(ids):
    class OnCpu(TorchStyle):
        """As somebody's test replaces what needs a GPU."""

        forward = nn.DataParallel.forward

        def scatter(self, inputs, kwargs, device_ids):
            chunks = [(chunk,) for chunk in inputs[0].chunk(len(device_ids))]
            return chunks, [kwargs] * len(chunks)

        def replicate(self, module, device_ids):
            return super().replicate(module, ["cpu"] * len(device_ids))

        def gather(self, outputs, output_device):
            return torch.cat(outputs)

    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    parallel = OnCpu(convert_model(copy.deepcopy(plain)), 2)
    parallel.device_ids = ids
    patch_replication_callback(parallel)
    assert_same_step(plain, parallel, doubles(5, 3))
