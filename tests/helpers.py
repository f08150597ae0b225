"""What tests compare, and how closely: the tolerances are stated here, once."""

import copy
import ctypes
import importlib.util
import inspect
import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sync_batchnorm import DataParallelWithCallback, SyncMaster, convert_model, merge_messages, revert_model
from sync_batchnorm.layers import _SynchronizedBatchNorm
from sync_batchnorm.wrapper.data_parallel import unsupported_by_torch


def skip_module_without(*packages: str) -> None:
    """Skip the module that calls this where a package is not installed, without importing what costs a second each."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"could not find {', '.join(missing)}", allow_module_level=True)


def randomize(module: nn.Module) -> nn.Module:
    """Give every batch norm of `module` a random weight, negative in its first channel, and a random bias."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._NormBase):
            if child.weight is not None:
                nn.init.uniform_(child.weight, 0.5, 1.5)
                with torch.no_grad():
                    child.weight[:1].neg_()
            if child.bias is not None:
                nn.init.normal_(child.bias)
    return module


def as_devices(device_ids: Sequence[Any]) -> list[torch.device]:
    """Return the devices that the ids of a device list of `conftest.py` name."""
    return [torch.device("cuda", i) if isinstance(i, int) else torch.device(i) for i in device_ids]


def doubles(*shape: int, devices: Sequence[Any] = ("cpu",)) -> Tensor:
    """Return random numbers in float64 on the first of `devices`."""
    return torch.randn(*shape, dtype=torch.float64, device=as_devices(devices)[0])


def anatomy(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what every module of `model` consists of, as identities: all attributes but class and `_sync_layer`."""
    anatomies = {}
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key != "_sync_layer"}
        parts: dict[str, Any] = {"": id(module), **{key: id(value) for key, value in attributes.items()}}
        for attribute, value in attributes.items():
            if isinstance(value, dict):  # parameters, buffers, children, hooks
                parts.update({f"{attribute}.{key}": id(item) for key, item in value.items()})
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            parts[f"tensor {id(tensor)}"] = (tensor.requires_grad, tensor.dtype, tensor.device, id(tensor.grad))
        anatomies[name] = parts
    return anatomies


def classes(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Return the class of every module of `model`."""
    return {name: type(module) for name, module in model.named_modules()}


def assert_converts_and_reverts(model: nn.Module, label: str) -> None:
    """Check that conversion synchronizes every batch norm, changes nothing but classes, and is undone."""
    parts, kinds, metadata = anatomy(model), classes(model), model.state_dict()._metadata
    assert convert_model(model) is model, label  # without a warning
    layers = {name for name, kind in kinds.items() if issubclass(kind, nn.modules.batchnorm._BatchNorm)}
    assert layers == {name for name, layer in model.named_modules() if isinstance(layer, _SynchronizedBatchNorm)}, label
    assert all(isinstance(module, kinds[name]) for name, module in model.named_modules()), label
    assert (anatomy(model), model.state_dict()._metadata) == (parts, metadata), label
    assert revert_model(model) is model, label
    assert (anatomy(model), classes(model), model.state_dict()._metadata) == (parts, kinds, metadata), label


def saved_bytes(output: Tensor) -> int:
    """Return the bytes of the distinct tensors that the nodes behind `output` keep: hooks would change a layer."""
    sizes: dict[int, int] = {}
    nodes = [output.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following not in (None, *nodes)]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        saved = [*(node.saved_tensors if hasattr(node, "saved_tensors") else [getattr(node, name) for name in names])]
        for of_replica in node.saved if node.name() == "_SyncBatchNormBackward" else ():
            saved += of_replica.unpack()
        sizes |= {t.data_ptr(): t.numel() * t.element_size() for t in saved if isinstance(t, Tensor)}
    return sum(sizes.values())


class Operators(TorchDispatchMode):
    """Calls `note`, if it is given, with each operator of torch, its arguments and its result."""

    def __init__(self, note: Callable[[Any, Any, Any], object] = lambda *args: None) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self._note(operator, (args, kwargs), result)
        return result


class Net(nn.Module):
    """A module of the given attributes, whose forward is a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Named(Net):
    """A `Net` whose forward has the names of the function's arguments."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(function, forward=partial(function, self), **attributes)


class Numbered(Net):
    """A `Net` whose replicas know their number, if it has several."""

    number = 0

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.number = copy_id


class Cache:
    """Made of an iterable, as `DynamicCache` of transformers is for `nn.DataParallel`."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = [tuple(layer) for layer in layers]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)


class WithPipe(Net):
    """A `Net` whose replicas are connected, for `sync_moments` in its function, or by a `callback` of its own."""

    callback: Any = staticmethod(merge_messages)
    pipe: Any = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.master = SyncMaster(self.callback)
        self.pipe = ctx.master if copy_id == 0 else ctx.master.register_slave(copy_id)


class AdaIN(nn.Module):
    """As many projects write it: each sample is normalized alone, by a call of `F.batch_norm`."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, 1e-5, 0.1
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, input: Tensor) -> Tensor:
        statistics = [buffer.repeat(len(input)) for buffer in (self.running_mean, self.running_var)]
        output = nn.functional.batch_norm(input.reshape(1, -1, *input.shape[2:]), *statistics, training=True)
        return output.view(input.shape)


