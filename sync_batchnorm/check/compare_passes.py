"""Run the same training passes with two copies of a model (one device, and replicas), and compare the results.

Only results that the caller of the model sees are compared: outputs, loss, gradients, parameters and buffers. The
outputs of single layers are not compared, because they may differ in a model that is right as a whole.

A difference may be a rounding error. A fixed tolerance would be too small for models that amplify rounding errors, and
too large for others. So rounding errors are measured: both copies run the pass once more, with parameters perturbed by
a tiny fraction of their values. If this changes a result by about as much as the result differs between the copies, the
difference is a rounding error.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..processes import active_group
from ..trees import Tree, format_path, leaves_of, named_leaves, tensors_in, with_leaves
from .compare_tensors import LEAST, SCALARS, Rows, agree, format_gap, gap, largest, numbers_of, tolerance_of
from .twin import CheckMode, Twin, copied, go_backward, pads_samples, rows_of_chunks, seed, wrapper_like

__all__: list[str] = []

IN_FORWARD = ("output", "value", "loss")  # kinds of results that need no backward pass
# The first passes, of this number, include a backward pass. More would take too long. One would not be enough: if a
# replica loses state in the first pass, the gradients may be right in the first pass, and wrong in the second.
_TRAINING = 2
# To measure rounding errors, parameters are perturbed by about this fraction of their values.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}
# A difference of up to 100 times the measured rounding error counts as rounding, because rounding errors vary from run
# to run. This hides no real error: the rounding error of most results is measured as about 1e-12, and 100 times as much
# is still far below the tolerance of the check.
_MARGIN = 100

Loss = Callable[[Any], Tensor]
ResultKey = tuple[str, Any]  # (kind, name) of a result

# The results of a pass, by their kind and name:
#   output      tensors in the output of the model, by their index
#   loss        the loss of the user, by the name "loss", or a random loss, by the name None
#   gradient    gradients of parameters and inputs, in the order of the backward pass
#   parameter   parameters after the forward pass
#   buffer      copies of the persistent buffers after the forward pass
#   value       numbers, flags and strings in the output of the model, by their path
#   path        paths of the tensors in the output of the model, by their index
#   returned    tensors with one element in the output of each replica: by the replica's number, then by their path
#   added       gradients of parameters after the forward pass, before the backward pass
#   unseen      class names of objects in the output with unreachable tensors, by their path
#   assigned    names of parameters and buffers that `forward` has replaced by other tensors
Observed = dict[str, dict[Any, Any]]
Pair = tuple[Observed, Observed]  # (results on one device, results in replicas) of the same pass


class FailsInReplicas(Exception):
    """Raised if a pass fails in replicas, although the same pass ran on one device without an error."""


def _wrapper_in(model: nn.Module) -> tuple[str, nn.DataParallel[Any] | None]:
    """Return (name, wrapper) of the outermost wrapper in a model, or ("", None).

    A wrapper inside another wrapper is ignored, because it makes no replicas.

    Raises:
        ValueError: for several outermost wrappers.
    """
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, nn.DataParallel)}
    inside = {id(module) for wrapper in wrappers.values() for module in wrapper.module.modules()}
    outermost = {name: wrapper for name, wrapper in wrappers.items() if id(wrapper) not in inside}
    if len(outermost) > 1:
        name = next(iter(outermost))
        raise ValueError(
            f"expected a model with one wrapper, but got {', '.join(outermost)} in a {type(model).__name__}; check "
            f"each alone, as in assert_matches_one_device(model.{name}, ...) with the inputs of that wrapper"
        )
    return next(iter(outermost.items()), ("", None))


class Check:
    """The model and the options of a check, and facts about the batch, such as the rows of each chunk.

    Raises:
        RuntimeError: if `torch.distributed` joins processes, or the model cannot be copied.
        ValueError: for another dtype, several wrappers, or fewer than two chunks.
    """

    def __init__(
        self, model: nn.Module, arguments: Any, replicas: int | None, loss: Loss | None, dtype: torch.dtype
    ) -> None:
        path, wrapper = self.path, self.wrapper = _wrapper_in(model)  # path: name of the wrapper in the model, or ""
        if active_group(None) is not None:
            raise RuntimeError("expected a single process, as copies would exchange with others; call it in one alone")
        if dtype not in _ROUNDING:
            raise ValueError(f"expected dtype=torch.float64 or torch.float32, but got {dtype}")
        self.model = wrapper.module if wrapper and not path else model
        self.arguments, self.loss, self.dtype = arguments, loss, dtype
        self.name = f"{path}.module" if path else ""  # name of the replicated module inside the model
        self.replicas = replicas or max(2, len(wrapper.device_ids) if wrapper else 0)
        self.grads = list[Tensor]()  # random gradients of the outputs, for a check without a `loss`
        self.rows = list[Rows]()  # for each replica, the rows of its chunk in the batch
        self.pads = False  # whether an argument is a list of samples with different shapes
        # Maps the name of each module to the number of its calls in the last pass on one device
        self.begun: Mapping[str, int] = {}
        if not path:
            self.note_rows(wrapper_like(wrapper, self.model, self.replicas), *copied(arguments, dtype))

    def note_rows(self, parallel: Any, inputs: Any, kwargs: Any) -> None:
        """Record which rows of the batch each replica gets, and whether the shapes of samples differ.

        If the wrapper is a submodule of the model, its arguments are known only in a forward pass. In this case, a hook
        of the wrapper calls this method.
        """
        self.rows = self.rows or rows_of_chunks(parallel, self.replicas, inputs, kwargs)
        self.pads = pads_samples(parallel, inputs, kwargs)


class TwinRun(Twin):
    """A copy of the model that runs forward and backward passes, either on one device or in replicas.

    Args:
        check: the model and options of the check.
        is_one: whether to run on one device.
        index: number of passes to run in this constructor. Afterwards, the copy has the state that the model would have
            after these passes.
        noise: fraction by which parameters are perturbed before the first pass, to measure rounding.
        is_moved: whether to perturb parameters before each pass, so that weights of zeros hide no errors.
    """

    def __init__(self, check: Check, is_one: bool, index: int = 0, noise: float = 0, is_moved: bool = True) -> None:
        super().__init__(check.model, check.arguments, check.dtype, is_one)
        self.check, self._is_one, self._is_moved = check, is_one, is_moved
        inside: Any = dict(self.module.named_modules())[check.path]  # Scripted modules refuse get_submodule.
        wrapper, replicated = (inside, inside.module) if check.path else (check.wrapper, inside)
        self.parallel = wrapper_like(wrapper, replicated, 1 if is_one else check.replicas)
        if check.path:
            self.module.set_submodule(check.path, self.parallel)
            self.parallel.register_forward_pre_hook(check.note_rows, with_kwargs=True)
        # The user's wrapper may have submodules beside the replicated module, such as a batch norm for the gathered
        # output. Copy the ones that have buffers, because the check must not change the user's buffers.
        else:
            others = {name: child for name, child in self.parallel.named_children() if name != "module"}
            stateful = {name: child for name, child in others.items() if any(True for _ in child.buffers())}
            self.parallel._modules.update(copied(stateful, check.dtype))
        self.move_constants(is_moved)
        self.move(-1, noise)
        for before in range(index):
            self.take(before)

    def take(
        self, index: int, kind: str = "gradient", modes: Sequence[CheckMode] = (), in_backward: CheckMode | None = None
    ) -> Observed:
        """Run one pass and return its results.

        Args:
            index: number of the pass, and seed of its random numbers. Replicas get another seed than one device.
            kind: kind of the result that the caller needs. For a result of the forward pass, skip the backward pass.
            modes: torch function mode of each replica in the forward pass.
            in_backward: torch function mode in the backward pass.
        """
        # Perturb parameters even before the first pass: in two branches with equal weights, errors may cancel out.
        self.move(index, 0.01 * self._is_moved)
        self.parallel.modes = modes or [CheckMode(self.check.dtype) for _ in range(self.check.replicas)]
        seed(index if self._is_one or self.check.path else 1000 + index)
        try:
            return self._taken(index < _TRAINING and kind not in IN_FORWARD, in_backward)
        except Exception as error:
            if self._is_one:
                raise
            raise FailsInReplicas(error, self) from error

    def _taken(self, has_backward: bool, in_backward: CheckMode | None) -> Observed:
        dtype, module, parallel = self.check.dtype, self.module, self.parallel
        leaves = [_fresh(leaf) for leaf in leaves_of(self.arguments)]
        asking = {f"input {i}": leaf for i, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)}
        initial = dict(module.named_parameters()) | asking  # before `forward` may call requires_grad_
        inputs, kwargs = with_leaves(self.arguments, iter(leaves))
        memory = self.memory()
        self.order.clear()
        with parallel.modes[0] if self._is_one else CheckMode(dtype) as mode:
            output = (module if self.check.path else parallel)(*inputs, **kwargs)
        self.check.begun = mode.begun if self._is_one else self.check.begun
        outputs, seen = self._outputs(output), self._after_forward(output, memory)
        with CheckMode(dtype):
            loss = self._random_loss(outputs) if self.check.loss is None else self.check.loss(output)
        _check_loss(loss, outputs)
        if has_backward and loss.requires_grad:
            go_backward(loss, initial.values(), in_backward or CheckMode(dtype))
        grads = {name: initial[name].grad for name in self.order | initial}
        module.zero_grad()
        parallel.returned = ()
        losses = {self.check.loss and "loss": loss.detach().reshape(())}
        return seen | {"output": dict(enumerate(map(Tensor.detach, outputs))), "loss": losses, "gradient": grads}

    def _after_forward(self, output: Any, memory: Mapping[str, Tensor]) -> Observed:
        """Collect the results of a forward pass, except the tensors of the output, which the caller adds.

        Args:
            output: output of the model.
            memory: views of parameters and buffers from before the forward pass.
        """
        named = named_leaves(output, "output")
        # Do not compare `num_batches_tracked`, because a norm class of the user may not count its calls.
        saved = {name for name in self.module.state_dict(keep_vars=True) if not name.endswith("num_batches_tracked")}
        return {
            "path": dict(enumerate([path for path, leaf in named if isinstance(leaf, Tensor)])),
            "value": {path: leaf for path, leaf in named if isinstance(leaf, SCALARS)},
            "returned": {i: _numbers_in(of) for i, of in enumerate(self.parallel.returned)},
            "parameter": {name: parameter.detach() for name, parameter in self.module.named_parameters()},
            "buffer": {name: buffer.detach().clone() for name, buffer in self.module.named_buffers() if name in saved},
            "added": {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None},
            "unseen": _unseen_in(output),
            "assigned": {name: 0 for name, held in self.memory().items() if not held.is_set_to(memory.get(name, held))},
        }

    def _outputs(self, output: Any) -> list[Tensor]:
        """Return the tensors in the output of the model.

        If the user's `gather` returns the outputs of the replicas as a list, concatenate the tensors of all replicas.
        """
        outputs, numbers = tensors_in(output), [len(tensors_in(part)) for part in self.parallel.returned]
        is_list = "gather" in self.parallel.overridden and len({*numbers}) == 1 and len(outputs) == sum(numbers)
        if not is_list or self.check.path:
            return outputs
        groups = [outputs[i :: numbers[0]] for i in range(numbers[0])]
        return [torch.cat(group, self.parallel.dim) if group[0].dim() else torch.stack(group) for group in groups]

    def _random_loss(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return a scalar loss for which the gradient of each output is random.

        If each replica returns a scalar, the mean of these scalars takes the place of the output.
        """
        # The pass on one device runs first, so that the random gradients get the shapes of its outputs.
        if not self.check.grads:
            generator = torch.Generator().manual_seed(0)
            self.check.grads = [torch.randn(tensor.shape, generator=generator) for tensor in outputs]
        pairs = zip(outputs, self.check.grads, strict=False)
        means = [(tensor if tensor.shape == grad.shape else tensor.double().mean(), grad) for tensor, grad in pairs]
        return sum([(tensor * grad).sum().real for tensor, grad in means], torch.zeros(()))


