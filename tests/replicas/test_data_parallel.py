"""A `DataParallel` on the CPU and on repeated devices: arguments, devices, outputs and errors, as torch has them."""

import warnings

import pytest
import torch
from conftest import device_lists, needs_two_gpus
from helpers import Net, TwoLayers, are_distinct_gpus, as_devices, assert_equal, assert_same_step, doubles, twins
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from sync_batchnorm import DataParallelWithCallback, patch_replication_callback
from sync_batchnorm.wrapper.devices import as_device


def shapes_in(tree):
    return tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, tree)


ARGUMENTS = {  # the number of devices, what the wrapper gets, and what each replica that runs gets of it
    "keywords": (2, [], {"input": torch.zeros(4, 3), "flag": True}, [([], {"input": (2, 3), "flag": True})] * 2),
    "nothing": (3, [], {}, [([], {})]),
    "one-device": (1, [torch.zeros(4, 2), torch.zeros(3)], {}, [([(4, 2), (3,)], {})]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_replica_gets_its_part_of_the_arguments(kind):
    number, args, kwargs, expected = ARGUMENTS[kind]
    seen = []
    net = Net(lambda net, *args, **kwargs: seen.append(shapes_in(([*args], kwargs))))
    assert DataParallelWithCallback(net, ["cpu"] * number)(*args, **kwargs) is None
    assert seen == expected


WITHOUT_TENSORS = {
    "number": ((5,), {}, "int"),
    "text": ((["a", "b"],), {"flag": True}, "str, bool"),
    "object": ((object(),), {}, "object"),
    "none": ((), {"images": None}, "NoneType"),
    "empty": (([],), {}, "list"),
    "array": (([torch.zeros(2).numpy()],), {}, "ndarray"),
}


@pytest.mark.parametrize("kind", WITHOUT_TENSORS)
def test_arguments_without_a_tensor_are_refused_where_every_replica_would_get_all(devices, kind):
    args, kwargs, found = WITHOUT_TENSORS[kind]
    message = f"expected tensors to cut into chunks, but got arguments of {found} only, of which each of 2 .*; pass"
    with pytest.raises(TypeError, match=message):
        DataParallelWithCallback(nn.Identity(), devices)(*args, **kwargs)
    assert DataParallelWithCallback(Net(lambda net, *_, **__: 1), devices[:1])(*args, **kwargs) == 1


def nested(layout):
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype
        return torch.nested.nested_tensor(rows, layout=layout)


UNCUT = {
    "packed": (lambda: pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), "a PackedSequence that holds tensors"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "a tensor of torch.sparse_coo"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "a tensor of torch.sparse_csr"),
    "jagged": (lambda: nested(torch.jagged), "a nested tensor"),
    "nested": (lambda: nested(torch.strided), "a nested tensor"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", UNCUT)
def test_what_cannot_be_cut_into_rows_is_refused_by_name(kind):
    make, what = UNCUT[kind]
    net, x = Net(lambda net, *args, **kwargs: 1), torch.zeros(4, 1)
    parallel = DataParallelWithCallback(net, ["cpu"] * 2)
    remedy = "pass dense tensors .*padded ones and their lengths, tensor.to_dense.*, a dict or dataclass"
    with pytest.raises(
        TypeError, match=f"^args\\[1\\]\\[0\\], {what}, cannot be cut .*{remedy}.*'args': {{1: {{0: None"
    ):
        parallel(x, [make()])
    with pytest.raises(TypeError, match=f"^other\\['one'\\], {what}, cannot be cut .*{remedy}.*'other': {{'one': None"):
        parallel(other={"one": make()})
    assert DataParallelWithCallback(net, ["cpu"])(x, make()) == 1


def scaled(net, input, factors):
    assert all(factor.device == input.device for factor in factors.values())
    return net.bn(input) * factors["trained"] / factors["number"]


@pytest.mark.parametrize("rows", [5, 6])
@pytest.mark.parametrize("devices", device_lists(1, 4))
def test_every_replica_has_a_scalar_tensor_on_its_device(devices, rows):
    plain, parallel = twins(Net(scaled, bn=nn.BatchNorm1d(3)).double(), devices)
    input, factor = doubles(rows, 3, devices=devices), doubles(1, devices=devices)[0].requires_grad_()
    number = torch.tensor(6, device=input.device)
    outputs = [model(input, {"trained": factor, "number": number}) for model in (plain, parallel)]
    assert_equal(outputs[1], outputs[0])
    grad = torch.randn_like(input)
    assert_equal(*[torch.autograd.grad(output, factor, grad)[0] for output in outputs])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("devices", device_lists(4))
def test_fewer_samples_than_devices_may_come_with_arguments_that_are_no_tensors(devices, rows):
    net = Net(lambda net, factor, input: net.bn(input) * factor, bn=nn.BatchNorm1d(3))
    plain, parallel = twins(net.double(), devices)
    input = doubles(rows, 3, 2, devices=devices)
    assert_equal(parallel(2, input=input), plain(2, input))
    assert_equal(parallel(input=input, factor=2), plain(2, input))


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
def test_errors_name_the_replica_and_show_its_traceback(devices, failing):
    def forward(net, number):
        if int(number) in failing:
            raise KeyError("no such key")

    first, *_ = of_replicas = as_devices(devices)
    with pytest.raises(KeyError, match="no such key") as caught:
        DataParallelWithCallback(Net(forward), devices)(torch.arange(2, device=first))
    (note,) = caught.value.__notes__
    who = f"replica {min(failing)} on device {of_replicas[min(failing)]}"
    cut = "The wrapper cut along dimension 0, as in_dims names no other: args[0] of shape (2,) into 1 + 1."
    assert note.startswith(f"Caught KeyError in {who}.\n{cut}\nTraceback (most recent call last):\n")
    assert 'raise KeyError("no such key")' in note


def test_errors_say_how_tensors_were_cut_that_in_dims_does_not_name():
    def forward(net, image, **others):
        return net.linear(image)

    x, more = torch.randn(5, 4), [torch.randn(3, 7)] * 6
    net = Net(forward, linear=nn.Linear(2, 2))
    net.forward = lambda image, **others: forward(net, image)
    notes = []
    for in_dims in ({"image": 0}, {"image": 0, "more": None}):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            DataParallelWithCallback(net, ["cpu"] * 2, in_dims=in_dims)(x, more=more if "more" in in_dims else [x] * 6)
        notes += caught.value.__notes__
    shown = ", ".join([f"more[{i}] of shape (5, 4) into 3 + 2" for i in range(4)])
    assert f"\nThe wrapper cut along dimension 0, as in_dims names no other: {shown}, and 2 more tensors.\n" in notes[0]
    assert "The wrapper cut" not in notes[1]


@needs_two_gpus
@pytest.mark.parametrize("devices", [[0, 0, 1], [1, 0, 1, 0]], ids=str)
def test_some_replicas_may_share_a_gpu(devices):
    plain, parallel = twins(TwoLayers().double(), devices)
    assert_same_step(plain, parallel, doubles(8, 3, 6, 6, devices=devices))


def test_without_accelerator_and_devices_the_module_runs_directly(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    plain, parallel = TwoLayers(), DataParallelWithCallback(TwoLayers(), [])
    parallel.module.load_state_dict(plain.state_dict())
    assert_equal(parallel(torch.ones(2, 3, 6, 6)), plain(torch.ones(2, 3, 6, 6)))
    assert (parallel.device_ids, parallel.dim) == ([], 0)


@pytest.mark.parametrize("output_device", [None, "second", -1, "cpu", torch.device("cpu")], ids=repr)
def test_outputs_are_gathered_on_the_output_device_in_every_spelling(devices, output_device):
    first, second = as_devices(devices)
    module, data = nn.Linear(3, 2).to(first), torch.randn(4, 3, device=first)
    given = devices[1] if output_device == "second" else output_device
    output = DataParallelWithCallback(module, devices, given)(data)
    assert output.device == {None: first, "second": second}.get(output_device, torch.device("cpu"))
    assert_equal(output.cpu(), module(data).cpu())
    if are_distinct_gpus(devices) and output_device == -1:  # as torch spells it
        assert_equal(patch_replication_callback(nn.DataParallel(module, devices, -1))(data), module(data).cpu())


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_cpu_has_one_name(name):
    assert as_device(name) == torch.device("cpu")
    assert as_device("cuda") == torch.device("cuda", 0)
    plain, parallel = twins(TwoLayers().double(), ["cpu", "cpu"])
    parallel = DataParallelWithCallback(parallel.module, [name, "cpu"])
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6))
