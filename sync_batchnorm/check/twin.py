"""Make two comparable copies ("twins") of a model and its wrapper: one for one device, and one for replicas.

Both twins compute on the CPU, in one dtype, and without dropout, so that a difference between them is an error of the
model in replicas. The torch function mode `CheckMode` enforces this, and keeps track of the running module calls.

The parameters of both twins are perturbed before each pass. Otherwise errors could be hidden: by a later layer with a
weight of zeros, or by two branches whose equal weights have opposite signs.
"""

import copy
import inspect
import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from ..layers import _SynchronizedBatchNorm
from ..torch_private import HOOKS, in_transform
from ..trees import children_of, tensors_in
from ..wrapper.arguments import Arguments
from ..wrapper.data_parallel import DataParallelWithCallback
from ..wrapper.lost_state import hooks_of
from .compare_tensors import Rows

__all__: list[str] = []

_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_DROPOUTS |= {"feature_dropout", "native_dropout", "dropout_", "alpha_dropout_", "feature_dropout_"}
OF_MODULES = {*vars(nn.Module()), "eps_mode"}  # attributes that torch or this library sets on modules
_OF_ORIGINAL = "hooks that refer to the model use attributes of the original, not the replica"


def seed(number: int) -> None:
    """Seed the random generators of torch (CPU), of Python, and of NumPy if it is imported."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


# The hooks of the check call the following function. Torch passes each call of it to the function mode that is active
# in the thread, because the function is marked as overridable. In a replica, this mode is the `CheckMode` of the
# replica.
@wrap_torch_function(lambda name, *_: (name,))
def notify_module_call(name: str, module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
    """Tell the function mode of this thread that a module call begins, or, if `output` is given, that it has ended."""


CallKey = tuple[str, int]  # name of the called module, and the number of earlier calls of this module in the pass


@dataclass
class ModuleCall:
    """One call of a module, on one device or in a replica."""

    module: Any  # the called module, or None for code outside of all modules
    key: CallKey
    # The functions that the module calls directly, among "batch_norm", "sync_batch_norm" and "grad"
    called: set[str] = field(default_factory=set)
    # The arguments of the call: (args, kwargs). A call on one device keeps a copy of its arguments. A call in a replica
    # keeps its arguments only if its output is wrong.
    arguments: Any = None
    output: Any = None  # for a call on one device, a copy of its output; None for a call in a replica
    # If the output in a replica is wrong: (name of the tensor that differs most from one device, difference in words)
    gap: tuple[str, str] = ("", "")
    # For a call on one device, this dict maps the number of each replica to the same call in the replica. The value is
    # None if the arguments of the call in the replica differ from those on one device.
    in_replicas: "dict[int, ModuleCall | None]" = field(default_factory=dict)


class CheckMode(TorchFunctionMode):
    """Make torch compute on the CPU, in `dtype`, and without dropout."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.dropped = dict[str, None]()  # names of the dropout functions that this mode has switched off
        self.failed: tuple[ModuleCall, Exception] | None = None  # (innermost module call that failed, its error)
        self._running = [ModuleCall(None, ("", 0))]  # the running module calls, innermost last
        self.begun: Counter[str] = Counter()  # maps the name of each module to the number of its calls so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_transform():  # Tensors inside torch.vmap have no dimension of samples to compare.
            return None if func is notify_module_call else CheckMode.run(self, func, args, kwargs or {})
        return self._notify_module_call(*args) if func is notify_module_call else self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function with its tensors on the CPU, in the dtype of this mode, and without dropout."""
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS and _drops(args, kwargs):
            self.dropped[name] = None
            output = self.converted(args[0] if args else kwargs["input"]).clone()
            return (output, torch.ones_like(output, dtype=torch.bool)) if "native" in name else output
        trains = name == "batch_norm" and (args[5] if len(args) > 5 else kwargs.get("training", False))
        if trains or name == "sync_batch_norm" or func is torch.autograd.grad:
            self._running[-1].called.add(name)
        kwargs = {key: self.converted(value) for key, value in kwargs.items()}
        if name == "scaled_dot_product_attention":
            if any([*args[4:5], kwargs.pop("dropout_p", 0.0)]):
                self.dropped[name] = None
            args = (*args[:4], *[0.0 for _ in args[4:5]], *args[5:])
        if not name.endswith("_"):  # In-place functions must get the original tensors, because they write into them.
            args = tuple(map(self.converted, args))
        return self.converted(func(*args, **kwargs))

    def converted(self, value: Any) -> Any:
        """Move a tensor to the CPU, and cast it to the dtype of the check.

        Integers and 8-bit floating-point numbers keep their dtype.
        """
        if not isinstance(value, Tensor):
            return value
        dtype = self.dtype if value.is_floating_point() and value.element_size() > 1 else value.dtype
        return value.to("cpu", self.dtype.to_complex() if value.is_complex() else dtype)

    def _notify_module_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if not output:
            call = ModuleCall(module, (name, self.begun[name]))
            self.begun[name] += 1
            other_arguments = self.begin(call, (args, kwargs))
            self._running.append(call)
            return other_arguments
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and (self.failed is None or self.failed[1] is not error):
            self.failed = self._running[-1], error
        # `_running` is a stack of the running calls. After an error, it may hold calls that have ended: the error
        # skipped our hooks at their end. Or the call that ends now may be missing: a hook of the user failed before our
        # hook at its start.
        while any(call.module is module for call in self._running):
            call = self._running.pop()
            if call.module is module:
                return self.end(call, *output)
        return None

    def begin(self, call: ModuleCall, arguments: Any) -> Any:
        """Handle the start of a module call. A return value other than None replaces the arguments of the call."""

    def end(self, call: ModuleCall, output: Any) -> Any:
        """Handle the end of a module call. A return value other than None replaces the output of the call."""


def _drops(args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a call of a dropout function is in training mode with a nonzero probability."""
    _, p, trains, *_ = (*args, None, None, None)  # torch.dropout gets options by position, `F.dropout` by name.
    return bool(kwargs.get("p", p) and kwargs.get("training", kwargs.get("train", trains)))


