"""The modules and inputs with which torch tests its own modules, in replicas."""

import copy
import warnings

import pytest
import torch
from helpers import assert_equal, skip_module_without
from torch import Tensor

from sync_batchnorm import DataParallelWithCallback

skip_module_without("expecttest")  # which torch's own tests need

pytestmark = pytest.mark.slow  # torch's list takes seconds to import


def inputs_of(info, training):
    """Return what torch constructs and calls the modules of `info` with, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
        return list(info.module_inputs_func(info, **options))


def infos():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db

        return [info for info in module_db if torch.float64 in info.dtypes]


def rows_of(tree):
    return {tensor.shape[0] if tensor.dim() else 0 for tensor in tree}


def works_row_by_row(module, tensors):
    """Return whether the output for a batch is that of its two halves, one after the other."""
    rows = rows_of(tensors)
    if len(rows) > 1 or min(rows, default=0) < 2:
        return False
    halves = zip(*[tensor.chunk(2) for tensor in tensors], strict=True)
    try:
        whole, parts = module(*tensors), [module(*half) for half in halves]
    except (RuntimeError, ValueError, IndexError):
        return False
    if not isinstance(whole, Tensor) or not all(part.dim() for part in parts):
        return False
    together = torch.cat(parts)
    return together.shape == whole.shape and torch.allclose(together, whole, atol=1e-12)


@pytest.mark.watchdog(60)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of losses, which take scalars
def test_every_module_of_torch_that_works_row_by_row_does_so_in_replicas():
    names = set()
    for info in infos():
        for module_input in inputs_of(info, False):
            arguments, call = module_input.constructor_input, module_input.forward_input
            tensors = list(call.args)
            if call.kwargs or not all(isinstance(tensor, Tensor) for tensor in tensors):
                continue
            plain = info.module_cls(*arguments.args, **arguments.kwargs).double().eval()
            if not works_row_by_row(plain, tensors):
                continue
            names.add(info.name)
            results = []
            for module in (plain, DataParallelWithCallback(copy.deepcopy(plain), ["cpu"] * 2)):
                leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
                output = module(*leaves)
                if output.requires_grad:
                    torch.manual_seed(0)
                    output.backward(torch.randn_like(output))
                results.append([output, *(t.grad for t in (*leaves, *module.parameters()) if t.grad is not None)])
            for expected, actual in zip(*results, strict=True):
                assert_equal(actual, expected, info.name)
    assert len(names) > 90, len(names)