def _check_loss(loss: Any, outputs: Sequence[Tensor]) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"expected a `loss` with one element, but got {what}; return that of the batch")
    if not loss.requires_grad and any(output.requires_grad for output in outputs):
        raise ValueError("expected a `loss` with a gradient, but got a tensor without; return what training minimizes")


def _numbers_in(output: Any) -> dict[str, Tensor]:
    """Return the one-element tensors of an output, as a dict from path to tensor."""
    leaves = dict(named_leaves(output, "output"))
    return {path: leaf.detach() for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.numel() == 1}


def _unseen_in(output: Any) -> dict[str, str]:
    """Return those objects in an output of the model that may hold tensors which the check cannot find.

    The result maps paths of objects in the output to the names of their classes. It holds all objects of the output if
    none of them is a tensor, number or string, because then the check cannot compare anything.
    """
    tree = Tree(output, path=("output",), is_output=True)
    compared = [leaf.path for leaf in tree.leaves if isinstance(leaf.value, (Tensor, *SCALARS))]
    empty = (NoneType, list, tuple, dict)
    others = {leaf.path: leaf.value for leaf in tree.leaves if not isinstance(leaf.value, empty)}
    unseen = tree.unreachable if compared else [(path, type(value).__name__) for path, value in others.items()]
    return {format_path(path): kind for path, kind in unseen if not any(path == at[: len(path)] for at in compared)}


