"""Batch normalization of small inputs on the CPU: the master normalizes those of all replicas as one batch.

For small inputs, calling operators costs more than their arithmetic; even more so in several threads, since each call
releases the GIL and takes it again. So the master joins the inputs of all replicas into one batch, and normalizes it in
float64 with one operator of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sync_batchnorm.backends.base import Backward, BatchStatistics, statistics_dtype
from sync_batchnorm.backends.cpu import Cpu, batch_norm_backward, gradient_sums, set_parameter_gradients

__all__: list[str] = []

# Most elements: of each replica in a forward, of all together in a backward. Measured on two cores, torch 2.13.0.
JOINED = 32768


class Joined(Cpu):
    def takes(self, input: Tensor) -> bool:
        """Return whether an input is small enough to be joined; the master then computes its statistics."""
        return 0 < input.numel() <= JOINED

    def takes_all(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether small inputs can be joined: their shapes and strides are equal except in dimension 0."""
        return len({(input.shape[1:], input.stride()[1:]) for input in inputs}) == 1

    def normalize_all(
        self, inputs: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Sequence[Tensor], BatchStatistics]:
        """Return the outputs of all replicas, which have the same weight and bias, and the statistics of the batch."""
        joined = torch.cat(tuple(inputs))
        weight = None if weight is None else weight.double()
        bias = None if bias is None else bias.double()
        output, mean, invstd = torch.native_batch_norm(joined.double(), weight, bias, None, None, True, 0.0, eps)
        # The outputs are not views of one tensor, which could not be changed in place.
        outputs = torch.unsafe_split_with_sizes(output.to(joined.dtype), [input.shape[0] for input in inputs])
        return outputs, BatchStatistics(mean, None, invstd)

    def gradients(self, backward: Backward) -> None:
        """Compute on the joined batch in float64, with operators of torch, if it is small and contains all replicas.

        The limit is lower than in a forward: a backward runs in one thread, where calls of operators cost less.
        """
        replicas = backward.replicas
        if not backward.of_all or sum(replica.input.numel() for replica in replicas) > JOINED:
            return super().gradients(backward)
        grads = [replica.grad_output for replica in replicas]
        inputs = [replica.input for replica in replicas]
        grad = torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)])
        dy, x, sizes = grad.double(), torch.cat(inputs).double(), [input.shape[0] for input in inputs]
        mean, invstd = backward.at[backward.batch.master]
        if any("weight" in replica.wanted or "bias" in replica.wanted for replica in replicas):
            vectors: list[Tensor] = []
            rows = zip(replicas, dy.split_with_sizes(sizes), x.split_with_sizes(sizes), strict=True)
            for replica, own_dy, own_x in rows:
                if replica.grad_output is not None:
                    vectors += gradient_sums(own_dy, own_x, mean, invstd)
            set_parameter_gradients(
                [replica for replica in replicas if replica.grad_output is not None],
                torch.stack(vectors).to(statistics_dtype(inputs[0].dtype)),
            )
        if any("input" in replica.wanted for replica in replicas):
            weight = replicas[0].weight
            # The eps passed here is zero: invstd already contains it.
            grad_input, _, _ = batch_norm_backward(
                dy,
                x,
                None if weight is None else weight.double(),
                None,
                None,
                mean,
                invstd,
                True,
                0.0,
                [True, False, False],
            )
            for replica, own in zip(replicas, grad_input.to(grad.dtype).split_with_sizes(sizes), strict=True):
                replica.grads["input"] = own
