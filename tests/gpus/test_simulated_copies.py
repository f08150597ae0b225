"""Copies from, to and between simulated GPUs: each layout arrives with the values and strides that the CPU gives it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.cuda, pytest.mark.simulated]
LAST = f"cuda:{torch.cuda.device_count() - 1}"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of a contiguous tensor of sizes 4 and 6
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "one column": lambda x: x[:, 5:],
    "one element": lambda x: x[3:, 5:],
    "columns at an offset": lambda x: x[:, 2:5],
    "every second column": lambda x: x[:, 1::2],
    "no rows": lambda x: x[4:],
    "no columns of a transposed": lambda x: x.t()[:, 4:],
    "expanded": lambda x: x[:, :1].expand(4, 5),
    "expanded by a dimension": lambda x: x.expand(2, 4, 6),
    "overlapping": lambda x: x.as_strided((3, 4), (1, 2), 1),
    "odd stride of one row": lambda x: x.as_strided((1, 4), (17, 2), 3),
    "channels last": lambda x: x.reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "one channel": lambda x: x.reshape(4, 1, 2, 3).to(memory_format=torch.channels_last),
    "conjugate": lambda x: x.conj(),
    "one row of a conjugate": lambda x: x.conj().t()[5:],
    "negative imaginary part": lambda x: x.conj().imag if x.is_complex() else x,
}


def contents(tensor: Tensor) -> list[int]:
    """Return the bytes of all elements, in order."""
    plain = tensor.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_copy_of_any_layout_is_that_of_the_cpu(layout, dtype):
    base = torch.arange(1, 25).reshape(4, 6).to(dtype)
    if dtype.is_complex:
        base = base * (1 + 2j)
    expected, here = layout(base), layout(base.to("cuda:0"))
    like_expected = expected.clone()  # with the strides that a copy on the CPU gets
    wider = torch.complex128 if expected.is_complex() else torch.float64
    copies = {"to the device": expected.to("cuda:0"), "to the host": here.cpu()}
    copies |= {"to another device": here.to(LAST, copy=True), "on the device": here.clone()}
    for name, copied in copies.items():
        assert contents(copied) == contents(expected), name
        assert copied.stride() == like_expected.stride(), name
    for name, source in {"host": expected, "device": here, "last device": layout(base.to(LAST))}.items():
        for device in ("cpu", "cuda:0", LAST):
            assert contents(source.to(device, wider)) == contents(expected.to(wider)), f"{name} to wider on {device}"
            larger = torch.zeros(*expected.shape[::-1], 3, dtype=expected.dtype, device=device)
            part = torch.permute(larger[..., 1], list(range(expected.dim()))[::-1])
            assert contents(part.copy_(source)) == contents(expected), f"from {name} into a part on {device}"
            into_conjugate = contents(part.conj().copy_(source))
            assert into_conjugate == contents(expected), f"from {name} into a conjugate on {device}"
