"""Training scripts as people publish them, made small: four replicas train to the numbers of one device.

Each script is given a function that wraps a model, and returns what it ends with: modules, whose parameters, gradients
and buffers are compared, and tensors. What a script draws at random, it draws before it calls a model: replicas draw in
any order.
"""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import WARNING_OF_BASELINES
from torch import nn
from torch.ao import quantization
from torch.nn.utils import clip_grad_norm_, parametrizations, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, convert_model, revert_model

TOLERANCE = 1e-9  # of float64, relative to the largest value of a tensor or one; after some steps of training
OTHERS = {
    # Convolutions round to bfloat16, and a last digit of their inputs may move a result to the next number.
    "timm_with_amp_and_channels_last": 2e-2,
}
SCRIPTS = {}


def script(function):
    SCRIPTS[function.__name__] = function
    return function


def conv(inputs, outputs, stride=1, inplace=True):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace)
    )


def classifier(classes=5, inplace=True):
    return nn.Sequential(
        conv(3, 6, 1, inplace), conv(6, 8, 2, inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    )


def images(rows=8, size=8):
    return torch.randn(rows, 3, size, size)


def labels(rows=8, classes=5):
    return torch.randint(classes, (rows,))


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@script
def gan_with_gradient_penalty(wrap):
    generator = wrap(nn.Sequential(nn.Linear(4, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Unflatten(1, (3, 4, 4))))
    critic = wrap(nn.Sequential(conv(3, 6), conv(6, 6), nn.Flatten(), nn.Linear(96, 1)))
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3, (0.5, 0.9)) for net in (generator, critic)]
    for _ in range(2):
        real, fake = torch.randn(8, 3, 4, 4), generator(torch.randn(8, 4)).detach()
        mixed = torch.lerp(real, fake, torch.rand(8, 1, 1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        step(optimizers[1], critic(fake).mean() - critic(real).mean() + 10 * penalty)
        step(optimizers[0], -critic(generator(torch.randn(8, 4))).mean())
    return generator, critic


class WithAuxiliaryHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = conv(3, 6, 2), conv(6, 8, 2)
        self.head, self.aux = nn.Conv2d(8, 4, 1), nn.Sequential(conv(6, 4), nn.Dropout(0.0), nn.Conv2d(4, 4, 1))

    def forward(self, input):
        middle = self.stem(input)
        outputs = {"out": self.head(self.body(middle)), "aux": self.aux(middle)}
        return {k: F.interpolate(v, size=input.shape[-2:], mode="bilinear") for k, v in outputs.items()}


@script
def segmentation_with_auxiliary_head(wrap):
    net = wrap(WithAuxiliaryHead())
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 4, 0.9)
    for _ in range(3):
        target = torch.randint(4, (8, 8, 8))
        target[:, 0] = 255
        losses = {k: F.cross_entropy(v, target, ignore_index=255) for k, v in net(images()).items()}
        step(optimizer, losses["out"] + 0.4 * losses["aux"])
        schedule.step()
    return (net,)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([conv(3, 6, 2), conv(6, 6, 2)])
        self.boxes, self.scores = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 1, 1)

    def forward(self, images, targets=None):
        found = []
        for level, target in zip(self.levels, targets or [None, None], strict=True):
            images = level(images)
            found.append({"boxes": self.boxes(images).mean((2, 3)), "scores": self.scores(images).amax((2, 3))})
            if target is not None:
                found[-1]["loss"] = F.smooth_l1_loss(found[-1]["boxes"], target["boxes"], reduction="none")
        return found


@script
def detection_with_lists_of_dicts(wrap):
    net = wrap(Detector())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(2):
        targets = [{"boxes": torch.rand(8, 4), "labels": labels()} for _ in range(2)]
        found = net(images(), targets=targets)
        step(optimizer, sum(level["loss"].mean() + F.softplus(level["scores"]).mean() for level in found))
    return net, found[0]["boxes"], *[level["scores"] for level in net.eval()(images())]


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = classifier(4)

    def forward(self, first, second):
        return self.encoder(first), self.encoder(second)