def _fresh(leaf: Any) -> Any:
    """Return a copy of an input tensor, because the forward pass may change the input in place."""
    is_data = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_data else leaf


_MOST = 4  # A message lists at most this number of output shapes. The number is arbitrary.
_ROWS = "return a row for each sample, and compute what concerns the whole batch from the gathered output"
IN_PLACE = "only what replica 0 writes into it in place stays, from its own chunk; update it outside the forward pass"
_ASSIGNED = "forward() assigns another tensor to it, which ends with the replica; update it outside the forward pass"
_ASSIGNED += ", or in place if it is a buffer that does not depend on the batch"
_CHANGED = "forward() changes it, in each replica once; make it a buffer, which only replica 0 writes, or do so outside"
_BACKWARD = "forward() calls backward(), which in a replica adds to the gradients of the model; call it outside"
# The kinds of results that are compared as tensors, in the order in which a pass computes them
_KINDS = ("output", "loss", "gradient", "parameter", "buffer")


class Difference(NamedTuple):
    """One difference between the results of a pass on one device and in replicas."""

    kind: str  # kind of the result, such as "output" or "gradient" (see `Observed`)
    # name of the result; None for a random loss, or if outputs differ in their number or shapes
    name: Any
    text: str  # the difference in words


def differences(
    one: Observed, many: Observed, rounding: Mapping[ResultKey, float] | None = None
) -> Iterator[Difference]:
    """Yield the differences between results on one device and in replicas, in the order of their computation.

    Args:
        one: the results on one device.
        many: the results in replicas.
        rounding: largest absolute difference that counts as rounding, by the kind and name of the result.
    """
    of_one, of_many = ([tuple(tensor.shape) for tensor in taken["output"].values()] for taken in (one, many))
    if len(of_one) != len(of_many) or any(a != b and math.prod(a) != 1 for a, b in zip(of_one, of_many, strict=True)):
        shapes = [f"{of[:_MOST]}{', ...' if len(of) > _MOST else ''}" for of in (of_one, of_many)]
        yield Difference("output", None, "outputs have shapes {} on one device, {} in replicas".format(*shapes))
    for path, value in one["value"].items() if one["value"].keys() == many["value"].keys() else ():
        if not agree(other := many["value"][path], value):
            yield Difference("value", path, f"{path} is {value!r} on one device, {other!r} in replicas")
    grads = [grad for grad in one["gradient"].values() if grad is not None]
    sizes = {"loss": largest(*one["output"].values()), "gradient": largest(*grads)}
    for (kind, name), actual, expected in pairs_of(many, one):
        if kind == "output" and expected.numel() == 1 and actual.shape != expected.shape:
            continue  # Skip scalars: they are compared as a part of the loss.
        rounding_of_largest = _ROUNDING.get(expected.real.dtype, 1e-12) * sizes.get(kind, 0.0)
        size = max(LEAST, rounding_of_largest / tolerance_of(expected))
        if by := gap(actual, expected, size, (rounding or {}).get((kind, name), 0.0)):
            yield Difference(kind, name, _text_of(kind, name, by, actual, expected, one, many))