# Modules with dropout keep the probability to drop a value, path or layer in an attribute. The table `_PROBABILITIES`
# lists the names of such attributes for some packages. A class named DropPath counts as a class of timm, because users
# mostly copy this class from timm.
_DROPPING = ("drop_prob", "layerdrop", "drop_connect_rate")
_PACKAGES = ("timm", "transformers", "monai", "segmentation_models_pytorch")
_PROBABILITIES = {"torchvision": ("p",), **dict.fromkeys(_PACKAGES, _DROPPING)}


class _Copying(CheckMode):
    """Let `deepcopy` copy tensors with a `grad_fn`, too. Torch itself refuses to copy them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.converted(args[0]).detach().clone().requires_grad_(args[0].requires_grad)
        return super().__torch_function__(func, types, args, kwargs)


def copied(tree: Any, dtype: torch.dtype) -> Any:
    """Copy modules or arguments; tensors of the copy are on the CPU, in `dtype`."""
    # Switch grad mode off: it would give the copied parameters of scripted modules a grad_fn.
    with torch.no_grad(), _Copying(dtype):
        return copy.deepcopy(tree)


class Twin:
    """A copy of a model and its arguments, without dropout, and with hooks that call `notify_module_call`."""

    def __init__(self, model: nn.Module, arguments: Any, dtype: torch.dtype, is_one: bool) -> None:
        self._original = model
        self.dropped = dict[str, None]()  # names of attributes with a dropout probability that is set to 0
        self.order = dict[str, None]()  # names of parameters, in the order of their gradients in the backward pass
        try:
            self.module, self.arguments = copied((model, arguments), dtype)
            with torch.no_grad():
                self.module._apply(_Copying(dtype).converted)  # Module.to(dtype) would make complex numbers real.
            self._take_over_attributes(model)
        except Exception as error:
            is_lock = "pickle" in str(error)
            remedy = "; keep a lock or an iterator outside of the model, or write a __deepcopy__ for its class"
            text = f"{type(model).__name__} cannot be copied to the CPU in {dtype}: "
            raise RuntimeError(f"{text}{shortened(error, 30 if is_lock else 45)}{remedy if is_lock else ''}") from error
        copies = dict(zip(map(id, model.modules()), self.module.modules(), strict=True))
        for name, module in self.module.named_modules():
            self._switch_off_dropout(name, module)
            if isinstance(module, _SynchronizedBatchNorm):
                # On one device, batch norm adds eps to the variance, so replicas must, too, in any `eps_mode`.
                module.__dict__["eps_mode"] = "plus"
                # On one device, use the class that the layer had before its conversion.
                if is_one and module._former_class is not None:
                    object.__setattr__(module, "__class__", module._former_class)
            if isinstance(module, nn.DataParallel):
                module.device_ids = []  # Without devices, nn.DataParallel calls its module directly.
            for hooks in [vars(module)[hooks] for hooks in HOOKS if hooks in vars(module)]:
                hooks.update({number: _rebound(hook, copies) for number, hook in hooks.items()})
            if not isinstance(module, torch.jit.ScriptModule):  # Scripted modules refuse Python hooks.
                # Our hook runs before the user's hooks, because a hook of the user may raise an error.
                module.register_forward_pre_hook(partial(notify_module_call, name), with_kwargs=True, prepend=True)
                module.register_forward_hook(partial(notify_module_call, name), with_kwargs=True, always_call=True)

    def _take_over_attributes(self, model: nn.Module) -> None:
        """Copy attributes of the user's parameters and buffers, and record in which order parameters get gradients."""
        originals: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self.module.named_parameters():
            if originals[name].requires_grad:  # A copied scripted module loses `requires_grad`.
                # The hook records only the name of the parameter: the gradient will be in `.grad`.
                parameter.requires_grad_().register_hook(lambda _, name=name: self.order.setdefault(name))
        originals |= dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            vars(tensor).update(vars(originals[name]))

    def text_of_hooks(self) -> str:
        """Return a note about a hook that refers to the user's model in place of this copy, or "".

        If a hook refers to the user's model, it stores values in attributes or containers of that model. The copied
        model has attributes of its own, so its methods never see these values.
        """
        original = self._original.named_modules()
        held = [(f"{name}.{key}", value) for name, child in original for key, value in vars(child).items()]
        names = {id(value): name.strip(".") for name, value in held if isinstance(value, (dict, list, set, deque))}
        classes = {cls for child in self.module.modules() for cls in type(child).__mro__}
        methods = [value for cls in classes for key, value in vars(cls).items() if key != "__init__"]
        codes: set[Any] = {getattr(inspect.unwrap(method), "__code__", None) for method in methods}
        for module, hook, variables in hooks_of(self.module):
            values, code = [*variables.values(), *(hook.__defaults__ or ())], hook.__code__
            words = {name for other in codes - {code, None} for name in other.co_names} - OF_MODULES
            # If a function calls `setattr`, the name of the attribute is one of the constants of its code object.
            words &= {*code.co_names, *code.co_consts}
            used = [key for value in values if isinstance(value, nn.Module) for key in vars(value) if key in words]
            if used := [*used, *[names[id(value)] for value in values if id(value) in names]]:
                name = f"{hook.__qualname__} of {module or 'the model itself'} ({', '.join(used)})"
                return f'{_OF_ORIGINAL}: {name}, see "Hooks that refer to the model"'
        return ""

    def memory(self) -> dict[str, Tensor]:
        """Return views of parameters and buffers, to find out later whether `forward` has assigned other tensors."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor.detach() for name, tensor in tensors if tensor.layout == torch.strided}

    def _switch_off_dropout(self, name: str, module: nn.Module) -> None:
        """Set to 0 each attribute that holds the probability of dropout or stochastic depth in a module."""
        package = "timm" if type(module).__name__ == "DropPath" else type(module).__module__.partition(".")[0]
        is_of_torch = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
        names = ("dropout",) if is_of_torch else _PROBABILITIES.get(package, ())
        for attribute, value in vars(module).items():
            if attribute.removeprefix("_") in names and type(value) is float and value:
                module.__dict__[attribute] = 0.0
                self.dropped[f"{name}.{attribute}".strip(".")] = None

    @torch.no_grad()
    def move_constants(self, is_moved: bool) -> None:
        """Perturb parameters whose entries are all equal: a weight of zeros would hide errors of earlier layers."""
        for name, parameter in self.module.named_parameters():
            if is_moved and _trains(parameter) and bool(parameter.eq(first := parameter.flatten()[0]).all()):
                size = (0.1 * first.abs()).clamp(min=0.02) * (0.5 + _numbers_like(parameter, name).abs())
                # Parameters of zeros become positive, because their square root must not be NaN.
                parameter.add_(-size if first < 0 else size)

    @torch.no_grad()
    def move(self, index: int, by: float) -> None:
        """Multiply trainable parameters by random factors near 1.

        Args:
            index: number of the pass. Each pass has other factors.
            by: standard deviation of the factors.
        """
        for name, parameter in self.module.named_parameters():
            if _trains(parameter) and by:
                parameter.addcmul_(_numbers_like(parameter, f"{index} {name}"), parameter.abs(), value=by)


def _trains(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.layout == torch.strided and tensor.is_floating_point() and tensor.numel() > 0


def _numbers_like(parameter: Tensor, name: str) -> Tensor:
    """Return normally distributed random numbers in the shape of a parameter, with a seed computed from `name`.

    To save time, only 1021 numbers are drawn. They are repeated until the tensor is full.
    """
    generator, size = torch.Generator().manual_seed(zlib.crc32(name.encode())), parameter.numel()
    numbers = torch.randn(min(size, 1021), generator=generator, dtype=torch.float64)
    return numbers.to(parameter.dtype).repeat(size // len(numbers) + 1)[:size].reshape(parameter.shape)


def shortened(error: Exception, most: int) -> str:
    """Return the text of an error, shortened to at most `most` words."""
    words = str(error).split()
    return " ".join(words[:most]) + (" ..." if len(words) > most else "")


def _rebound(hook: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return a hook whose closure refers to the copied modules in place of the user's modules.

    Args:
        hook: a hook of the user's model.
        copies: maps the id of each module in the user's model to the copied module.
    """
    closure = list[Any]()
    with suppress(ValueError):  # A variable in the closure of a hook may have no value yet.
        closure = [cell.cell_contents for cell in hook.__closure__ or ()] if type(hook) is FunctionType else []
    if not copies.keys() & set(map(id, closure)):
        return hook
    cells = tuple([CellType(copies.get(id(value), value)) for value in closure])
    result = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    result.__kwdefaults__ = hook.__kwdefaults__
    return result


