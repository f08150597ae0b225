"""`assert_matches_one_device` on lists, whole arguments, packed sequences, notes of warnings, and other dtypes."""

from __future__ import annotations

import contextvars
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from checked import BATCH, Apply, assert_names, average_gradient, mix, of_class, quietly, with_hook, wrapped
from helpers import Net
from torch import nn

from sync_batchnorm import DataParallelWithCallback, assert_matches_one_device, convert_model

NUMBERS = [1.0, 2.0, 3.0, 4.0, 5.0]
WHOLE_LIST = "a whole list or tensor as long as the batch: if it lists samples"


def multiply(self, x, numbers):
    """Multiply each row by a number of a list, or by one in a dict of a list."""
    numbers = [float(number["number"].max()) if isinstance(number, dict) else number for number in numbers]
    return torch.stack([row * number for row, number in zip(x, numbers, strict=False)])


def test_a_list_with_an_entry_for_each_sample_is_said_unless_in_dims_names_it():
    for numbers in (NUMBERS, [{"number": torch.ones(5) * i} for i in range(5)]):
        assert_names(f"which gets ...{WHOLE_LIST}", multiply, BATCH, numbers)
    assert_matches_one_device(wrapped(Apply(multiply), in_dims={"args": {1: 0}}), BATCH, NUMBERS)
    whole = wrapped(Apply(multiply), in_dims={"args": {1: None}})
    assert_names(WHOLE_LIST, whole, BATCH, torch.tensor(NUMBERS))


def test_a_list_that_is_cut_is_not_said_to_be_whole():
    def forward(self, images, targets):
        return torch.stack([image.mean() for image in images]) * len(images) * torch.cat(targets)

    images, targets = [torch.rand(3, 2, size) for size in (2, 3, 4)], [torch.rand(1) for _ in range(3)]
    parallel = wrapped(Apply(forward), in_dims={"args": {0: 0, 1: 0}})
    assert_names("it begins with `...which gets 2 in place of 3", parallel, images, targets, never="whole list")


WHOLE = {  # what a replica needs whole, or a list by entries, and of which the wrapper cuts rows; a right `in_dims`
    "prototypes": (lambda self, x, others: (x @ others.T).amax(1), -BATCH, None, "x @ others.T"),
    "weights": (lambda self, x, weights: x * weights.sum() / weights.mean(), torch.rand(5), None, "weights.sum()"),
    "a list": (
        lambda self, x, tensors: x + torch.stack([tensor.sum() for tensor in tensors])[: len(x), None],
        *([torch.rand(5, 2) for _ in range(5)], 0, "tensor.sum()"),
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_other_samples_are_no_certain_cause_where_rows_of_an_argument_may_be_none(kind):
    forward, value, dim, code = WHOLE[kind]
    text = f"it begins with `{code}` ...; unless in_dims should name an argument whose rows are no samples$"
    assert_names(text, forward, BATCH, value)
    assert_names(text, Net(lambda self, x: self.net(x, value), net=wrapped(Apply(forward))))
    assert_matches_one_device(wrapped(Apply(forward), in_dims={"args": {1: dim}}), BATCH, value)


def test_a_recurrent_layer_of_torch_is_right_where_in_dims_names_its_other_dimension():
    model = Net(lambda self, steps: self.last(self.rnn(steps)[0]), rnn=nn.GRU(6, 4), last=nn.Linear(4, 2))
    assert_matches_one_device(wrapped(model, in_dims={"args": {0: 1}}, out_dims=1), torch.randn(5, 3, 6))


def in_packed_order(self, x, lengths):
    x = self.before(self.norm(x.transpose(1, 2)).transpose(1, 2))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.after(self.rnn(packed)[1][0])


def in_sorted_order(self, x, lengths):
    order = lengths.argsort(descending=True)
    packed = nn.utils.rnn.pack_padded_sequence(self.before(x)[order], lengths[order], batch_first=True)
    return self.after(self.rnn(packed)[1][0][order.argsort()])


def mix_and_pack(self, x, lengths):
    return in_packed_order(self, mix(self, x), lengths)


PACKED = [(in_packed_order, ""), (in_packed_order, "before"), (in_sorted_order, "before"), (in_sorted_order, "after")]


@pytest.mark.parametrize(("forward", "where"), [*PACKED, (mix_and_pack, "the model itself")])
def test_a_fault_beside_a_packed_sequence_is_not_that_of_the_rnn(forward, where):
    layers = {name: Apply(mix) if name == where else nn.Identity() for name in ("before", "after")}
    model = convert_model(Net(forward, norm=nn.BatchNorm1d(6), rnn=nn.GRU(6, 4, batch_first=True), **layers))
    inputs = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 5, 3])
    if not where:
        return assert_matches_one_device(model, *inputs)
    assert_names(f"first difference: output of {where} (...it begins with `x.mean(0)`", model, *inputs)


