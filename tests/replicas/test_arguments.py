"""Lists with one entry for each sample among the arguments of a wrapper: a warning, and a `scatter` that cuts them."""

import re
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from conftest import device_lists
from helpers import Net, are_distinct_gpus, as_devices, doubles
from torch import nn

from sync_batchnorm import DataParallelWithCallback

X = torch.zeros(4, 2)
BOXES = [torch.zeros(n, 4) for n in (3, 4, 3, 4)]  # which make two chunks each


@dataclass
class Sample:
    images: Any
    more: Any


class Four(NamedTuple):
    one: Any
    two: Any
    three: Any
    four: Any


LISTS = {  # what is passed with a batch of four, and how the warning names the list
    "boxes": ([X, BOXES], {}, "inputs[1], a list,"),
    "strings": ([], {"x": X, "names": list("abcd")}, "kwargs['names'], a list,"),
    "lengths": ([X, (1, 2, 3, 4)], {}, "inputs[1], a tuple,"),
    "scalars": ([X, list(torch.arange(4))], {}, "inputs[1], a list,"),
    "targets": ([X, [{"boxes": box, "name": "a"} for box in BOXES]], {}, "inputs[1], a list,"),
    "some none": ([X, [None, None, "a", None]], {}, "inputs[1], a list,"),
    "below": ([{"data": Sample(X, [X, list("abcd")])}], {}, "inputs[0]['data'].more[1], a list,"),
    "first": ([list("abcd"), X], {}, "inputs[0], a list,"),
    "images of a detector": (
        [[torch.zeros(3, 5, 5)] * 4, [{"boxes": torch.zeros(n, 4)} for n in (3, 5, 3, 5)]],
        {},
        "inputs[0], a list,",
    ),
    "images": ([[torch.zeros(3, 5, 5)] * 4, [{"boxes": box} for box in BOXES]], {}, "inputs[0], a list,"),
}


def call(args, kwargs, devices=("cpu", "cpu"), dim=0):
    return DataParallelWithCallback(Net(lambda net, *_, **__: None), list(devices), dim=dim)(*args, **kwargs)


@pytest.mark.parametrize("kind", LISTS)
def test_list_with_an_entry_for_each_sample_is_named_once(kind):
    args, kwargs, found = LISTS[kind]
    text = f"{re.escape(found)} seems to have one entry for each sample, .*scatter.self, inputs, kwargs, device_ids"
    with pytest.warns(UserWarning, match=text) as caught:
        call(args, kwargs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    call(args, kwargs)


def test_warning_comes_once_for_batches_of_all_sizes():
    with pytest.warns(UserWarning, match="seems to have one entry"):
        call([X, list("abcd")], {})
    call([X[:3], list("abc")], {})


NO_LISTS = {
    "feature maps": [torch.zeros(3, 8), [torch.zeros(3, n) for n in (1, 2, 3)]],
    "feature maps alone": [[torch.zeros(3, n) for n in (1, 2, 3)]],
    "pyramids": [[torch.zeros(2, 8), torch.zeros(2, 4)], [torch.zeros(2, 8), torch.zeros(2, 4)]],
    "another length": [X, list("abc")],
    "none": [X, [None] * 4],
    "arguments": [X, "a", "b", "c"],
    "fields": [X, Four(1, 2, 3, "a")],
    "shape": [X, torch.Size([1, 2, 3, 4])],
    "one entry": [torch.zeros(1, 2), ["a"]],
    "rows of another size": [torch.zeros(8, 2), [torch.zeros(8, 1), torch.zeros(7, 2)]],
    "lists of two lengths": [[torch.zeros(8, 2), torch.zeros(7, 2)], [torch.zeros(8, 2)]],
    "a list and a tensor": [torch.zeros(7, 3), [torch.zeros(8, 2), torch.zeros(7, 2)]],
    "lists of one entry": [[{"a": torch.zeros(8, 2), "b": torch.zeros(7, 2)}], [torch.zeros(7, 2)]],
    "two sizes": [[torch.zeros(8, 2), torch.zeros(7, 2)]],
}


@pytest.mark.parametrize("kind", NO_LISTS)
def test_what_is_no_list_by_sample_is_not_named(kind):
    call(NO_LISTS[kind], {})
    call([NO_LISTS[kind][0]], dict(zip("abc", NO_LISTS[kind][1:], strict=False)))


def test_rows_are_those_along_the_dimension_that_is_cut():
    call([X, list("ab")], {})
    with pytest.warns(UserWarning, match="cut along dimension 1, "):
        call([X, list("ab")], {}, dim=1)
    with pytest.warns(UserWarning, match="cut along dimension -2, "):
        call([X, list("abcd")], {}, dim=-2)


def test_nothing_is_said_where_nothing_is_cut():
    call([X, list("abcd")], {}, ["cpu"])
    call([X[:1], list("a")], {})


def test_error_of_lists_that_make_different_chunks_names_the_remedy():
    boxes = [torch.zeros(n, 4) for n in (1, 2, 3, 4)]
    with (
        pytest.warns(UserWarning, match="seems to have one entry"),
        pytest.raises(ValueError, match=r"make the same number.*a list with one entry for each sample needs a scatter"),
    ):
        call([X, boxes], {}, ["cpu"] * 4)


class CutsLists(DataParallelWithCallback):  # as on the page
    def scatter(self, inputs, kwargs, device_ids):
        kinds.append({type(device) for device in device_ids})
        images, boxes = inputs
        chunks, kwargs = super().scatter((images,), kwargs, device_ids)
        parts, first = [], 0
        for (chunk,) in chunks:
            entries = boxes[first : first + len(chunk)]
            parts.append((chunk, [entry.to(chunk.device) for entry in entries]))
            first += len(chunk)
        return parts, kwargs


kinds: list[set[type]] = []


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_scatter_of_the_page_gives_replicas_the_entries_of_their_samples(devices, rows):
    device = as_devices(devices)[0]
    sums = Net(lambda net, images, boxes: images + torch.stack([entry.sum() for entry in boxes])[:, None])
    images, boxes = doubles(rows, 1, devices=devices), [doubles(n + 1, 4) for n in range(rows)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = CutsLists(sums, devices)(images, boxes)
    assert torch.equal(output, images + torch.stack([entry.sum() for entry in boxes])[:, None].to(device))
    assert kinds.pop() == ({int} if are_distinct_gpus(devices) else {torch.device})
    assert isinstance(CutsLists(nn.Identity(), devices), nn.DataParallel)
