"""Make comparable copies ("twins") of a model and its wrapper, for one device and for replicas.

Twins compute on the CPU, in one dtype and without dropout, so that only real differences remain. `CheckMode` enforces
this, and tracks the running module calls. Parameters are perturbed before each pass: a weight of zeros, or two branches
with equal weights that cancel, would hide an error before them.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from ..layers import _SynchronizedBatchNorm
from ..torch_private import HOOKS, in_transform
from ..trees import children_of, tensors_in
from ..wrapper import Arguments, DataParallelWithCallback
from ..wrapper.hooks import hooks_of

__all__: list[str] = []

_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_DROPOUTS |= {"feature_dropout", "native_dropout", "dropout_", "alpha_dropout_", "feature_dropout_"}
OF_MODULES = {*vars(nn.Module()), "eps_mode"}  # names of attributes that modules have without the user
_OF_ORIGINAL = "hooks that refer to the model use attributes of the original, not the replica"


def seed(number: int) -> None:
    """Seed the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


# Hooks must reach the mode of their own thread, and torch keeps the active modes per thread. Therefore this is an
# overridable torch function: calling it invokes `__torch_function__` of the current mode.
@wrap_torch_function(lambda name, *_: (name,))
def notify_module_call(name: str, module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
    """Notify the mode of this thread about the begin or end of a module call. Threads without a mode ignore it."""


CallKey = tuple[str, int]  # name of a module, and number of its earlier calls in the same forward pass


@dataclass
class ModuleCall:
    """One call of a module, on one device or in a replica."""

    module: Any  # None for the code outside of all modules
    key: CallKey
    called: set[str] = field(default_factory=set)  # functions called by the module: batch_norm, sync_batch_norm, grad
    arguments: Any = None  # (args, kwargs), copied on one device; a replica keeps them only for a wrong output
    output: Any = None  # a copy of the output; a replica keeps it only if it is wrong in spite of right arguments
    agrees: bool = False  # in a replica: whether the arguments agree with the same call on one device
    # On one device: the same call in each replica, by the number of the replica.
    in_replicas: "dict[int, ModuleCall]" = field(default_factory=dict)


class CheckMode(TorchFunctionMode):
    """Make torch compute on the CPU, in `dtype` and without dropout."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.dropped = dict[str, None]()  # dropout functions that were switched off
        self.failed: tuple[ModuleCall, Exception] | None = None  # innermost call ended by an error
        self._running = [ModuleCall(None, ("", 0))]
        self.begun: Counter[str] = Counter()  # number of calls by module name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_transform():  # Tensors inside torch.vmap have no dimension of samples to compare.
            return None if func is notify_module_call else CheckMode.run(self, func, args, kwargs or {})
        return self._notify_module_call(*args) if func is notify_module_call else self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function with its tensors on the CPU, in the dtype of the check, and without dropout."""
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
        if not name.endswith("_"):  # In-place functions must write into the original tensors.
            args = tuple(map(self.converted, args))
        return self.converted(func(*args, **kwargs))

    def converted(self, value: Any) -> Any:
        """Move a tensor to the CPU and cast it to the dtype. Integers and 8-bit floats keep their dtype."""
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
        # The innermost call may belong to another module: an exception skips the end of calls, and a hook of the user
        # may raise before the begin of a call is noted here.
        while any(call.module is module for call in self._running):
            call = self._running.pop()
            if call.module is module:
                return self.end(call, *output)
        return None

    def begin(self, call: ModuleCall, arguments: Any) -> Any:
        """Note the begin of a call. May return arguments to use instead."""

    def end(self, call: ModuleCall, output: Any) -> Any:
        """Note the end of a call. May return an output to use instead."""


def _drops(args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a call of a dropout function is in training mode with a nonzero probability."""
    _, p, trains, *_ = (*args, None, None, None)  # Positional options come from torch.dropout and its variants only.
    return bool(kwargs.get("p", p) and kwargs.get("training", kwargs.get("train", trains)))


# Attributes with a probability (dropout, stochastic depth, skipped layers), by the package of the class. A class named
# DropPath counts as part of timm: users mostly copy it from there.
_DROPPING = ("drop_prob", "layerdrop", "drop_connect_rate")
_PACKAGES = ("timm", "transformers", "monai", "segmentation_models_pytorch")
_PROBABILITIES = {"torchvision": ("p",), **dict.fromkeys(_PACKAGES, _DROPPING)}


class _Copying(CheckMode):
    """Let `deepcopy` copy tensors inside a graph, too; torch itself refuses them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.converted(args[0]).detach().clone().requires_grad_(args[0].requires_grad)
        return super().__torch_function__(func, types, args, kwargs)


def copied(tree: Any, dtype: torch.dtype) -> Any:
    """Copy modules or arguments, with tensors in `dtype` on the CPU."""
    with torch.no_grad(), _Copying(dtype):  # Otherwise, parameters of copied scripted modules would have a grad_fn.
        return copy.deepcopy(tree)


class Twin:
    """A copy of a model and its arguments, with dropout off and hooks that notify the mode."""

    def __init__(self, model: nn.Module, arguments: Any, dtype: torch.dtype, is_one: bool) -> None:
        self._original = model
        self.dropped = dict[str, None]()  # names of attributes whose dropout was switched off
        self.order = dict[str, None]()  # names of parameters in the order of their gradients
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
                module.__dict__["eps_mode"] = "plus"  # Without an exchange, layers always use this rule.
                if is_one and module._former_class is not None:  # The class before conversion is the reference.
                    object.__setattr__(module, "__class__", module._former_class)
            if isinstance(module, nn.DataParallel):
                module.device_ids = []  # An inner wrapper then calls its module directly.
            for hooks in [vars(module)[hooks] for hooks in HOOKS if hooks in vars(module)]:
                hooks.update({number: _rebound(hook, copies) for number, hook in hooks.items()})
            if not isinstance(module, torch.jit.ScriptModule):  # Scripted modules refuse Python hooks.
                # It stands before the user's hooks, because they may raise.
                module.register_forward_pre_hook(partial(notify_module_call, name), with_kwargs=True, prepend=True)
                module.register_forward_hook(partial(notify_module_call, name), with_kwargs=True, always_call=True)

    def _take_over_attributes(self, model: nn.Module) -> None:
        """Copy the user's attributes of parameters and buffers, and hook parameters to note their gradients' order."""
        originals: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self.module.named_parameters():
            if originals[name].requires_grad:  # Copies of scripted modules lose this flag.
                # Only the name is noted: `.grad` keeps the gradient without another copy.
                parameter.requires_grad_().register_hook(lambda _, name=name: self.order.setdefault(name))
        originals |= dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            vars(tensor).update(vars(originals[name]))

    def text_of_hooks(self) -> str:
        """Return a note about a hook that refers to the user's model in place of this copy, or "".

        Such a hook uses an attribute or a container of the user's model, while methods use that of the copy. So a value
        from the hook does not reach the methods.
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
            words &= {*code.co_names, *code.co_consts}  # Code with setattr has the name of the attribute as a constant.
            used = [key for value in values if isinstance(value, nn.Module) for key in vars(value) if key in words]
            if used := [*used, *[names[id(value)] for value in values if id(value) in names]]:
                name = f"{hook.__qualname__} of {module or 'the model itself'} ({', '.join(used)})"
                return f'{_OF_ORIGINAL}: {name}, see "Hooks that refer to the model"'
        return ""

    def memory(self) -> dict[str, Tensor]:
        """Return views of parameters and buffers, to detect later whether `forward` replaced their memory."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor.detach() for name, tensor in tensors if tensor.layout == torch.strided}

    def _switch_off_dropout(self, name: str, module: nn.Module) -> None:
        """Set the dropout and stochastic depth attributes of a module to 0."""
        package = "timm" if type(module).__name__ == "DropPath" else type(module).__module__.partition(".")[0]
        is_of_torch = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
        names = ("dropout",) if is_of_torch else _PROBABILITIES.get(package, ())
        for attribute, value in vars(module).items():
            if attribute.removeprefix("_") in names and type(value) is float and value:
                module.__dict__[attribute] = 0.0
                self.dropped[f"{name}.{attribute}".strip(".")] = None

    @torch.no_grad()
    def move_constants(self, is_moved: bool) -> None:
        """Perturb constant parameters (zeros, ones): a weight of zeros would hide an error before it."""
        for name, parameter in self.module.named_parameters():
            if is_moved and _trains(parameter) and bool(parameter.eq(first := parameter.flatten()[0]).all()):
                size = (0.1 * first.abs()).clamp(min=0.02) * (0.5 + _numbers_like(parameter, name).abs())
                parameter.add_(-size if first < 0 else size)  # Zeros become positive, so that their root is no NaN.

    @torch.no_grad()
    def move(self, index: int, by: float) -> None:
        """Perturb trainable parameters by about the fraction `by` of each value, differently in each pass."""
        for name, parameter in self.module.named_parameters():
            if _trains(parameter) and by:
                parameter.addcmul_(_numbers_like(parameter, f"{index} {name}"), parameter.abs(), value=by)


def _trains(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.layout == torch.strided and tensor.is_floating_point() and tensor.numel() > 0


def _numbers_like(parameter: Tensor, name: str) -> Tensor:
    """Return random numbers in the shape of a parameter, seeded by a name. They repeat after 1021, to save time."""
    generator, size = torch.Generator().manual_seed(zlib.crc32(name.encode())), parameter.numel()
    numbers = torch.randn(min(size, 1021), generator=generator, dtype=torch.float64)
    return numbers.to(parameter.dtype).repeat(size // len(numbers) + 1)[:size].reshape(parameter.shape)


def shortened(error: Exception, most: int) -> str:
    """Return the first `most` words of the text of an error."""
    words = str(error).split()
    return " ".join(words[:most]) + (" ..." if len(words) > most else "")


def _rebound(hook: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return a hook whose closure holds the copies instead of the user's modules."""
    closure = list[Any]()
    with suppress(ValueError):  # A variable of the closure is not set yet.
        closure = [cell.cell_contents for cell in hook.__closure__ or ()] if type(hook) is FunctionType else []
    if not copies.keys() & set(map(id, closure)):
        return hook
    cells = tuple([CellType(copies.get(id(value), value)) for value in closure])
    result = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    result.__kwdefaults__ = hook.__kwdefaults__
    return result


def go_backward(loss: Tensor, of_copy: Iterable[Any], mode: CheckMode) -> None:
    """Run the backward pass, and restore `.grad` of all leaves outside the copy, such as the user's parameters."""
    known, edge = {*map(id, of_copy)}, torch.autograd.graph.get_gradient_edge(loss)
    nodes = new = set[Any]({edge.node})
    while new := {following for node in new for following, _ in node.next_functions} - nodes - {None}:
        nodes = nodes | new
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    grads = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in known]
    for leaf, _ in grads:
        leaf.grad = None  # Otherwise autograd would add to the user's tensor in place.
    with mode:  # Checkpoints run the forward pass again, and need the mode, too.
        torch.autograd.backward(edge)  # With a tensor in place of the edge, torch would leave the mode.
    for leaf, grad in grads:
        leaf.grad = grad


class Rows(NamedTuple):
    """Range of the rows of a chunk, and the number of rows of the batch."""

    here: range
    total: int


_METHODS = ("scatter", "gather", "forward")
_USUAL = {getattr(cls, name) for cls in (nn.DataParallel, DataParallelWithCallback) for name in _METHODS}


class CheckedWrapper(DataParallelWithCallback):
    """A wrapper for CPU replicas. Each replica runs in its own mode."""

    overridden: Sequence[str] = ()  # names of the methods that the user's wrapper overrides
    modes: Sequence[CheckMode]
    returned: Sequence[Any] = ()  # output of each replica

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(self.device_ids) > 1:
            return super().forward(*inputs, **kwargs)
        args, kwargs_of = self.scatter(inputs, kwargs, self.device_ids)
        of_one = args[0] if isinstance(args[0], (list, tuple)) else args[:1]  # torch's parallel_apply does the same.
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
    """Return a wrapper for CPU replicas of `module` with the methods and attributes of the user's wrapper."""
    parallel = CheckedWrapper(module, ["cpu"] * replicas)
    wrapper = wrapper or DataParallelWithCallback(module, ["cpu"])  # Warnings show the name of this class.
    cls: Any = vars(type(wrapper)).get("_sync_original", type(wrapper))  # the user's class, if the object was patched
    bases = (CheckedWrapper,) if issubclass(CheckedWrapper, cls) else (cls, CheckedWrapper)
    methods = {name: getattr(CheckedWrapper, name) for name in ("replicate", "parallel_apply", "__call__")}
    object.__setattr__(parallel, "__class__", type(cls.__name__, bases, methods))
    kept = {*vars(nn.Module()), "device_ids", "output_device", "src_device_obj"}
    for name in vars(wrapper).keys() - kept:
        held = vars(wrapper)[name]  # A method set on the user's object is bound again, to this wrapper.
        parallel.__dict__[name] = held.__func__.__get__(parallel) if getattr(held, "__self__", 0) is wrapper else held
    parallel.__dict__["_modules"] = {**vars(wrapper)["_modules"], "module": module}
    parallel.overridden = [name for name in _METHODS if name in vars(wrapper) or getattr(cls, name) not in _USUAL]
    return parallel


def rows_of_chunks(parallel: CheckedWrapper, replicas: int, inputs: Any, kwargs: Any) -> list[Rows]:
    """Return the rows of each replica's chunk.

    Raises:
        ValueError: for fewer than two chunks.
    """
    if replicas < 2:
        raise ValueError(f"expected at least two replicas to compare, but got {replicas=}; pass a larger number")
    if {"scatter", "forward"}.intersection(parallel.overridden):
        chunks = zip(*parallel.scatter(inputs, kwargs, ["cpu"] * replicas), strict=False)
        sizes = _sizes_of_chunks([*chunks], (inputs, kwargs), parallel.dim)
    else:
        sizes = Arguments(parallel, inputs, kwargs, replicas).sizes
    if len(sizes) < 2 and "forward" in parallel.overridden:  # A custom forward may split the batch itself.
        sizes = [1] * replicas
    if len(sizes) < 2 or not sum(sizes):
        raise ValueError(f"expected at least two chunks with rows, but got chunks of {sizes} rows; pass a larger batch")
    return [Rows(range(sum(sizes[:i]), sum(sizes[: i + 1])), sum(sizes)) for i in range(len(sizes))]


def _sizes_of_chunks(chunks: Sequence[Any], arguments: Any, dim: int) -> list[int]:
    """Return the number of rows of each chunk.

    A custom `scatter` does not report it. Therefore we search for a dimension whose sizes in all chunks add up to a
    size in the batch: first of tensors, then of lists.
    """
    totals = {size for tensor in tensors_in(arguments) for size in tensor.shape if size}
    shapes = [[(*leaf.shape[dim:][:1], *leaf.shape) for leaf in tensors_in(chunk)] for chunk in chunks]
    for of_tensor in zip_longest(*shapes, fillvalue=()):  # A replica may have no tensor.
        for sizes in zip_longest(*of_tensor, fillvalue=0):
            if sum(sizes) in totals:
                return list(sizes)
    lists = [[value for value in children_of(args).values() if isinstance(value, (list, tuple))] for args, _ in chunks]
    return [len(of_chunk[0]) if of_chunk else 0 for of_chunk in lists]  # lists with an entry for each sample
