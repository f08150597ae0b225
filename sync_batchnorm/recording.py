"""A copy of a model that runs a training step on the CPU in float64, and records what its modules do in it."""

import copy
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .parallel.scatter_gather import _rebuild, tensors_in

__all__: list[str] = []

Loss = Callable[[Any], Tensor]
Call = tuple[list[Tensor], list[Tensor], Counter[str], bool]  # inputs, outputs, functions of torch, random numbers


def random_states() -> bytes:
    """Return the states of the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    numpy = sys.modules.get("numpy")
    return pickle.dumps((torch.get_rng_state().tolist(), random.getstate(), numpy and numpy.random.get_state(False)))


def set_random_states(states: bytes) -> None:
    """Set what `random_states` has returned."""
    torch_state, python_state, numpy_state = pickle.loads(states)
    torch.set_rng_state(torch.tensor(torch_state, dtype=torch.uint8))
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def _double(tree: Any, is_copy: bool = False) -> Any:
    """Return `tree` on the CPU, in double precision except for integers; or a copy, whose tensors are leaves."""
    if isinstance(tree, (dict, list, tuple)) and tree:
        return _rebuild(
            tree, [_double(child, is_copy) for child in (tree.values() if isinstance(tree, dict) else tree)]
        )
    if not isinstance(tree, Tensor):
        return tree
    dtype = torch.float64 if tree.is_floating_point() else torch.complex128 if tree.is_complex() else tree.dtype
    if is_copy:
        return tree.detach().to("cpu", dtype, copy=True).requires_grad_(tree.requires_grad)
    return tree.to("cpu", dtype)


class Record(torch.overrides.TorchFunctionMode):
    """The calls of modules in one replica; a mode, in which torch computes as `_double`, and without dropout."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], Call] = {}  # by name and number, in the order in which they end
        self.numbers: Counter[str] = Counter()
        self.is_dropout_off = False
        self._running: list[tuple[str, list[Tensor], Counter[str], bytes]] = []
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def begin(self, name: str, inputs: Any) -> None:
        if self._running or not name:  # Otherwise, a backward pass recomputes a checkpoint.
            self._running.append((name, self._copied(inputs), Counter(), random_states()))

    def end(self, output: Any) -> None:
        if self._running:
            name, inputs, functions, states = self._running.pop()
            self.calls[name, self.numbers[name]] = inputs, self._copied(output), functions, states != random_states()
            self.numbers[name] += 1

    def _copied(self, tree: Any) -> list[Tensor]:
        """Return copies of the tensors, of each the same copy until it is changed in place."""
        running, self._running = self._running, []  # What this calls is not called by a module.
        found = {(id(tensor), tensor.is_inference() or tensor._version): tensor for tensor in tensors_in(tree)}
        self._copies |= {key: (t, t.detach().clone()) for key, t in found.items() if key not in self._copies}
        self._running = running
        return [self._copies[key][1] for key in found]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if "dropout" in name and kwargs.get("training", True):
            self.is_dropout_off = True
            return args[0]
        if name == "rrelu" and "training" in kwargs:
            kwargs["training"] = False
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:4], kwargs | dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))
            self.is_dropout_off |= kwargs.pop("dropout_p", 0.0) > 0.0
        if self._running and name != "__get__":  # which reads an attribute of a tensor
            self._running[-1][2][name] += 1
        if not name.endswith("_"):  # which writes into its arguments
            args, kwargs = _double(args), _double(kwargs)
        result = func(*args, **kwargs)
        return _double(result) if isinstance(result, Tensor) else result


class RecordedCopy(nn.Module):
    """A copy of the model, and what the caller sees of its training step. In replicas, each has a record of its own."""

    _record: Record
    outputs: Sequence[Tensor] = ()
    loss: Tensor
    is_done = False

    def __init__(self, model: nn.Module, given: Any) -> None:
        super().__init__()
        self.records, self.order = [Record()], list[str]()
        attributes = [value for module in model.modules() for value in vars(module).values()]
        computed = {id(t): t.detach() for t in attributes if isinstance(t, Tensor) and not t.is_leaf}
        try:  # What was computed, as by `nn.utils.weight_norm`, refuses to be copied.
            with torch.no_grad():  # as copies of scripted modules are no leaves
                self.module = copy.deepcopy(model, computed).cpu().double()
            self.given = _double(given, is_copy=True)
            self.leaves = {f"input {i}": tensor for i, tensor in enumerate(tensors_in(self.given))}
            self.leaves |= dict(self.module.named_parameters())
            for name, leaf in self.leaves.items():
                if leaf.requires_grad:
                    hook = partial(lambda order, name, _: order.append(name), self.order, name)  # no reference to this
                    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise RuntimeError(f"{type(model).__name__} cannot be copied to the CPU in float64: {error}") from error
        for name, module in self.module.named_modules():
            if isinstance(getattr(module, "dropout", None), float):  # as of `nn.LSTM` and `nn.MultiheadAttention`
                self.records[0].is_dropout_off, module.dropout = True, 0.0
            if isinstance(module, nn.DataParallel):
                module.device_ids = []  # It runs its module.
            if isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                continue
            module.register_forward_pre_hook(lambda m, *args, name=name: m._record.begin(name, args), with_kwargs=True)
            module.register_forward_hook(lambda m, _, output: m._record.end(output), always_call=True)
        self.__data_parallel_replicate__(None, 0)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        for module in self.modules():
            module.__dict__["_record"] = self.records[copy_id]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._record:
            return self.module(*inputs, **kwargs)

    def step(self, net: nn.Module, loss: Loss | None, like: Sequence[Tensor]) -> None:
        """Run a forward and a backward pass of `net`, this or a wrapper of it; a random one for outputs as `like`."""
        output = net(*self.given[0], **self.given[1])
        self.outputs = tensors_in(output)
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}  # before a recomputation
        self.state = dict(self.module.named_parameters()) | buffers
        with Record():  # also while checkpoints are recomputed
            value = loss(output) if loss else _random_loss(self.outputs, like or self.outputs)
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = tuple(value.shape) if isinstance(value, Tensor) else value
                raise TypeError(
                    f"expected a loss that returns a scalar tensor, but got {what}; take for example a mean"
                )
            self.loss = value.detach()
            if value.requires_grad:  # A backward pass from a tensor would leave the mode.
                torch.autograd.backward(torch.autograd.graph.get_gradient_edge(value), torch.ones_like(value))
        self.is_done = True


def _random_loss(outputs: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Return a loss with a random gradient for each output, or for the mean of what each replica has returned."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros((), dtype=torch.float64)
    for output, tensor in zip(outputs, like, strict=True):
        grad = torch.randn(tensor.shape, generator=generator)
        total = total + ((output if output.shape == grad.shape else output.double().mean()) * grad).sum().real
    return total