def sort_and_list(self, x, lengths):
    lengths, order = lengths.sort(descending=True)
    return self.parts[0](x)[order], lengths.tolist()


def test_a_list_that_is_joined_is_not_said_to_be_that_of_replica_0():
    parallel = wrapped(convert_model(Apply(sort_and_list, nn.BatchNorm1d(6))), out_dims=(0, 0))
    assert_names("", parallel, BATCH, torch.tensor([6, 5, 4, 6, 5]), never=("of replica 0", "replica 0 "))


def detect(self, images):
    size = max(image.shape[-1] for image in images)
    batch = torch.stack([F.pad(image, (0, size - image.shape[-1])) for image in images])
    return self.parts[0](batch).square().mean((1, 2, 3)).mean()


def test_a_loss_of_images_that_are_padded_within_their_chunk_is_one_of_padding():
    images = [torch.rand(3, 4, size) for size in (4, 9, 6, 7, 5)]
    parallel = wrapped(convert_model(Apply(detect, nn.Conv2d(3, 4, 1))), in_dims={"args": {0: 0}})
    text = (
        "; or pad the entries of the list to one size outside, if forward() pads them to the largest of its chunk: "
        "what parts.0 (Conv2d) gets differs, too"
    )
    assert_names(text, parallel, images, never="divide outside")


def test_what_the_wrapper_warns_of_is_a_note_of_an_error():
    with pytest.raises(AssertionError) as caught:
        assert_matches_one_device(Apply(multiply), BATCH[:4], [{"number": torch.ones(8) * i} for i in range(4)])
    (note,) = caught.value.__notes__
    assert note.startswith("The wrapper has warned: args[1], a list, is not cut by its entries")


def test_a_check_keeps_no_warning_of_another_thread_and_gets_none():
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.Context().run, DataParallelWithCallback(nn.BatchNorm1d(6), ["cpu"] * 2), x).result()
        return mix(self, x)

    with pytest.warns(UserWarning, match="1 BatchNorm layer in training mode"), pytest.raises(AssertionError) as caught:
        assert_matches_one_device(nn.Sequential(Net(forward, step=0)), BATCH.double())
    assert not hasattr(caught.value, "__notes__")


FEATURES = {}
FILLED = {  # a hook that fills a dict
    "closure": lambda features: lambda module, args, output: features.update(net=output),
    "global": lambda features: lambda module, args, output: FEATURES.update(net=output),
}


@pytest.mark.parametrize("kind", FILLED)
def test_a_hook_that_fills_a_dict_that_is_an_attribute_too_is_named(kind):
    FEATURES.clear()
    model = of_class(lambda self, x: (self.net(x), self.features["net"] * 2)[1], features=FEATURES)
    with_hook(model.net, FILLED[kind](FEATURES))
    with pytest.raises(KeyError) as caught:
        assert_matches_one_device(model, BATCH)
    assert re.search(r"hooks that refer to the model.*of net \(features\)", caught.value.__notes__[1])
    model(BATCH[:2])
    assert_names("outputs differ; hooks that refer to the model...of net (features)", model, never="shape")


def test_an_operator_without_float64_is_checked_in_float32():
    def forward(self, x):
        return self.parts[0](x if x.dtype == torch.float32 else float("only float32"))

    right = convert_model(Apply(forward, nn.BatchNorm1d(6)))
    with pytest.raises(ValueError, match="only float32") as caught:
        assert_matches_one_device(right, BATCH)
    (note,) = caught.value.__notes__
    where = "This is from a copy of the model on one device: on the CPU, in float64"
    assert note == f"{where}; for operators without float64, pass dtype=torch.float32."
    assert_matches_one_device(right, BATCH, dtype=torch.float32)
    wrong = nn.Sequential(right, Apply(mix))
    assert_names("output of 1 (Apply)...begins with `x.mean(0)`", wrong, dtype=torch.float32)


def test_in_float32_a_gradient_below_a_millionth_of_the_largest_one_is_rounding():
    def net(layer):
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), layer, nn.Linear(8, 2)
        return convert_model(nn.Sequential(*layers))

    right = net(quietly(torch.jit.script, nn.Sequential(nn.Linear(8, 8), nn.Tanh())))
    assert_matches_one_device(right, BATCH, dtype=torch.float32)
    assert_names("the first gradient that differs", net(Apply(average_gradient)), dtype=torch.float32)
