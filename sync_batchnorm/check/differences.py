"""What differs for the caller between a pass on one device and the same one in replicas."""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from .comparing import LEAST, agree, gap, largest, much, tolerance_of
from .passes import Key, Pass

__all__: list[str] = []

# How many times what rounding moves is still rounding, since it differs from run to run. Parameters that move by 1e-12
# move what is no rounding by some 1e-12 as well: a hundred times that is far below the tolerance.
_MARGIN = 100

_ROWS = "return a row for each sample, and compute what concerns the whole batch from the gathered output"
_TEXTS = {
    "output": "outputs differ, {much}",
    "loss": "outputs agree, the loss does not: {numbers}: `loss` depends on more than the output",
    "gradient": (
        "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of "
        "{name}: {norms}{agreed}; look for detach, no_grad, hooks on tensors and a torch.autograd.Function"
    ),
    "parameter": (
        "outputs, loss and gradients agree; the parameter {name} differs after the forward pass, {much}: forward() "
        "changes it, in each replica once; make it a buffer, which only replica 0 writes, or change it outside the "
        "forward pass"
    ),
    "buffer": (
        "outputs, loss and gradients agree; the buffer {name} differs after the forward pass, {much}: only what "
        "replica 0 writes into it in place stays, and that is from its own chunk; update it outside the forward pass"
    ),
}
_TEXTS["gradient of input"] = _TEXTS["gradient"].replace("{name}", "input {name}")
_REMEDIES = {
    "sum": "add them up",
    "mean": "take their mean",
    "mean weighted by rows": "weight them by their rows, or return sums and counts",
}


class Difference(NamedTuple):
    """What differs for the caller after a pass."""

    kind: str
    name: object
    text: str


def moved(before: Pass, after: Pass) -> dict[Key, float]:
    """Return how far the tensors of a pass have moved in another one, times the margin."""
    pairs = {key: _pair(after.tensors.get(key), tensor) for key, tensor in before.tensors.items()}
    return {key: _MARGIN * largest(a.double() - b.double()) for key, (a, b) in pairs.items() if a.shape == b.shape}


def differences(one: Pass, many: Pass, rounding: Mapping[Key, float] = MappingProxyType({})) -> Iterator[Difference]:
    """Yield what differs for the caller by more than `rounding`, in the order of the pass."""
    yield from _different_structures(one, many)
    of_gradients = largest(*one.of("gradient").values())
    sizes, agreed = {"loss": largest(*one.of("output").values()), "gradient": of_gradients}, ""
    for (kind, name), tensor in one.tensors.items():
        if kind == "output" and tensor is not None and tensor.numel() == 1:  # one from each replica
            continue
        actual, expected = _pair(many.tensors.get((kind, name)), tensor)
        size = max(LEAST, tolerance_of(expected) * sizes.get(kind, 0.0))
        if by := gap(actual, expected, size, rounding.get((kind, name), 0.0)):
            numbers = f"{expected.sum():.6g} on one device, {actual.sum():.6g} in replicas"
            norms = _norms(actual, expected) if kind.startswith("gradient") else ""
            text = _TEXTS[kind].format(name=name, much=much(by), norms=norms, agreed=agreed, numbers=numbers)
            if kind == "parameter" and (kind, name) not in many.tensors:
                text = f"after the forward pass, the parameter {name} is there on one device only; make it in __init__"
            yield Difference(kind, name, text)
        elif kind == "gradient" and expected.any():
            agreed = f", while that of {name}, before it in the backward pass, agrees"


def _different_structures(one: Pass, many: Pass) -> Iterator[Difference]:
    shapes, found = ([tuple(tensor.shape) for tensor in taken.of("output").values()] for taken in (one, many))
    pairs = zip(shapes, found, strict=False)
    if len(shapes) != len(found) or any(a != b and math.prod(a) != 1 for a, b in pairs):
        text = f"outputs have shapes {shapes} on one device, {found} in replicas; {_ROWS}"
        yield Difference("shapes", "", text)
    for value, other in zip(one.values, many.values, strict=False):
        if len(one.values) == len(many.values) and not agree(other, value):
            text = f"among the outputs, {value!r} on one device is {other!r} in replicas: numbers, flags and strings"
            yield Difference("value", "", f"{text} are those of replica 0; {_ROWS}")


def _pair(actual: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two tensors, zeros for one that is None, or is there on one side only."""
    like = next((tensor for tensor in (actual, expected) if tensor is not None), torch.zeros(()))
    found, wanted = (torch.zeros_like(like) if tensor is None else tensor for tensor in (actual, expected))
    return found.to_dense(), wanted.to_dense()


def _norms(actual: Tensor, expected: Tensor) -> str:
    size, whole = float(actual.norm()), float(expected.norm())
    if not whole:
        return "only replicas have one"
    ratio = f"its norm in replicas is {size / whole:.3} times that on one device"
    return ratio if size else "it is missing, or zero, in replicas, as after detach or no_grad"


def scalars(one: Pass, many: Pass) -> list[tuple[Tensor, Tensor]]:
    """Return what replicas return where that is a number from each, and what one device returns."""
    return [
        (torch.stack([part[i].double().real.reshape(()) for part in many.returned]), tensor.double().real.reshape(()))
        for i, tensor in one.of("output").items()
        if tensor.numel() == 1 and all(i < len(part) and part[i].numel() == 1 for part in many.returned)
    ]


def evidence(of_replicas: Tensor, on_one: Tensor, sizes: list[int]) -> str:
    """Return how numbers that replicas return are related to that of one device; `sizes`: their numbers of rows."""
    ways = {"sum": of_replicas.sum(), "mean": of_replicas.mean()}
    if len(set(sizes)) > 1 and len(sizes) == len(of_replicas):
        ways["mean weighted by rows"] = torch.tensor(sizes, dtype=torch.float64) / sum(sizes) @ of_replicas
    equal = [way for way, value in ways.items() if on_one.isfinite() and not gap(value, on_one)]
    numbers = of_replicas.tolist()
    text = f"replicas with {sizes} rows return {', '.join([f'{value:.6g}' for value in numbers])}, one device returns "
    text += f"{float(on_one):.6g}"
    broken = [f"replica {i} returns {value}" for i, value in enumerate(numbers) if not math.isfinite(value)]
    if broken and on_one.isfinite():
        text += f"; {broken[0]}"
    elif on_one.isfinite():
        text += f"; {', '.join([f'their {way} is {float(value):.6g}' for way, value in ways.items()])}: "
        text += f"{f'the {equal[0]}' if equal else 'none of these'} is that of one device"
    what_to_do = _REMEDIES[equal[0]] if equal else "return sums and counts from the replicas, and divide outside"
    return f'{text}; {what_to_do}, see "In the replicas, with balanced memory" in docs/losses.md'
