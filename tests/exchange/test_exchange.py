"""One call of a layer in a replica: with parameters of its own, views, changes in place, and transforms around it."""

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists
from helpers import FORMATS, Net, assert_equal, assert_same_step, assert_trains_as_one_device, doubles, twins
from torch import nn
from torch.autograd import forward_ad


def conditional(net, input):
    """Makes a parameter of its layer from the first row of the input, or drops it, if that row begins above zero."""
    if input[0, 0] > 0:
        made = getattr(net.bn, net.name) * (net.scale * input[0]).exp()
        delattr(net.bn, net.name)
        setattr(net.bn, net.name, None if net.drops else made)
    return net.bn(input)


@pytest.mark.parametrize("kernel", ["fast", "general"], indirect=True)
@pytest.mark.parametrize("makers", ["all", "first", "others"])
@pytest.mark.parametrize(("name", "drops"), [("weight", False), ("bias", False), ("weight", True)])
@pytest.mark.parametrize("devices", device_lists(2, slow=[4]))
def test_parameters_that_each_replica_makes_are_its_own(devices, name, drops, makers):
    # On distinct GPUs, too, where equal weights lie in different memory, as different ones do.
    scale = nn.Parameter(torch.randn(3))
    net = Net(conditional, bn=nn.BatchNorm1d(3), name=name, drops=drops, scale=scale)
    plain, parallel = twins(net.double(), devices)
    rows = 3
    data = doubles(len(devices) * rows, 3, devices=devices).abs()
    data[:rows] *= -1 if makers == "others" else 1
    data[rows:] *= -1 if makers == "first" else 1
    data.requires_grad_()
    again = data.detach().clone().requires_grad_()
    output, grad = parallel(data), torch.randn_like(data)
    firsts = again[::rows].repeat_interleave(rows, 0)
    normalized = F.batch_norm(again, None, None, training=True)
    weight, bias = plain.bn.weight, plain.bn.bias
    made = 1 / weight if drops else (plain.scale * firsts).exp()
    factor = torch.where(firsts[:, :1] > 0, made, 1.0)
    expected = normalized * weight * factor + bias if name == "weight" else normalized * weight + bias * factor
    assert_equal(output, expected)
    found = torch.autograd.grad(output, [data, *parallel.module.parameters()], grad, materialize_grads=True)
    wanted = torch.autograd.grad(expected, [again, *plain.parameters()], grad, materialize_grads=True)
    for actual, expected in zip(found, wanted, strict=True):
        assert_equal(actual, expected)


def calling(bn, body):
    """Return a net that calls a layer as a function `body` does."""
    return Net(lambda net, input: body(net.bn, input), bn=bn)


CHANGES = {
    "before": lambda bn, x: bn((x * 1).mul_(2)[:, :3]),
    "after": lambda bn, x: bn(x[:, :3]).mul_(2).add_(1),
    "slice": lambda bn, x: (x * 1).index_copy_(1, torch.arange(3, device=x.device), bn(x[:, :3].clone())),
}


@pytest.mark.parametrize("where", CHANGES)
@pytest.mark.parametrize("devices", device_lists(1, 2))
def test_changes_in_place_around_a_layer_are_allowed(devices, where):
    assert_trains_as_one_device(calling(nn.BatchNorm1d(3), CHANGES[where]), devices, 6, 4)


VIEWS = {
    "strided": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(2, 3),
    "channels-moved": lambda x: x.movedim(-1, 1)[:, :3],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "unsqueezed": lambda x: x.unsqueeze(2).transpose(1, 2).squeeze(1),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("devices", device_lists(2, slow=[1]))
def test_inputs_and_upstream_gradients_need_not_be_contiguous(devices, view, kind):
    plain, parallel = twins(calling(nn.BatchNorm2d(3), lambda bn, x: bn(VIEWS[view](x))).double(), devices)
    data = doubles(6, 3, 4, 4, devices=devices).contiguous(memory_format=FORMATS[kind])
    sizes = VIEWS[view](data).shape
    expanded = doubles(1, 3, 1, 1, devices=devices).expand(sizes)
    reversed_axes = doubles(*sizes[::-1], devices=devices).permute(3, 2, 1, 0)
    for grad in (expanded, reversed_axes):
        assert_same_step(plain, parallel, data, grad)


TRANSFORMS = {
    "grad": lambda bn, x: torch.func.grad(lambda x: bn(x).pow(3).sum())(x),
    "vjp": lambda bn, x: torch.func.vjp(bn, x)[1](x)[0],
    "vmap": lambda bn, x: torch.func.vmap(lambda scale: bn(x * scale))(torch.arange(1, 3).to(x)).sum(0),
    "jacrev": lambda bn, x: torch.func.jacrev(lambda x: bn(x).sum(0))(x).sum((0, 2)),
}


# Torch compiles what it needs for tangents in a way that it warns of.
_old_compiler = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@_old_compiler
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_around_a_layer_is_refused_where_it_meets_others(devices, name):
    layer = nn.BatchNorm1d(3, track_running_stats=False)
    plain, parallel = twins(calling(layer, TRANSFORMS[name]).double(), devices)
    data = doubles(6, 3, devices=devices)
    plain(data)
    with pytest.raises(RuntimeError, match="inside one, such as grad or vmap; use"):
        parallel(data)
    plain.bn, parallel.module.bn = (nn.BatchNorm1d(3).to(data).eval() for _ in range(2))
    if name in ("grad", "vmap"):  # the sums over samples of the others differ from those over the samples of a replica
        assert_equal(parallel(data), plain(data))


@_old_compiler
@pytest.mark.parametrize("grad_mode", [True, False], ids=["recorded", "no-grad"])
@pytest.mark.parametrize("name", ["input", "weight"])
def test_tangents_are_refused_and_not_lost(name, grad_mode):
    layer = nn.BatchNorm1d(3, track_running_stats=False)
    plain, parallel = twins(calling(layer, lambda bn, x: bn(x)).double(), ["cpu"] * 2)
    data = doubles(6, 3)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        assert_equal(parallel(data), plain(data))  # a level alone is no reason to refuse
        if name == "weight":
            weight = parallel.module.bn.weight.detach()
            del parallel.module.bn.weight
            parallel.module.bn.weight = forward_ad.make_dual(weight, torch.ones_like(weight))
        else:
            data = forward_ad.make_dual(data, torch.randn_like(data))
        with pytest.raises(NotImplementedError, match=r"jvp function|forward AD|forward-mode"):
            parallel(data)