def go_backward(loss: Tensor, of_copy: Iterable[Any], mode: CheckMode) -> None:
    """Run the backward pass of a copied model, and afterwards restore the gradients of tensors outside the copy.

    The graph may contain parameters of the user that are not in the model. Their `.grad` is unchanged afterwards.

    Args:
        loss: the tensor at the root of the backward pass.
        of_copy: parameters and inputs of the copy, which keep their new gradients.
        mode: function mode for hooks and recomputations in the backward pass.
    """
    known, edge = {*map(id, of_copy)}, torch.autograd.graph.get_gradient_edge(loss)
    nodes = new = set[Any]({edge.node})
    while new := {following for node in new for following, _ in node.next_functions} - nodes - {None}:
        nodes = nodes | new
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    grads = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in known]
    for leaf, _ in grads:
        leaf.grad = None  # Autograd would change the user's gradient in place, so take it away for the moment.
    # In the backward pass, activation checkpointing runs parts of the forward pass again. These parts need the torch
    # function mode `mode`, too.
    with mode:
        # A backward pass from a tensor, not its graph edge, would switch off `mode`.
        torch.autograd.backward(edge)
    for leaf, grad in grads:
        leaf.grad = grad


_METHODS = ("scatter", "gather", "forward")
_USUAL = {getattr(cls, name) for cls in (nn.DataParallel, DataParallelWithCallback) for name in _METHODS}