@script
def siamese_with_contrastive_loss(wrap):
    net = wrap(Siamese())
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(2):
        distance = F.pairwise_distance(*net(images(), images()))
        same = torch.randint(2, (8,))
        step(optimizer, (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean())
    return (net,)


class OverFrames(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames, self.lstm, self.head = classifier(6), nn.LSTM(6, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, clips, state=None):
        features = self.frames(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])
        outputs, (hidden, cell) = self.lstm(features)
        return self.head(outputs[:, -1]), hidden.transpose(0, 1), cell.transpose(0, 1)


@script
def lstm_over_frames(wrap):
    net = wrap(OverFrames())
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(2):
        scores, hidden, cell = net(torch.randn(8, 3, 3, 6, 6))
        step(optimizer, F.cross_entropy(scores, labels(classes=3)) + hidden.square().mean() + cell.mean())
    return (net,)


@script
def ema_and_swa(wrap):
    net = wrap(classifier())
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        step(optimizer, F.cross_entropy(net(images()), labels()))
        ema.update_parameters(net)
        swa.update_parameters(net)
    update_bn([images() for _ in range(3)], swa)
    return net, ema, swa, ema.eval()(images()), swa.eval()(images())


@script
def accelerate_style_forward(wrap):
    net = wrap(classifier())

    def converted(forward):
        @functools.wraps(forward)
        def convert(*args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return forward(*args, **kwargs).float().double()

        return convert

    net.forward = converted(net.forward)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step(optimizer, F.cross_entropy(net(images()), labels()))
    net.forward = net.forward.__wrapped__
    return (net,)


@script
def timm_with_amp_and_channels_last(wrap):
    net = wrap(classifier().float()).to(memory_format=torch.channels_last)
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        input = images().float().contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(input), labels(), label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return (net,)


@script
def quantization_aware_training(wrap):
    stub, unstub = quantization.QuantStub(), quantization.DeQuantStub()
    net = nn.Sequential(stub, nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 6)[:2], unstub)
    quantization.fuse_modules_qat(net, [["1", "2", "3"], ["4.0", "4.1"]], inplace=True)
    net.qconfig = quantization.QConfig(
        activation=quantization.FakeQuantize.with_args(quant_min=0, quant_max=255),
        weight=quantization.FakeQuantize.with_args(
            quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
        ),
    )
    quantization.prepare_qat(net, inplace=True)
    net(images())  # calibrates; then the observers stop, which belong to a replica and see its part alone
    net.apply(quantization.disable_observer)
    net = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    for _ in range(2):
        step(optimizer, (net(images()) * torch.randn(8, 6, 8, 8)).mean())
    return (net,)


@script
def profiler_of_hooks(wrap):
    net, rows, slopes = classifier(inplace=False), [], []  # torch refuses backward hooks in front of changes in place
    for child in net.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
            child.register_forward_hook(lambda _, args, output: output * 2)
            child.register_full_backward_hook(lambda _, ins, outs: slopes.append(outs[0].square().sum()))
    net = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step(optimizer, F.cross_entropy(net(images()), labels()))
    return net, torch.tensor(sum(rows)), torch.stack(slopes).sum()


@script
def accumulation_and_clipping(wrap):
    net = wrap(classifier())
    optimizer = torch.optim.RMSprop(net.parameters(), 1e-3)
    for _ in range(2):
        for rows in (8, 7, 4):
            (F.cross_entropy(net(images(rows)), labels(rows)) / 3).backward()
        clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return (net,)


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = classifier(6), classifier(6)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 16), dim=0))

    def forward(self, first, second):
        query = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            key = F.normalize(self.key(second), dim=1)
        return torch.cat(((query * key).sum(1, keepdim=True), query @ self.queue.clone()), 1) / 0.2, key


@script
def moco_with_a_queue(wrap):
    module = MoCo()
    net = wrap(module)
    optimizer = torch.optim.SGD(module.query.parameters(), 0.1)
    for i in range(3):
        scores, key = net(images(), images())
        step(optimizer, F.cross_entropy(scores, torch.zeros(8, dtype=torch.long)))
        with torch.no_grad():
            module.queue[:, 8 * (i % 2) : 8 * (i % 2) + 8] = key.T
            for slow, fast in zip(module.key.parameters(), module.query.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return (net,)


@script
def wgan_with_spectral_norm(wrap):
    generator = wrap(nn.Sequential(nn.Linear(4, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Unflatten(1, (3, 4, 4))))
    first = spectral_norm(nn.Conv2d(3, 6, 3, padding=1))
    second = parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1))
    critic = wrap(nn.Sequential(first, nn.LeakyReLU(0.1), second, nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 1)))
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (generator, critic)]
    for _ in range(2):
        fake = generator(torch.randn(8, 4))
        both = critic(torch.cat((torch.randn(8, 3, 4, 4), fake.detach())))
        step(optimizers[1], F.relu(1 - both[:8]).mean() + F.relu(1 + both[8:]).mean())
        step(optimizers[0], -critic(fake).mean())
    return generator, critic


@script
def finetuning_with_a_frozen_backbone(wrap):
    net = wrap(classifier())
    body = net.module if isinstance(net, nn.DataParallel) else net
    for epoch in range(2):  # the last block is unfrozen in the second
        net.train()
        for i, block in enumerate(body[:2]):
            block.requires_grad_(epoch > 0 and i == 1).train(epoch > 0 and i == 1)
        optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, net.parameters()), 0.1)
        step(optimizer, F.cross_entropy(net(images()), labels()))
    return net, net.eval()(images())


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 3, 1)) for c in (3, 6, 9)]
        )

    def forward(self, input):
        found = [input]
        for layer in self.layers:
            found.append(checkpoint(lambda *xs, layer=layer: layer(torch.cat(xs, 1)), *found, use_reentrant=False))
        return torch.cat(found, 1)


