"""Batch normalization of small inputs on the CPU: those of all replicas as one batch, by the master.

With small inputs, calls of operators cost more than what they compute; even more so in several threads, since each call
releases the GIL and takes it back. So the master makes the calls for all replicas, on the joined batch in float64, with
one operator of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sync_batchnorm.backends.base import Backward, BatchStatistics, statistics_dtype
from sync_batchnorm.backends.cpu import Cpu, batch_norm_backward, gradient_sums, set_parameter_gradients

__all__: list[str] = []

# Up to this number of elements in each replica, and in a backward in all together. Measured on two cores, torch 2.13.0.
JOINED = 32768


class Joined(Cpu):
    def takes(self, input: Tensor) -> bool:
        """Return whether an input is small enough: then the master makes its statistics."""
        return 0 < input.numel() <= JOINED

    def takes_all(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether small inputs can be joined: they are of one shape but for their N, and of one layout."""
        return len({(input.shape[1:], input.stride()[1:]) for input in inputs}) == 1

    def normalize_all(
        self, inputs: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Sequence[Tensor], BatchStatistics]:
        """Return the outputs of all replicas, which have one weight, and their statistics."""
        joined = torch.cat(tuple(inputs))
        weight = None if weight is None else weight.double()
        bias = None if bias is None else bias.double()
        output, mean, invstd = torch.native_batch_norm(joined.double(), weight, bias, None, None, True, 0.0, eps)
        # Not views of one tensor: those could not be changed in place.
        outputs = torch.unsafe_split_with_sizes(output.to(joined.dtype), [input.shape[0] for input in inputs])
        return outputs, BatchStatistics(mean, None, invstd)

    def gradients(self, backward: Backward) -> None:
        """Compute on the joined batch in float64, with the operator of torch, if it is small and has all replicas.

        A backward runs in one thread, where calls cost less than in several: it is not worth it up to the same size.
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
            # Without eps, which invstd contains already.
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
