"""What replicas and their master send each other, and what the master makes of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sync_batchnorm import distributed, moments, normalization, whole
from sync_batchnorm.nodes import Merge, ScaleRule, merge_moments, used_here

__all__: list[str] = []


class Message(NamedTuple):
    """What a replica sends to the master about its input."""

    moments: Tensor  # (2, C): mean and biased variance
    carrier: Tensor  # as `moments`, see NOTE [carriers]
    shape: torch.Size
    dtype: torch.dtype
    rule: ScaleRule | None  # None: the scale is the variance itself
    weight: Tensor | None = None
    bias: Tensor | None = None
    group: distributed.Group | None = None  # the processes to exchange with; that of the master counts
    ready: torch.cuda.Event | None = None  # when the moments are there

    @property
    def device(self) -> torch.device:
        return self.moments.device


class Whole(NamedTuple):
    """What a replica with a small input sends instead: the input itself."""

    input: Tensor
    shape: torch.Size
    dtype: torch.dtype
    weight: Tensor | None
    bias: Tensor | None
    rule: ScaleRule
    records: bool  # whether autograd records: the mode of the thread

    @property
    def device(self) -> torch.device:
        return self.input.device


@dataclass(frozen=True)
class Normalized:
    """What the master sends back to a replica that has sent its input."""

    output: Tensor
    mean: Tensor  # (C,), as in `Merged`
    var: Tensor
    count: int


@dataclass(frozen=True)
class Merged:
    """What the master sends back to a replica that has sent its moments."""

    mean: Tensor  # (C,), on the device of the master, not part of the graph
    var: Tensor  # (C,), biased, as `mean`
    count: int
    normalizer: Tensor  # (2, C): mean and scale, on the device of the replica, part of the graph
    carrier: Tensor  # as `normalizer`, see NOTE [carriers]
    constant: Tensor  # as `normalizer`, not part of the graph
    affine: normalization.Affine | None = None
    weighted: bool = False  # whether `affine` holds the weight and bias of all replicas
    ready: torch.cuda.Event | None = None  # when all of it is there


def merge_messages(
    messages: list[tuple[Hashable, Message | Whole]],
) -> Sequence[tuple[Hashable, Merged | Normalized | None]]:
    """Merge what the replicas know of their inputs: the callback of the `SyncMaster` of a synchronized layer.

    All get None if some have sent their inputs, and these cannot be joined, or not all are recorded by autograd: then
    each sends its moments.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value a channel in all.
    """
    if len({(message.shape[1], len(message.shape), message.dtype) for _, message in messages}) > 1:
        inputs = ", ".join(
            f"{tuple(message.shape)} of {message.dtype} in replica {replica}"
            for replica, (_, message) in enumerate(messages)
        )
        raise ValueError(
            "expected inputs of one dtype, number of channels and number of dimensions in all replicas, "
            f"but got {inputs}; give every replica the same kind of input"
        )
    sent = [(replica, message) for replica, message in messages if isinstance(message, Message)]
    if len(sent) == len(messages):
        return _merge(sent)
    handed = [message for _, message in messages if isinstance(message, Whole)]
    alike = len({message.records for message in handed}) == 1 and whole.fit_together([m.input for m in handed])
    if sent or not alike or not _share_parameters(handed):
        return [(replica, None) for replica, _ in messages]
    weight, bias, rule = handed[0].weight, handed[0].bias, handed[0].rule
    outputs, mean, var = whole.normalize_whole([message.input for message in handed], weight, bias, rule.eps)
    count = sum(moments.channel_count(message.shape) for message in handed)
    return [
        (replica, Normalized(output, mean, var, count)) for (replica, _), output in zip(messages, outputs, strict=True)
    ]


def _merge(messages: list[tuple[Hashable, Message]]) -> list[tuple[Hashable, Merged]]:
    contents = [message for _, message in messages]
    counts = [moments.channel_count(message.shape) for message in contents]
    group = contents[0].group
    if group is None and sum(counts) < 2:
        return _without_variance(messages, sum(counts))
    for message in contents:
        receive(message.moments, message.ready, contents[0].device)
    weighted = _share_parameters(contents)
    merge = Merge(
        counts,
        [message.moments.device for message in contents],
        contents[0].dtype,
        contents[0].rule,
        contents[0].weight if weighted else None,
        contents[0].bias if weighted else None,
        group,
    )
    merged = merge_moments(merge, [message.moments for message in contents], [message.carrier for message in contents])
    if merge.count < 2:  # as only the group can tell
        return _without_variance(messages, merge.count)
    ready = ready_event(merge.mean)
    on_device = {
        device: Merged(merge.mean, merge.var, merge.count, normalizer, carrier, constant, merge.affine, weighted, ready)
        for (device, (normalizer, carrier)), constant in zip(merged.items(), merge.constants, strict=True)
    }
    return [(replica, on_device[message.moments.device]) for replica, message in messages]


def _without_variance(messages: list[tuple[Hashable, Message]], count: int) -> list[tuple[Hashable, Merged]]:
    if count:
        sizes = [message.shape for _, message in messages]
        single = next((size for size in sizes if moments.channel_count(size)), sizes[0])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {single}")
    first = messages[0][1]
    mean, var = first.moments.unbind()
    return [(replica, Merged(mean, var, 0, m.moments, m.carrier, m.moments)) for replica, m in messages]


def _share_parameters(messages: Sequence[Message | Whole]) -> bool:
    """Tell whether the replicas of each device have weight and bias over the same storage, as replicas usually have.

    Then what depends on them is computed once, by the master. They differ if the module computes them in its forward.
    """

    def storage(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    devices = {message.device for message in messages}
    return len({(m.device, storage(m.weight), storage(m.bias)) for m in messages}) == len(devices)


def ready_event(tensor: Tensor) -> torch.cuda.Event | None:
    """Return the event after which `tensor` is there for other streams; None where there are none."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def receive(tensor: Tensor, ready: torch.cuda.Event | None, device: torch.device) -> None:
    """Let this thread use on `device` a `tensor` that another one has made, after the event; the host does not wait."""
    if ready is not None:
        torch.cuda.current_stream(device).wait_event(ready)
        used_here(tensor)