@script
def densenet_that_saves_memory(wrap):
    plain = Dense()
    net = wrap(plain)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        step(optimizer, (net(images()) * torch.randn(8, 12, 8, 8)).mean())
    # Without replicas, torch counts a batch again when it recomputes.
    for layer in plain.layers:
        layer[0].running_mean, layer[0].running_var = None, None
        layer[0].num_batches_tracked.zero_()
    return (net,)


@script
def sharpness_aware_minimization(wrap):
    net = wrap(classifier())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for _ in range(2):
        input, target = images(), labels()
        F.cross_entropy(net(input), target).backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, move in zip(net.parameters(), moves, strict=True):
                    parameter.add_(move, alpha=sign)
            if sign == 1:
                for norm in norms:
                    norm.momentum, norm.kept = 0, norm.momentum
                optimizer.zero_grad()
                F.cross_entropy(net(input), target).backward()
                for norm in norms:
                    norm.momentum = norm.kept
        optimizer.step()
        optimizer.zero_grad()
    return (net,)


@script
def virtual_adversarial_training(wrap):
    net = wrap(classifier())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def toggle():
        for module in net.modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats ^= True

    for _ in range(2):
        input, direction = images(), F.normalize(images().flatten(1), dim=1).view(8, 3, 8, 8)
        toggle()
        with torch.no_grad():
            wanted = F.softmax(net(input), 1)
        direction.requires_grad_()
        divergence = F.kl_div(F.log_softmax(net(input + 10 * direction), 1), wanted, reduction="batchmean")
        (direction,) = torch.autograd.grad(divergence, direction)
        direction = F.normalize(direction.flatten(1), dim=1).view_as(input)
        distance = F.kl_div(F.log_softmax(net(input + direction), 1), wanted, reduction="batchmean")
        toggle()
        step(optimizer, F.cross_entropy(net(input), labels()) + distance)
    return (net,)


def ending(name, wrap):
    """Return the tensors that a script ends with, by name."""
    torch.manual_seed(3)
    found = {}
    for i, result in enumerate(SCRIPTS[name](wrap)):
        if not isinstance(result, nn.Module):
            found[f"result {i}"] = result
            continue
        tensors = dict(result.state_dict()) | {f"{k}.grad": p.grad for k, p in result.named_parameters()}
        found |= {f"{i}.{k.replace('module.', '')}": tensor for k, tensor in tensors.items() if tensor is not None}
    return found


def difference(first, second):
    """Return the largest difference, relative to the largest value or one, and where it is."""
    assert list(first) == list(second)
    worst = (0.0, "nowhere")
    for name, tensor in first.items():
        assert tensor.shape == second[name].shape, name
        assert tensor.dtype == second[name].dtype, name
        if tensor.numel():
            one, other = tensor.detach().double(), second[name].detach().double()
            worst = max(worst, (float((one - other).abs().max()) / max(1.0, float(one.abs().max())), name))
    return worst


def replicated(net):
    return DataParallelWithCallback(convert_model(net), ["cpu"] * 4, timeout=5.0)


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_ends_as_on_one_device(name):
    worst, where = difference(ending(name, lambda net: net), ending(name, replicated))
    print(f"{name}: {worst:.1e} ({where})")
    assert worst <= OTHERS.get(name, TOLERANCE), where
    assert math.isfinite(worst)


@pytest.mark.slow  # What a script tells stays the same from day to day.
@pytest.mark.usefixtures("_float64")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings(WARNING_OF_BASELINES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_tells_whether_layers_are_synchronized(name):
    def unsynchronized(net):
        return DataParallelWithCallback(net, ["cpu"] * 4, timeout=5.0)

    worst, _ = difference(ending(name, lambda net: net), ending(name, unsynchronized))
    assert worst > OTHERS.get(name, 1e-4)


def test_fusing_wants_a_model_of_torch():
    net = conv(3, 4).eval()
    for parts, fuse in ((["0", "1", "2"], quantization.fuse_modules), (["0", "1"], quantization.fuse_modules_qat)):
        converted = convert_model(copy.deepcopy(net).train(fuse is quantization.fuse_modules_qat))
        with pytest.raises(AssertionError, match=r"did not find fuser method for: .*SynchronizedBatchNorm2d"):
            fuse(copy.deepcopy(converted), [parts])
        assert isinstance(fuse(revert_model(converted), [parts])[1], nn.Identity)