class Freezes(nn.Sequential):
    """Freezes its first layer whenever somebody calls train()."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[0].eval()
        return self


class TwoLayers(nn.Module):
    """Two layers with a ReLU in place between them: the smallest net with everything that can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)

    def forward(self, input: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(input)))))


def twins(
    module: nn.Module, devices: Sequence[Any], timeout: float = 5.0, **options: Any
) -> tuple[nn.Module, DataParallelWithCallback]:
    """Return `module` on one device and a synchronized copy of it on `devices`, with equal random parameters."""
    plain = randomize(module).to(as_devices(devices)[0])
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), devices, timeout=timeout, **options)
    return plain, parallel


# The options of a layer that has a weight and no bias; none with torch 2.8, whose layers have no `bias` argument.
WITHOUT_BIAS = [{"bias": False}] if "bias" in inspect.signature(nn.BatchNorm2d).parameters else []

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

TOLERANCES = {  # relative to the largest absolute value of the reference
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}


def count_calls(function: Callable[[], Any]) -> int:
    """Return how many functions of Python and C a call of `function` calls, itself included."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def outcome(function: Callable[[], Any]) -> tuple[type[Exception], str] | None:
    """Return what a call raises, by its type and the last line of its text; None if it returns."""
    try:
        function()
    except Exception as error:
        return type(error), str(error).rstrip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
    return None


def assert_same_refusal(plain: nn.Module, parallel: nn.Module, input: Tensor) -> None:
    """Check that the second refuses an input as the first does."""
    expected = outcome(lambda: plain(input))
    assert expected is not None, "one device takes it"
    assert outcome(lambda: parallel(input)) == expected


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """Run each body in a thread of its own; return what each has returned, or the `Exception` that it has raised."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(i: int) -> None:
        try:
            outcomes[i] = bodies[i]()
        except Exception as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Run each body in a thread of its own; return what each has returned, or raise the first error of them."""
    outcomes = together(*bodies)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def end_from_outside(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread when it next runs Python code, as tools do that end all threads but the main one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def assert_equal(actual: Tensor, expected: Tensor, label: str = "", tolerance: float | None = None) -> None:
    """Compare values, shape and dtype; the tolerance is that of the dtype, times the largest value or one."""
    assert actual.shape == expected.shape, f"{label}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{label}: {actual.dtype}, not {expected.dtype}"
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if not actual.dtype.is_floating_point or not actual.numel():
        assert torch.equal(actual.cpu(), expected.cpu()), f"{label}: {actual}, not {expected}"
        return
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    largest = max(1.0, float(expected.abs().max()))
    error = float((actual - expected).abs().max())
    assert error <= tolerance * largest, f"{label}: off by {error:.3g} of {largest:.3g}, allowed {tolerance:g} of it"


def assert_like(text: str, expected: str) -> None:
    """Compare a text with an expected one, in which "..." stands for any text."""
    pattern = ".+".join(map(re.escape, expected.split("...")))
    assert re.fullmatch(pattern, text, re.DOTALL), f"{text}\n\nnot\n\n{expected}"


def assert_same_tree(actual: Any, expected: Any, label: str = "output", tolerance: float | None = None) -> None:
    """Compare types, keys, values and attributes of two trees; what both share is not looked into."""
    if actual is expected:
        return
    assert type(actual) is type(expected), f"{label}: {actual!r}, not {expected!r}"
    if isinstance(expected, Tensor):
        return assert_equal(actual, expected, label, tolerance)
    ours, theirs = parts_of(actual), parts_of(expected)
    assert list(ours) == list(theirs), f"{label}: {actual!r}, not {expected!r}"
    if not theirs:
        assert actual == expected, f"{label}: {actual!r}, not {expected!r}"
    for key, part in theirs.items():
        assert_same_tree(ours[key], part, f"{label}{key}", tolerance)


def parts_of(tree: Any) -> dict[str, Any]:
    """Return the attributes, fields and items of a container, by how Python writes them."""
    names = {**getattr(tree, "__dict__", {}), **getattr(tree, "__dataclass_fields__", {})}
    names |= {"default_factory": None} if isinstance(tree, defaultdict) else {}
    parts = {f".{name}": getattr(tree, name) for name in names if name != "maps"}  # A `ChainMap` may have fewer.
    if isinstance(tree, Mapping):  # which may iterate over something else than its keys
        parts.update({f"[{key!r}]": tree[key] for key in tree.keys()})  # noqa: SIM118
    elif isinstance(tree, (list, tuple, deque)):
        parts.update({f"[{i}]": item for i, item in enumerate(tree)})
    return parts


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [tree] if isinstance(tree, Tensor) else [t for part in parts_of(tree).values() for t in tensors_of(part)]


def are_distinct_gpus(device_ids: Sequence[Any]) -> bool:
    """Return whether torch's own scatter, replicate, parallel_apply and gather are used for these devices."""
    return len(device_ids) > 1 and not unsupported_by_torch(tuple(as_devices(device_ids)))