class CheckedWrapper(DataParallelWithCallback):
    """A `DataParallel` wrapper whose replicas all run on the CPU, each in its own torch function mode."""

    overridden: Sequence[str] = ()  # names of the methods that the class of the user's wrapper overrides
    modes: Sequence[CheckMode]  # function mode of each replica
    returned: Sequence[Any] = ()  # output of each replica

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(self.device_ids) > 1:
            return super().forward(*inputs, **kwargs)
        args, kwargs_of = self.scatter(inputs, kwargs, self.device_ids)
        of_one = args[0] if isinstance(args[0], (list, tuple)) else args[:1]  # as in torch's parallel_apply
        output = self.module(*of_one, **kwargs_of[0])
        self.returned = [output]
        return self.gather([output], self.output_device) if "gather" in self.overridden else output

    def parallel_apply(self, replicas: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        in_modes = [partial(_call_in_mode, mode, replica) for mode, replica in zip(self.modes, replicas, strict=False)]
        self.returned = super().parallel_apply(in_modes, *args, **kwargs)
        return list(self.returned)


def _call_in_mode(mode: CheckMode, replica: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return replica(*args, **kwargs)


def wrapper_like(wrapper: nn.DataParallel[Any] | None, module: nn.Module, replicas: int) -> CheckedWrapper:
    """Return a copy of the user's wrapper, with `replicas` replicas of `module` on the CPU."""
    parallel = CheckedWrapper(module, ["cpu"] * replicas)
    wrapper = wrapper or DataParallelWithCallback(module, ["cpu"])  # Warnings quote the class of this wrapper.
    cls: Any = vars(type(wrapper)).get("_sync_original", type(wrapper))  # the class before `patch_replication_callback`
    bases = (CheckedWrapper,) if issubclass(CheckedWrapper, cls) else (cls, CheckedWrapper)
    methods = {name: getattr(CheckedWrapper, name) for name in ("replicate", "parallel_apply", "__call__")}
    object.__setattr__(parallel, "__class__", type(cls.__name__, bases, methods))
    kept = {*vars(nn.Module()), "device_ids", "output_device", "src_device_obj"}
    for name in vars(wrapper).keys() - kept:
        # If the user's wrapper keeps one of its own methods in an attribute, bind this method to the copy.
        held = vars(wrapper)[name]
        parallel.__dict__[name] = held.__func__.__get__(parallel) if getattr(held, "__self__", 0) is wrapper else held
    parallel.__dict__["_modules"] = {**vars(wrapper)["_modules"], "module": module}
    parallel.overridden = [name for name in _METHODS if name in vars(wrapper) or getattr(cls, name) not in _USUAL]
    return parallel


def rows_of_chunks(parallel: CheckedWrapper, replicas: int, inputs: Any, kwargs: Any) -> list[Rows]:
    """Return the rows of each replica's chunk.

    Raises:
        ValueError: for fewer than two replicas, or fewer than two chunks.
    """
    if replicas < 2:
        raise ValueError(f"expected at least two replicas to compare, but got {replicas=}; pass a larger number")
    if {"scatter", "forward"}.intersection(parallel.overridden):
        chunks = zip(*parallel.scatter(inputs, kwargs, ["cpu"] * replicas), strict=False)
        sizes = _sizes_of_chunks([*chunks], (inputs, kwargs), parallel.dim)
    else:
        sizes = Arguments(parallel, inputs, kwargs, replicas).sizes
    if len(sizes) < 2 and "forward" in parallel.overridden:  # The user's `forward` may split the batch itself.
        sizes = [1] * replicas
    if len(sizes) < 2 or not sum(sizes):
        raise ValueError(f"expected at least two chunks with rows, but got chunks of {sizes} rows; pass a larger batch")
    return [Rows(range(sum(sizes[:i]), sum(sizes[: i + 1])), sum(sizes)) for i in range(len(sizes))]


def pads_samples(parallel: CheckedWrapper, inputs: Any, kwargs: Any) -> bool:
    """Return whether an argument is a list of samples with different shapes, which `forward` may pad to one shape."""
    leaves = Arguments(parallel, inputs, kwargs, 1).tree.leaves
    lists = [leaf.value for leaf in leaves if leaf.splits_by_entry()]
    return any(len({entry.shape for entry in entries if isinstance(entry, Tensor)}) > 1 for entries in lists)


def _sizes_of_chunks(chunks: Sequence[Any], arguments: Any, dim: int) -> list[int]:
    """Return the number of rows in each of the chunks that the user's own `scatter` has made.

    Return the sizes along the first dimension that holds samples: its sizes in all chunks add up to a size in the
    batch, as 2 + 2 + 1 rows add up to 5. If no dimension does, return the lengths of lists.

    Args:
        chunks: a list of pairs (args, kwargs), one pair for each chunk.
        arguments: (args, kwargs) of the batch.
        dim: the dimension of a tensor that is tried first.
    """
    totals = {size for tensor in tensors_in(arguments) for size in tensor.shape if size}
    shapes = [[(*leaf.shape[dim:][:1], *leaf.shape) for leaf in tensors_in(chunk)] for chunk in chunks]
    for of_tensor in zip_longest(*shapes, fillvalue=()):  # A replica may have no tensor.
        for sizes in zip_longest(*of_tensor, fillvalue=0):
            if sum(sizes) in totals:
                return list(sizes)
    lists = [[value for value in children_of(args).values() if isinstance(value, (list, tuple))] for args, _ in chunks]
    # The first list in the arguments is assumed to have an entry for each sample.
    return [len(of_chunk[0]) if of_chunk else 0 for of_chunk in lists]
