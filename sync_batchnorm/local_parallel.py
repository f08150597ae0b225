"""A `DataParallel` for any devices: replicas on the CPU, and several replicas on one device.

`torch.nn.parallel` refuses both. The four steps here do what its four do, with two differences that one device allows:
replicas share the storage of the parameters instead of copying it, and their gradients add up in the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from sync_batchnorm.compilation import uncompiled
from sync_batchnorm.errors import CapturedError
from sync_batchnorm.warning import warn

__all__: list[str] = []

DeviceId = int | str | torch.device
Cuts = dict[int, tuple[Tensor, Sequence[Tensor]]]  # what was cut, and its chunks, by the id of what was cut


class Place(NamedTuple):
    """Where a replica computes: its device, and on CUDA the stream there."""

    device: torch.device
    stream: torch.cuda.Stream | None  # None where there are none

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which this stream, and with it its device, is the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


_CPU = Place(torch.device("cpu"), None)


def current_place(device: torch.device) -> Place:
    """Return `device`, and the stream there that this thread uses."""
    if device.type == "cpu":
        return _CPU
    return Place(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


_cuts: ContextVar[Cuts | None] = ContextVar("sync_batchnorm_cuts", default=None)  # of the call in this thread


class AnyDeviceDataParallel(nn.DataParallel[Any]):
    """`torch.nn.DataParallel` that also takes CPU replicas and several replicas on one device."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
    ) -> None:
        devices = [as_device(device) for device in device_ids or ()]
        if not is_local(devices):
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            if not self.device_ids:  # Without an accelerator torch returns before it has set these.
                self.dim, self.output_device = dim, output_device  # type: ignore[assignment]
            return
        if len({device.type for device in devices}) > 1:
            raise ValueError(
                f"expected device_ids of one kind, but got {[str(device) for device in devices]}; "
                "use accelerators or the CPU, not both"
            )
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.device_ids = devices  # type: ignore[assignment]
        self.output_device = devices[0] if output_device is None else as_device(output_device)  # type: ignore[assignment]
        self.src_device_obj = devices[0]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        cuts: Cuts = {}
        token = _cuts.set(cuts)
        try:
            output = super().forward(*inputs, **kwargs)
        finally:
            _cuts.reset(token)
        if cuts:
            _rejoin(cuts, self.dim)
        return output

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        kwargs = kwargs or {}
        if not inputs and not kwargs:
            return (), ()
        devices = [as_device(device) for device in device_ids]
        if len(devices) > 1:
            self._check_sizes(inputs, kwargs, len(devices))
        elif all(tensor.device == devices[0] for tensor in tensors_in((inputs, kwargs))):
            return (inputs,), (kwargs,)  # There is nothing to cut, and a view could not be changed in place.
        if not is_local(devices):
            return super().scatter(inputs, kwargs, device_ids)  # type: ignore[arg-type]
        chunks = scatter((inputs, kwargs), devices, self.dim, _cuts.get())
        return tuple(chunk[0] for chunk in chunks), tuple(chunk[1] for chunk in chunks)

    def _check_sizes(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> None:
        shapes, dim = [tuple(tensor.shape) for tensor in tensors_in((inputs, kwargs))], self.dim
        numbers = [_number_of_chunks(shape[dim], most) if -len(shape) <= dim < len(shape) else 0 for shape in shapes]
        if 0 in numbers or len(set(numbers)) > 1:
            raise ValueError(
                f"expected tensors that make equally many chunks along dimension {dim}, but got {shapes}, which make "
                f"{numbers} of {most}; give every tensor a row for each sample, and pass what all replicas share as a "
                "buffer of the module"
            )

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        devices = [as_device(device) for device in device_ids]
        if not is_local(devices):
            return super().replicate(module, device_ids)  # type: ignore[arg-type]
        return replicate(module, devices, not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        devices = [as_device(device) for device in self.device_ids[: len(replicas)]]
        if not is_local(devices):
            return super().parallel_apply(replicas, inputs, kwargs)
        return parallel_apply(replicas, inputs, kwargs, devices)

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        check_structures(outputs)
        devices = [tensors[0].device for tensors in map(tensors_in, outputs) if tensors]
        if not is_local(devices or [as_device(device) for device in self.device_ids]):
            return super().gather(outputs, output_device)  # type: ignore[arg-type]
        device = as_device(output_device)
        # Autocast would join tensors in its own dtype, or refuse those of another one.
        with torch.autocast(device.type, enabled=False):
            return gather(outputs, device, self.dim)


def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` that a device id names, with one name for each device.

    Raises:
        RuntimeError: in torch's words, for a kind of device that it does not know.
    """
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator is not None else "cuda", device)
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, 0)


def is_local(devices: Sequence[torch.device]) -> bool:
    """Return whether replicas on `devices` need this module instead of `torch.nn.parallel`."""
    return any(device.type == "cpu" for device in devices) or len(set(devices)) < len(devices)


def _number_of_chunks(size: int, most: int) -> int:
    """Return into how many chunks `torch.chunk` cuts; an empty dimension into as many empty ones as it may."""
    return -(-size // -(-size // most)) if size else most


class _Rejoin(torch.autograd.Function):
    """Give a tensor the graph of its chunks, which lie in its memory and were changed in place."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, *chunks: Tensor) -> Tensor:
        ctx.mark_dirty(whole)
        ctx.dim, ctx.sizes = dim, [chunk.shape[dim] for chunk in chunks]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.zeros_like(grad), None, *torch.split(grad, ctx.sizes, ctx.dim)


@uncompiled
def _rejoin(cuts: Cuts, dim: int) -> None:
    """Apply the in-place changes of chunks to the tensors that were cut: to their graphs and to their versions."""
    for whole, chunks in cuts.values():
        if not whole.is_inference() and any(chunk._version for chunk in chunks):
            _Rejoin.apply(whole, dim, *chunks)  # type: ignore[no-untyped-call]


class _Share(torch.autograd.Function):
    """Give a replica tensors of its own over the same storage, as `Broadcast` gives it copies."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def _share(tensors: dict[int, Tensor], first: bool, detach: bool) -> dict[int, Tensor]:
    """Return the tensors of a replica: the same storage, and gradients for the originals unless they are detached.

    NOTE [parameters that a forward changes]: A module may change its parameters in its forward, under `no_grad`. For
    that, the first replica has views, which autograd treats as it treats the originals. The others count their changes
    separately, so the backward of one of them does not notice that another one has changed what it has saved. That is
    right if all make the same change, and it is one that may be made any number of times, as `clamp_` is.
    `_warn_of_shared_changes` warns, because this need not be so.
    """
    copies = {}
    differentiable = [] if detach else [key for key, tensor in tensors.items() if tensor.requires_grad]
    if first:
        copies = {key: tensors[key][...] for key in differentiable}  # a view that lets sparse gradients through
    elif differentiable:
        shared = _Share.apply(*[tensors[key] for key in differentiable])  # type: ignore[no-untyped-call]
        copies = dict(zip(differentiable, shared, strict=True))
    for key, tensor in tensors.items():
        if key not in copies:
            copies[key] = tensor.detach() if first else tensor.data
    return copies


def _warn_of_shared_changes(replicas: Sequence[Any]) -> None:
    """Warn of parameters that replicas have changed in place in memory that they share, see the note there."""
    shares = [share for replica in replicas for share in replica.__dict__.get("_sync_shares", {}).items()]
    changed = sorted({name for name, tensor in shares if not tensor.is_inference() and tensor._version})
    if changed:
        warn(
            f"expected parameters that replicas share to stay as they are, but got {changed} changed in place by each "
            "of them, at the same time; that is right for a change which may be made any number of times, such as "
            "clamp_, but make any other outside of the forward"
        )


def replicate(module: nn.Module, devices: Sequence[torch.device], detach: bool) -> list[nn.Module]:
    """Return one replica of `module` for each of `devices`.

    On the first replica of a device the buffers are those that were put there: the module's own on the first device.
    Further replicas of that device get copies. Parameters are non-leaf tensors over shared storage.
    """
    distinct = list(dict.fromkeys(devices))
    if len(distinct) == 1:
        template = _Template(module)
        return [template.replica(i == 0, detach) for i in range(len(devices))]
    placed = dict(zip(distinct, nn.parallel.replicate(module, distinct, detach), strict=True))
    templates = {device: _Template(replica) for device, replica in placed.items()}
    # The first replica of each device is the one that torch has made.
    return [placed.pop(device) if device in placed else templates[device].replica(False, detach) for device in devices]


class _Part(NamedTuple):
    """A submodule: what a replica of it refers to, by name."""

    module: nn.Module
    children: dict[str, nn.Module]
    absent: list[str]  # parameters that are None
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    plain: bool  # whether attributes may be set without asking the module


class _Template:
    """A module that was looked through once, to be replicated several times."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._parts = [_part_of(module) for module in root.modules()]
        shared = [tensor for part in self._parts for tensor in part.parameters.values()]
        buffers = [buffer for part in self._parts for buffer in part.buffers.values()]
        self._shared = {id(tensor): tensor for tensor in [*shared, *[b for b in buffers if b.requires_grad]]}
        self._buffers = {id(buffer): buffer for buffer in buffers if id(buffer) not in self._shared}
        self._names = {
            id(tensor): f"{prefix}.{name}" if prefix else name
            for (prefix, _), part in zip(root.named_modules(), self._parts, strict=True)
            for name, tensor in [*part.parameters.items(), *part.buffers.items()]
            if id(tensor) in self._shared
        }

    def replica(self, first: bool, detach: bool) -> nn.Module:
        """Return one more replica; the first has the buffers of the module itself."""
        # NOTE [replicas of modules]: `_replicate_for_data_parallel` is the private hook of torch's own `replicate`.
        # RNNs, lazy and scripted modules override it. It has been there, unchanged, since torch 1.5. The copy has
        # dictionaries of its own for buffers and submodules. They are filled directly, since to set hundreds of
        # attributes through `nn.Module.__setattr__` takes longer than all the rest of a replication.
        replicas: dict[nn.Module, nn.Module] = {
            part.module: part.module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            for part in self._parts
        }
        tensors = _share(self._shared, first, detach)
        for key, buffer in self._buffers.items():
            tensors[key] = buffer if first else buffer.detach().clone()
        for part in self._parts:
            replica = replicas[part.module]
            parameters = {name: tensors[id(tensor)] for name, tensor in part.parameters.items()}
            buffers = {name: tensors[id(buffer)] for name, buffer in part.buffers.items()}
            for name in part.absent:
                replica._parameters[name] = None
            for name, child in part.children.items():
                replica._modules[name] = replicas[child]
            replica.__dict__["_former_parameters"] = parameters
            if part.plain:
                replica.__dict__.update(parameters)
                replica._buffers.update(buffers)
            else:
                for name, tensor in (parameters | buffers).items():
                    setattr(replica, name, tensor)
        if not first:
            shares = {name: tensors[key] for key, name in self._names.items()}
            replicas[self._root].__dict__["_sync_shares"] = shares
        return replicas[self._root]


def _part_of(module: nn.Module) -> _Part:
    # In a replica that torch made, parameters are plain attributes, listed here for DistributedDataParallel.
    former: dict[str, Tensor] = module.__dict__.get("_former_parameters", {})
    return _Part(
        module,
        {name: child for name, child in module._modules.items() if child is not None},
        [name for name, parameter in module._parameters.items() if parameter is None],
        former | {name: parameter for name, parameter in module._parameters.items() if parameter is not None},
        {name: buffer for name, buffer in module._buffers.items() if buffer is not None},
        type(module).__setattr__ is nn.Module.__setattr__,
    )


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Call each module with its inputs, each in a thread of its own, and return the outputs in order.

    The threads are daemons: after Ctrl-C in the caller, a replica that is busy does not keep the process alive.

    NOTE [ends of threads]: None ends before all replicas are through. On a free-threaded Python, a thread that has run
    a backward must not end while another one drops objects that it has made, see docs/free-threading.md; replicas share
    the nodes of their layers, so they would.

    Raises:
        BaseException: the exception of the lowest replica that failed, as `CapturedError.rebuild` makes it.
    """
    outputs: list[Any] = [None] * len(modules)
    failures: list[CapturedError | None] = [None] * len(modules)
    places = [current_place(device) for device in devices]
    cores = _Cores(len(modules)) if devices[0].type == "cpu" else None
    through: SimpleQueue[int] = SimpleQueue()
    running = threading.Lock()  # see NOTE [ends of threads]

    def work(i: int) -> None:
        try:
            if cores is not None:
                cores.take_share()
            with places[i].entered():
                args = inputs[i] if isinstance(inputs[i], (list, tuple)) else (inputs[i],)
                outputs[i] = modules[i](*args, **kwargs_tup[i])
        except BaseException as error:
            failures[i] = CapturedError(error, i, str(devices[i]))
        finally:
            through.put(i)
        with running:
            pass

    if len(modules) == 1:
        work(0)
    else:
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(modules))]
        begun = 0
        with running:
            try:
                for thread in threads:
                    thread.start()
                    begun += 1
            finally:  # a process may have no more threads
                if cores is not None:
                    cores.restore(begun)
            for _ in threads:
                through.get()
        for thread in threads:
            thread.join()
    for failure in failures:
        if failure is not None:
            raise failure.rebuild()
    _warn_of_shared_changes(modules)
    return outputs


class _Cores:
    """The intra-op threads of the caller, divided among the threads of its replicas on the CPU.

    Otherwise each of them would start as many as the caller has. The backward, in the caller's thread, has them all.

    NOTE [numbers of threads]: `torch.set_num_threads` sets the number of the calling thread, and that with which other
    threads begin, when they ask for theirs for the first time. So a replica asks before it sets its own, and when all
    have set theirs, the caller sets its own again.
    """

    def __init__(self, num_replicas: int) -> None:
        self._all = torch.get_num_threads()
        self._share = max(1, self._all // num_replicas)
        self._taken: SimpleQueue[None] = SimpleQueue()

    def take_share(self) -> None:
        """In the thread of a replica."""
        try:
            if self._share < self._all:
                torch.get_num_threads()
                torch.set_num_threads(self._share)
        finally:
            self._taken.put(None)

    def restore(self, begun: int) -> None:
        """In the thread of the caller, once it has started those of `begun` replicas."""
        try:
            for _ in range(begun):
                self._taken.get()
        finally:
            if self._share < self._all:
                torch.set_num_threads(self._all)


class CallerState:
    """Grad mode, inference mode, and autocast with its dtype, as they are in the thread that makes this object.

    All of it is local to a thread. Torch's own `parallel_apply` carries the grad mode, and whether autocast is on.
    """

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        accelerator = torch.accelerator.current_accelerator()
        device_types = ["cpu", accelerator.type] if accelerator is not None else ["cpu"]
        self._autocast = [
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in device_types
            if torch.is_autocast_enabled(device_type)
        ]

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which another thread has these modes too."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode() if self._inference else torch.set_grad_enabled(self._grad))
        for device_type, dtype in self._autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self._cache))
        return stack


def _is_namedtuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_asdict") and hasattr(tree, "_fields")


def _rebuild(like: Any, items: Sequence[Any]) -> Any:
    """Make a container of the type of `like`; the items of a dict are its values."""
    if isinstance(like, dict):
        return type(like)(zip(like, items, strict=True))
    return type(like)(*items) if _is_namedtuple(like) else type(like)(items)


def _children(tree: Any) -> list[Any] | None:
    """Return what a container holds, or None for a leaf."""
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, (list, tuple)) else None


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree of tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for child in _children(tree) or () for tensor in tensors_in(child)]


def scatter(tree: Any, devices: Sequence[torch.device], dim: int, cuts: Cuts | None = None) -> list[Any]:
    """Cut every tensor of `tree` into at most ``len(devices)`` chunks along `dim`, and return one tree for each chunk.

    Containers keep their type; what is not a tensor is shared by all. No copy is made where none is needed.

    Args:
        tree: what is cut.
        devices: where the chunks are to be.
        dim: the dimension to cut along.
        cuts: gets the tensors whose chunks may be changed in place, so that `_rejoin` can apply the changes to them.
            None: no chunk of a tensor in a graph may be changed.
    """
    if isinstance(tree, Tensor):
        chunks = _chunks(tree, len(devices), dim, cuts)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    children = _children(tree)
    if not children:
        return [tree if children is None else _rebuild(tree, []) for _ in devices]
    parts = [scatter(child, devices, dim, cuts) for child in children]
    return [_rebuild(tree, part) for part in zip(*parts, strict=False)]


def _chunks(tensor: Tensor, number: int, dim: int, cuts: Cuts | None) -> Sequence[Tensor]:
    """Cut one tensor.

    Chunks that are views must not be changed in place if they are in a graph; and they count their changes together, so
    that a change of one would look like one of all that others have saved. Those of `unsafe_chunk` lie in the same
    memory, and are tensors of their own. A leaf that requires grad must not be changed on one device either.
    """
    if cuts is None or tensor.is_nested or (tensor.is_leaf and tensor.requires_grad):
        return tensor.chunk(number, dim)
    if id(tensor) not in cuts:
        cuts[id(tensor)] = tensor, tensor.unsafe_chunk(number, dim)
    return cuts[id(tensor)][1]


def check_structures(outputs: Sequence[Any]) -> None:
    """Check that all replicas have returned the same structure, whatever the values in it.

    Raises:
        ValueError: naming two replicas that have not, and what they have returned.
        TypeError: if something else than tensors, containers and None was returned.
    """
    structures = list(map(_structure, outputs))
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"expected replicas to return one structure, but got {structures[0]} from replica 0 and {structure} "
                f"from replica {i}; return the same keys, lengths and types in every replica, for example an empty "
                "tensor where one has nothing"
            )


def _structure(tree: Any) -> str:
    if tree is None:
        return "None"
    if isinstance(tree, Tensor):
        return "Tensor" if tree.dim() else "scalar Tensor"
    if isinstance(tree, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {_structure(value)}" for key, value in tree.items())) + "}"
    children = _children(tree)
    if children is not None:
        return "(" + ", ".join(map(_structure, children)) + ")"
    if not isinstance(tree, Iterable) or isinstance(tree, (str, bytes, Set, Iterator)):
        raise _not_tensors(tree)
    return type(tree).__name__  # `torch.nn.parallel.gather` tries to build it from an iterator


def _not_tensors(tree: Any) -> TypeError:
    return TypeError(
        f"expected the replicas to return tensors, tuples, lists, dicts or None, but got {type(tree).__name__}; "
        "return tensors"
    )


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Put the outputs of all replicas together on `device`: tensors are concatenated along `dim`.

    Scalars become a vector, with the warning of torch. Containers keep their type, None stays None. All outputs have
    the structure of the first, see `check_structures`.

    Raises:
        TypeError: if something else than tensors, containers and None was returned.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if all(output.dim() == 0 for output in outputs) and dim == 0:
            warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
                "and return a vector."
            )
            return torch.stack([output.to(device) for output in outputs])
        return torch.cat([output.to(device) for output in outputs], dim)
    if first is None:
        return None
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    children = _children(first)
    if children is None:
        raise _not_tensors(first)
    parts = zip(*outputs, strict=True)
    return _rebuild(first, [gather(part, device, dim) for part in parts])
