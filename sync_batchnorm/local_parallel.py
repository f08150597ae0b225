"""A `DataParallel` for any devices: replicas on the CPU, and several replicas on one device.

`torch.nn.parallel` refuses both. Scatter, replicate, apply and gather do what they do there, with two differences that
one device allows: replicas share the storage of the parameters instead of copying it, and the engine adds up their
gradients. Scatter and gather are in `scatter_gather.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from sync_batchnorm.errors import CapturedError
from sync_batchnorm.places import current_place
from sync_batchnorm.scatter_gather import check_structures, gather, scatter, tensors_in
from sync_batchnorm.torch_private import Broadcast, plain_tensors, set_sequence_number

__all__: list[str] = []

DeviceId = int | str | torch.device


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
        if not needs_own_parallel(devices):
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            if not self.device_ids:  # Without an accelerator, torch returns before it sets these.
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

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        kwargs = kwargs or {}
        if not inputs and not kwargs:
            return (), ()
        devices = [as_device(device) for device in device_ids]
        if len(devices) > 1:
            self._check_sizes(inputs, kwargs, len(devices))
        elif all(tensor.device == devices[0] for tensor in tensors_in((inputs, kwargs))):
            return (inputs,), (kwargs,)  # There is nothing to cut into chunks.
        if not needs_own_parallel(devices):
            return super().scatter(inputs, kwargs, device_ids)  # type: ignore[arg-type]
        chunks = scatter((inputs, kwargs), devices, self.dim)
        return tuple(chunk[0] for chunk in chunks), tuple(chunk[1] for chunk in chunks)

    def _check_sizes(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> None:
        shapes, dim = [tuple(tensor.shape) for tensor in tensors_in((inputs, kwargs))], self.dim
        numbers = [_number_of_chunks(shape[dim], most) if -len(shape) <= dim < len(shape) else 0 for shape in shapes]
        if 0 in numbers or len(set(numbers)) > 1:
            raise ValueError(
                f"expected tensors that make equally many chunks along dimension {dim}, but got {shapes}, which make "
                f"{numbers} of {most}; give every tensor a row for each sample, and pass what every replica "
                "needs as a whole as a buffer of the module"
            )

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        devices = [as_device(device) for device in device_ids]
        if not needs_own_parallel(devices):
            return _replicas_on(module, devices, not torch.is_grad_enabled())
        return replicate(module, devices, not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        devices = [as_device(device) for device in self.device_ids[: len(replicas)]]
        if not needs_own_parallel(devices):
            return super().parallel_apply(replicas, inputs, kwargs)
        shared = [(name, own, own._version) for name, own in self.module.named_parameters() if not own.is_inference()]
        outputs = parallel_apply(replicas, inputs, kwargs, devices)
        changed = [name for name, parameter, version in shared if parameter._version != version]
        if changed and len(replicas) > 1:
            raise RuntimeError(
                f"expected parameters that stay as they are in a forward, but got {changed} changed in place in one of "
                f"{len(replicas)} replicas, which share their memory, so that each would make the change again; change "
                "parameters outside of the forward, under torch.no_grad()"
            )
        return outputs

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        check_structures(outputs)
        devices = [tensors[0].device for tensors in map(tensors_in, outputs) if tensors]
        if not needs_own_parallel(devices or [as_device(device) for device in self.device_ids]):
            return super().gather(outputs, output_device)  # type: ignore[arg-type]
        device = as_device(output_device)
        # Autocast would concatenate in its own dtype, or refuse tensors of another dtype. Torch gathers plain tensors.
        with torch.autocast(device.type, enabled=False), plain_tensors():
            return gather(outputs, device, self.dim)


def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` that a device id names, the same one for all ids of a device.

    Raises:
        RuntimeError: torch's own, for a kind of device that torch does not know.
    """
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator is not None else "cuda", device)
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, 0)


def needs_own_parallel(devices: Sequence[torch.device]) -> bool:
    """Return whether replicas on `devices` need this file instead of `torch.nn.parallel`."""
    return any(device.type == "cpu" for device in devices) or len(set(devices)) < len(devices)