def _text_of(kind: str, name: Any, by: float, actual: Tensor, expected: Tensor, one: Observed, many: Observed) -> str:
    """Describe the difference between two results in words.

    Args:
        kind, name: kind and name of the result.
        by: the gap between the tensors `actual` and `expected`.
        actual, expected: the result in replicas, and on one device.
        one, many: all results on one device, and in replicas.
    """
    if kind == "output":
        part = f" in {one['path'][name]}" if len(one["path"]) > 1 else ""
        return f"outputs differ{part}, {format_gap(by, actual, expected)}"
    if kind == "loss":
        what = "the loss differs" if one["unseen"] else "outputs agree, the loss does not"
        return f"{what}: {expected.sum():.6g} on one device, {actual.sum():.6g} in replicas"
    if kind == "gradient":
        text = "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of"
        return f"{text} {name}: {_norms(actual, expected)}"
    if kind == "parameter" and name not in many[kind]:
        return f"after the forward pass, the parameter {name} is there on one device only; make it in __init__"
    how = f"differs after the forward pass, {format_gap(by, actual, expected)}"
    return f"outputs, loss and gradients agree; the {kind} {name} {how}"


def cause_of(difference: Difference, one: Observed, many: Observed) -> str:
    """Return the cause of a difference between results, or "" if the results leave it uncertain.

    Args:
        difference: the difference between two results.
        one, many: all results on one device, and in replicas.
    """
    kind, name, _ = difference
    if kind == "value" or (kind == "output" and name is None):
        return _ROWS
    if kind == "loss" and name:
        return "`loss` depends on more than the output"
    if kind == "gradient":
        return "" if agree(many["added"], one["added"]) else _BACKWARD
    if kind == "buffer" or (kind == "parameter" and name in many[kind]):
        return _ASSIGNED if name in one["assigned"] else IN_PLACE if kind == "buffer" else _CHANGED
    return ""