def assert_same_gradient(
    actual: Tensor | None, expected: Tensor | None, label: str = "", tolerance: float | None = None
) -> None:
    """Compare the gradient of a parameter with that of the reference, which may have none."""
    assert (actual is None) == (expected is None), label
    if actual is not None and expected is not None:
        assert_equal(actual, expected, label, tolerance)


def assert_same_state(parallel: nn.Module, plain: nn.Module, tolerance: float | None = None) -> None:
    """Compare parameters, their gradients, and buffers of two modules, name by name."""
    actual = parallel.module if isinstance(parallel, nn.DataParallel) else parallel
    assert list(actual.state_dict()) == list(plain.state_dict())
    for name, expected in plain.state_dict().items():
        assert_equal(actual.state_dict()[name], expected, name, tolerance)
    for name, parameter in plain.named_parameters():
        assert_same_gradient(actual.get_parameter(name).grad, parameter.grad, f"gradient of {name}", tolerance)


def assert_same_step(
    plain: nn.Module, parallel: nn.Module, input: Tensor, grad: Tensor | None = None, counts: bool = True
) -> None:
    """Run one forward and one backward, with a random upstream gradient, on both; compare all results."""
    inputs = [input.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    expected, actual = plain(inputs[0]), parallel(inputs[1])
    assert_equal(actual, expected, "output")
    grad = torch.randn_like(expected) if grad is None else grad
    expected.backward(grad)
    actual.backward(grad)
    assert_equal(inputs[1].grad, inputs[0].grad, "input gradient")
    if not counts:  # The buffers may differ.
        for ours, theirs in zip(parallel.buffers(), plain.buffers(), strict=True):
            ours.data.copy_(theirs)
    assert_same_state(parallel, plain)


def assert_trains_as_one_device(
    module: nn.Module, devices: Sequence[Any], *shape: int, steps: int = 2
) -> tuple[nn.Module, DataParallelWithCallback]:
    """Compare steps of `module` in float64 with those of its `twins`, on random inputs of a shape; return the two."""
    plain, parallel = twins(module.double(), devices)
    for _ in range(steps):
        assert_same_step(plain, parallel, doubles(*shape, devices=devices))
    return plain, parallel


def assert_same_results(
    plain: nn.Module, parallel: nn.Module, compute: Callable[[nn.Module], Any], tolerance: float | None = None
) -> None:
    """Compare what `compute` returns for each of the two, tensor by tensor, and their state after it."""
    for i, (expected, actual) in enumerate(zip(compute(plain), compute(parallel), strict=True)):
        assert_equal(actual, expected, f"result {i}", tolerance)
    assert_same_state(parallel, plain, tolerance)


def run_parts(parallel: DataParallelWithCallback, parts: Sequence[Tensor], *more: Sequence[Any]) -> list[Tensor]:
    """Run one replica on each part, of any size, as a forward does, and on its one of `more` values of any kind."""
    device_ids = parallel.device_ids[: len(parts)]
    moved = [part.to(device) for part, device in zip(parts, as_devices(device_ids), strict=True)]
    replicas = parallel.replicate(parallel.module, device_ids)
    return parallel.parallel_apply(replicas, list(zip(moved, *more, strict=True)), [{} for _ in parts])


def as_rows(tensor: Tensor) -> Tensor:
    """Turn ``(N, C, +)`` into one sample of size one for each element of a channel: ``(N * sizes, C, 1, ...)``."""
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    return rows.view(*rows.shape, *[1] * (tensor.dim() - 2))


def assert_same_parts(plain: nn.Module, parallel: DataParallelWithCallback, parts: Sequence[Tensor]) -> None:
    """As `assert_same_step`, with one part for each replica; the reference gets all elements of all parts as rows."""
    first = as_devices(parallel.device_ids)[0]
    inputs, copies = ([part.detach().to(first, copy=True).requires_grad_() for part in parts] for _ in range(2))
    outputs = run_parts(parallel, inputs)
    assert [output.shape for output in outputs] == [part.shape for part in parts]
    expected = plain(torch.cat([as_rows(part) for part in copies]))
    assert_equal(torch.cat([as_rows(output.to(expected.device)) for output in outputs]), expected, "output")
    grads = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, grads)
    expected.backward(torch.cat([as_rows(grad.to(expected.device)) for grad in grads]))
    for i, (input, copied) in enumerate(zip(inputs, copies, strict=True)):
        assert_equal(input.grad, copied.grad, f"input gradient of part {i}")
    assert_same_state(parallel, plain)
