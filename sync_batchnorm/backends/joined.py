"""Batch normalization of small inputs on the CPU: those of all replicas as one batch, by the master.

With small inputs, calls of operators cost more than what they compute; even more so in several threads, since each call
releases the GIL and takes it back. So the master makes the calls for all replicas, on the joined batch in float64, with
one operator of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sync_batchnorm.backends.base import Backward, BatchStatistics, statistics_dtype
from sync_batchnorm.backends.cpu import Cpu, batch_norm_backward, gradient_sums, set_parameter_gradients

if TYPE_CHECKING:
    from sync_batchnorm.autograd import Message

__all__: list[str] = []

# Up to this number of elements in each replica, and in a backward in all together. Measured on two cores, torch 2.13.0.
JOINED = 32768


class Joined(Cpu):
    def takes(self, input: Tensor) -> bool:
        """Return whether an input is small enough: then its statistics are left to the master."""
        return 0 < input.numel() <= JOINED

    def takes_all(self, messages: Sequence[Message]) -> bool:
        """Return whether the inputs can be joined: all are small, of one shape but for their N, and of one layout."""
        first = messages[0].input
        shape, strides = first.shape[1:], first.stride()[1:]
        for message in messages:
            input = message.input
            if message.part is not None or input.shape[1:] != shape or input.stride()[1:] != strides:
                return False
        return True

    def normalize_all(self, messages: Sequence[Message]) -> tuple[list[Tensor], BatchStatistics]:
        """Return the outputs of all replicas, which have one weight, and their statistics."""
        first, inputs = messages[0], [message.input for message in messages]
        joined = torch.cat(inputs)
        weight = None if first.weight is None else first.weight.double()
        bias = None if first.bias is None else first.bias.double()
        eps = cast(float, first.eps)
        output, mean, invstd = torch.native_batch_norm(joined.double(), weight, bias, None, None, True, 0.0, eps)
        # Not views of one tensor: those could not be changed in place.
        parts = torch.unsafe_split_with_sizes(output.to(joined.dtype), [input.shape[0] for input in inputs])
        return list(parts), BatchStatistics(mean, None, invstd)

    def gradients(self, backward: Backward) -> None:
        """Compute on the joined batch in float64, with the operator of torch, if it is small and all take part.

        A backward runs in one thread, where calls cost less than in several: it is not worth it up to the same size.
        """
        replicas = backward.replicas
        if not backward.of_all or sum(replica.input.numel() for replica in replicas) > JOINED:
            return super().gradients(backward)
        grads = [replica.grad_output for replica in replicas]
        inputs = [replica.input for replica in replicas]
        grad = torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)])
        wide, input, sizes = grad.double(), torch.cat(inputs).double(), [input.shape[0] for input in inputs]
        mean, invstd = backward.at[backward.batch.master]
        if any("weight" in replica.wanted or "bias" in replica.wanted for replica in replicas):
            vectors: list[Tensor] = []
            parts = zip(replicas, wide.split_with_sizes(sizes), input.split_with_sizes(sizes), strict=True)
            for replica, dy, x in parts:
                if replica.grad_output is not None:
                    vectors += gradient_sums(dy, x, mean, invstd)
            set_parameter_gradients(
                [replica for replica in replicas if replica.grad_output is not None],
                torch.stack(vectors).to(statistics_dtype(inputs[0].dtype)),
            )
        if any("input" in replica.wanted for replica in replicas):
            weight = replicas[0].weight
            # Without eps, which is part of invstd already.
            grad_input, _, _ = batch_norm_backward(
                wide,
                input,
                None if weight is None else weight.double(),
                None,
                None,
                mean,
                invstd,
                True,
                0.0,
                [True, False, False],
            )
            for replica, found in zip(replicas, grad_input.to(grad.dtype).split_with_sizes(sizes), strict=True):
                replica.grads["input"] = found