def pairs_of(actual: Observed, expected: Observed) -> Iterator[tuple[ResultKey, Tensor, Tensor]]:
    """For each result of two passes, yield (key of the result, actual tensor, expected tensor).

    A tensor of zeros takes the place of a missing result, or of a gradient that is None, as for an unused parameter.
    """
    for kind in _KINDS:
        for name, tensor in expected[kind].items():
            pair = actual[kind].get(name), tensor
            either = next((tensor for tensor in pair if tensor is not None), torch.zeros(()))
            now, then = (torch.zeros_like(either) if tensor is None else tensor for tensor in pair)
            yield (kind, name), now.to_dense(), then.to_dense()


def _norms(actual: Tensor, expected: Tensor) -> str:
    size, whole = float(actual.norm()), float(expected.norm())
    if whole <= LEAST * size or not size:
        return "only replicas have one" if size else "it is missing, or zero, in replicas"
    return f"its norm in replicas is {size / whole:.3} times that on one device"


def scalars(one: Observed, many: Observed) -> Iterator[tuple[Tensor, Tensor, str]]:
    """For each scalar output of the replicated module, yield (values in replicas, value on one device, name).

    Leave out scalars that are equal in all replicas and on one device, such as a learned temperature.
    """
    parts, on_one = many["returned"].values(), one["returned"].get(0, {})
    for path, tensor in on_one.items() if parts else ():
        if all(path in part for part in parts):
            numbers = torch.stack([part[path].double().real.reshape(()) for part in parts])
            of_one = tensor.double().real.reshape(())
            if not agree(numbers, of_one.expand_as(numbers)):
                yield numbers, of_one, f"as {path}, " if path != "output" else ""


def beyond_rounding(check: Check, index: int, pair: Pair) -> Difference | None:
    """Return the first difference that is larger than the rounding errors, or None.

    Args:
        check: the model and options of the check.
        index: number of the pass.
        pair: the results of this pass on one device, and in replicas.
    """
    rounding = _moved(check, index, pair, _ROUNDING[check.dtype])
    for is_repeated in (False, True):
        # A result that changes between equal runs is random, so its change does not measure rounding errors.
        if is_repeated:
            itself = _moved(check, index, pair, 0.0)
            rounding = {key: by for key, by in rounding.items() if not itself.get(key)}
        for difference in differences(*pair, rounding):
            if difference.kind != "buffer" or _is_state(check, index, pair, str(difference.name)):
                return difference
    return None


def _moved(check: Check, index: int, pair: Pair, noise: float) -> dict[ResultKey, float]:
    """Run the pass with slightly changed parameters, and return the change of each result, times a safety margin.

    The perturbation changes each result twice: in replicas, and on one device. Return the larger of the two changes.

    Args:
        check: the model and options of the check.
        index: number of the pass.
        pair: the results of the unperturbed pass on one device, and in replicas.
        noise: fraction by which parameters are perturbed.
    """
    moves = dict[ResultKey, float]()
    for is_one, before in zip((True, False), pair, strict=True):
        for key, now, then in pairs_of(TwinRun(check, is_one, index, noise).take(index), before):
            if now.shape == then.shape:
                moves[key] = max(_MARGIN * largest(numbers_of(now) - numbers_of(then)), moves.get(key, 0.0))
    return moves


def _is_state(check: Check, index: int, pair: Pair, name: str) -> bool:
    """Return whether a buffer carries state, so that its value before a pass affects its value after the pass."""
    side = TwinRun(check, True, index)
    with suppress(Exception):  # This change of the buffer may make `forward` raise an error.
        buffer = dict(side.module.named_buffers())[name]
        buffer.data.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
        return bool(gap(side.take(index, "buffer")["buffer"][name], pair[0]["buffer"][name]))
    return True