def _number_of_chunks(size: int, most: int) -> int:
    """Return into how many chunks `torch.chunk` cuts `size`, at most `most`; if empty, into `most` empty ones."""
    return -(-size // -(-size // most)) if size else most


class _Alias(torch.autograd.Function):
    """Give a replica a tensor of its own over the same storage, as `Broadcast` gives it a copy."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        # NOTE [order of gradients]: Of all nodes that are ready, the engine runs the one with the highest number, and
        # these are older than the forward. With the highest number they pass on each gradient when it is computed: so
        # hooks of a parameter run when they would on one device, and the gradients of replicas are added up at once.
        set_sequence_number(ctx, 2**63 - 1)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def replicate(module: nn.Module, devices: Sequence[torch.device], detach: bool) -> list[nn.Module]:
    """Return one replica of `module` for each of `devices`.

    Parameters are non-leaf tensors; all replicas on one device share their storage. The first replica on each device
    has the buffers that are there, on the first device those of the module itself; the others get copies.
    """
    placed = {devices[0]: module}
    if len(distinct := list(dict.fromkeys(devices))) > 1:
        placed = dict(zip(distinct, _replicas_on(module, distinct, detach), strict=True))
    numbers = Counter(devices)
    replicas = {device: iter(_replicas_of(copy, numbers[device], detach)) for device, copy in placed.items()}
    return [next(replicas[device]) for device in devices]


def _replicas_on(module: nn.Module, devices: Sequence[torch.device], detach: bool) -> list[nn.Module]:
    """Return a replica of a module on each of several distinct devices, with copies of its tensors made by torch."""
    if Broadcast is None or any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        return nn.parallel.replicate(module, devices, detach)
    parameters, buffers = list(module.parameters()), list(module.buffers())
    recorded = [buffer for buffer in buffers if buffer.requires_grad and not detach]
    rest = [buffer for buffer in buffers if not buffer.requires_grad or detach]
    tensors: dict[int, list[Tensor]] = {}  # the tensor of each replica, by the id of the original
    for originals, detached in ((parameters, detach), (recorded, False), (rest, True)):
        if originals and detached:
            sent = comm.broadcast_coalesced(originals, devices)  # type: ignore[no-untyped-call]
            copies = [[_as(copy, of) for copy, of in zip(own, originals, strict=True)] for own in sent]
        elif originals:
            sent = Broadcast.apply(devices, *originals)
            copies = [list(sent[i : i + len(originals)]) for i in range(0, len(sent), len(originals))]
        else:
            continue
        tensors |= {id(original): [own[i] for own in copies] for i, original in enumerate(originals)}

    def copies_of(original: Tensor) -> list[Tensor]:
        # A replica may be replicated again: its tensors are no parameters, and stay where they are, as in torch.
        return tensors.get(id(original)) or [original] * len(devices)

    return _build(module, len(devices), copies_of, copies_of)


def _as(copy: Tensor, original: Tensor) -> Tensor:
    """Return `copy`, which may have been copied as real numbers, with the same kind of numbers as `original`."""
    return torch.view_as_complex(copy) if original.is_complex() and not copy.is_complex() else copy


def _replicas_of(module: nn.Module, number: int, detach: bool) -> list[nn.Module]:
    """Return `number` replicas of a module, on the device where it is."""
    tensors: dict[int, list[Tensor]] = {}  # the tensor of each replica, by the id of the original

    def alias(original: Tensor) -> list[Tensor]:
        if id(original) not in tensors:
            differentiable = original.requires_grad and not detach
            make: Callable[[Tensor], Tensor] = _Alias.apply if differentiable else Tensor.detach
            with plain_tensors():  # Torch makes plain tensors too; of a subclass they would be views.
                tensors[id(original)] = [make(original) for _ in range(number)]
        return tensors[id(original)]

    def copy(original: Tensor) -> list[Tensor]:
        if id(original) not in tensors:
            tensors[id(original)] = [original, *(original.detach().clone() for _ in range(1, number))]
        return tensors[id(original)]

    def buffers_of(buffer: Tensor) -> list[Tensor]:
        return alias(buffer) if buffer.requires_grad else copy(buffer)

    return _build(module, number, alias, buffers_of)


TensorsOf = Callable[[Tensor], list[Tensor]]  # the tensor of each replica, for an original


def _build(module: nn.Module, number: int, parameters_of: TensorsOf, buffers_of: TensorsOf) -> list[nn.Module]:
    """Return `number` replicas of a module, with the tensors that the two functions return."""
    # `_replicate_for_data_parallel` is the private hook of torch's own `replicate`. RNNs, lazy and scripted modules
    # override it. It has been there, unchanged, since torch 1.5. The copy has dictionaries of its own for buffers and
    # submodules. They are filled directly: setting hundreds of attributes through `nn.Module.__setattr__` takes longer
    # than all the rest of a replication.
    copies: list[dict[nn.Module, nn.Module]] = [{} for _ in range(number)]
    for child in module.modules():
        for of_modules, replica in zip(copies, _copies_of(child, number), strict=True):
            of_modules[child] = replica
        # In a replica that torch made, parameters are plain attributes, listed here for DistributedDataParallel.
        former: dict[str, Tensor] = child.__dict__.get("_former_parameters", {})
        given = former | {name: tensor for name, tensor in child._parameters.items() if tensor is not None}
        parameters = {name: parameters_of(tensor) for name, tensor in given.items()}
        buffers = {name: buffers_of(tensor) for name, tensor in child._buffers.items() if tensor is not None}
        absent = [name for name, parameter in child._parameters.items() if parameter is None]
        plain = type(child).__setattr__ is nn.Module.__setattr__  # whether attributes may be set without calling it
        for i, of_modules in enumerate(copies):
            replica = of_modules[child]
            for name in absent:
                replica._parameters[name] = None
            own = {name: of_replicas[i] for name, of_replicas in parameters.items()}
            replica.__dict__["_former_parameters"] = own
            if plain:
                replica.__dict__.update(own)
                replica._buffers.update((name, of_replicas[i]) for name, of_replicas in buffers.items())
            else:
                for name, of_replicas in (parameters | buffers).items():
                    setattr(replica, name, of_replicas[i])
    for of_modules in copies:
        for child, replica in of_modules.items():
            for name, grandchild in child._modules.items():
                if grandchild is not None:
                    replica._modules[name] = of_modules[grandchild]
    return [of_modules[module] for of_modules in copies]


def _copies_of(module: nn.Module, number: int) -> list[nn.Module]:
    """Return `number` copies of a module for replicas, without parameters, and with submodules of the original."""
    replicate: Any = module._replicate_for_data_parallel
    if getattr(replicate, "__func__", None) is not nn.Module._replicate_for_data_parallel:
        return [replicate() for _ in range(number)]
    copies = [replicate()]
    state = copies[0].__dict__
    for _ in range(1, number):
        copy = module.__new__(type(module))
        own = {name: state[name].copy() for name in ("_parameters", "_buffers", "_modules")}
        copy.__dict__.update(state, **own)
        copies.append(copy)
    return copies


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Call each module with its inputs, each in a thread of its own, and return the outputs in order.

    The threads are daemons: after Ctrl-C in the caller, a replica that is busy does not keep the process alive.

    No thread ends before all replicas have finished. On a free-threaded Python, a thread that has run a backward must
    not end while another one frees objects that the first has made, see docs/free-threading.md. Replicas would do this,
    since they share the nodes of their layers.

    Raises:
        BaseException: the exception of the lowest replica that failed, as `CapturedError.rebuild` makes it.
    """
    outputs: list[Any] = [None] * len(modules)
    failures: list[CapturedError | None] = [None] * len(modules)
    places = [current_place(device) for device in devices]
    # Replicas on the CPU divide the intra-op threads of their caller: otherwise each of them would start as many.
    # `torch.set_num_threads` sets the number of the calling thread, and the number that other threads take when they
    # first ask for theirs. So the caller sets the number for a replica, waits until all replicas have asked, and sets
    # its own number again, for the backward. Only then do the replicas go on, since they may set another number.
    num_threads = torch.get_num_threads()
    divides = devices[0].type == "cpu" and num_threads > 1 and len(modules) > 1
    asked: SimpleQueue[int] = SimpleQueue()
    dividing = threading.Lock()
    through: SimpleQueue[int] = SimpleQueue()
    running = threading.Lock()  # until all replicas have finished

    def work(i: int) -> None:
        try:
            if divides:
                torch.get_num_threads()
                asked.put(i)
                with dividing:
                    pass
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
        with running:
            with dividing:
                try:
                    if divides:
                        torch.set_num_threads(max(1, num_threads // len(modules)))
                    for thread in threads:
                        thread.start()
                    for _ in threads if divides else ():
                        asked.get()
                finally:  # also if no more threads can be started
                    if divides:
                        torch.set_num_threads(num_threads)
            for _ in threads:
                through.get()
        for thread in threads:
            thread.join()
    for failure in failures:
        if failure is not None:
            raise failure.rebuild()
    return outputs
