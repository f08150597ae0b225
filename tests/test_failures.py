"""Nothing hangs, every failure says who and why, and after it the next forward is right: each kind of failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripted import WRAPPERS, OneThread, R, Scripted, assert_next_forward_is_right, batch, raising, scripted
from torch import Tensor, nn

from sync_batchnorm import ReplicaSyncError, SynchronizedBatchNorm, SyncMaster, patch_replication_callback


@pytest.fixture(params=list(WRAPPERS))
def wrap(request: pytest.FixtureRequest) -> Callable[..., nn.DataParallel]:
    """Every way to run replicas; what must be told must be told in all of them, and without the timeout."""
    return WRAPPERS[request.param]


class NeedsTwo(Exception):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


COMPLETED = {"before": (0, 0), "between": (1, 0), "after": (1, 1)}


@pytest.mark.parametrize("place", list(COMPLETED))
@pytest.mark.parametrize("replica", range(R))
def test_exception_of_a_replica_reaches_the_caller_as_itself(wrap, replica, place):
    parallel = wrap(scripted((replica, place, raising(LookupError("the cause")))))
    with pytest.raises(LookupError) as caught:
        parallel(*batch())
    assert "the cause" in str(caught.value)
    if type(parallel).__name__ != "OwnForward":  # An exception that the user's own code raises again is its own.
        text = str(caught.value)
        assert text.startswith(f"Caught LookupError in replica {replica} on device cpu.\nOriginal Traceback")
        assert ", in step" in text
    assert_next_forward_is_right(parallel, COMPLETED[place])


def test_exceptions_of_all_replicas_show_that_of_the_lowest(wrap):
    parallel = wrap(scripted(*[(i, "between", raising(ValueError(f"number {i}"))) for i in range(R)]))
    with pytest.raises(ValueError, match="number 0"):
        parallel(*batch())
    assert_next_forward_is_right(parallel, (1, 0))


def test_exception_raised_while_being_released_gives_way_to_the_original(wrap):
    def cleans_up_badly(model: Scripted, x: Tensor) -> None:
        try:
            model.stem(x)
        finally:
            {}["not there"]

    def waits_for_the_others(model: Scripted, x: Tensor) -> None:
        raise ArithmeticError("the cause")

    parallel = wrap(scripted((0, "before", cleans_up_badly), (2, "before", waits_for_the_others)))
    with pytest.raises((ArithmeticError, KeyError)) as caught:
        parallel(*batch())
    if type(parallel).__name__ != "OwnForward":  # There it is up to the user's code which one it raises.
        assert "the cause" in str(caught.value)
    assert_next_forward_is_right(parallel, (0, 0))


def test_original_of_the_last_replica_wins_over_a_released_first_one(wrap):
    parallel = wrap(scripted((R - 1, "between", raising(ArithmeticError("the cause")))))
    with pytest.raises(ArithmeticError, match="the cause"):
        parallel(*batch())


def test_key_error_keeps_its_line_breaks():
    parallel = WRAPPERS["wrapper"](scripted((1, "before", raising(KeyError("lost")))))
    with pytest.raises(KeyError, match=r"Caught KeyError in replica 1 on device cpu\.\nOriginal Traceback"):
        parallel(*batch())


def test_exception_that_needs_two_arguments_still_says_what_it_said():
    parallel = WRAPPERS["wrapper"](scripted((1, "between", raising(NeedsTwo("first of two", 2)))))
    with pytest.raises(RuntimeError, match=r"(?s)Caught NeedsTwo in replica 1.*first of two"):
        parallel(*batch())


def test_exception_that_has_no_text_still_names_its_type():
    parallel = WRAPPERS["wrapper"](scripted((1, "between", raising(Unprintable()))))
    with pytest.raises(RuntimeError, match="Caught Unprintable in replica 1"):
        parallel(*batch())
    assert_next_forward_is_right(parallel, (1, 0))


def test_out_of_memory_reaches_the_caller_and_a_smaller_batch_works(wrap):
    def is_too_large(model: Scripted, x: Tensor) -> None:
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    parallel = wrap(scripted((1, "between", is_too_large)))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        parallel(*batch())
    x, replica = batch()
    assert parallel(x[::2], replica[::2]).shape == (R, 4)
    assert_next_forward_is_right(parallel, (2, 1))


@pytest.mark.parametrize("place", list(COMPLETED))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", ["wrapper", "patched", "own-parallel_apply"])
def test_exception_that_is_no_exception_reaches_the_caller(name, error, place):
    parallel = WRAPPERS[name](scripted((1, place, raising(error))))
    with pytest.raises(type(error)) as caught:
        parallel(*batch())
    assert getattr(caught.value, "code", None) == getattr(error, "code", None)
    assert_next_forward_is_right(parallel, COMPLETED[place])


def _leaves(model: Scripted, x: Tensor) -> Tensor:
    return x


def _skips(model: Scripted, x: Tensor) -> Tensor:
    return model.head(x)


def _repeats(model: Scripted, x: Tensor) -> None:
    model.stem(x)


def _swaps(model: Scripted, x: Tensor) -> Tensor:
    model.head(x)
    return model.stem(x)


WHO = r"replica \d on device cpu"
LEFT = (
    rf"expected every replica to call {{layer}} equally often, but got replica {{who}} on device cpu, which left its "
    rf"forward, while {WHO}( and {WHO})* waits? \({{layer}}, call {{call}}\); "
    "make every replica call every synchronized layer in every forward"
)
DIVERGED = (
    rf"expected all replicas to reach the same layer, but got (?=.*replica {{who}} on device cpu in {{one}}).*{WHO} in "
    "{other}.*; make every replica call the synchronized layers in the same order"
)
DIVERGENCES = {
    "leaves-before": ("before", _leaves, LEFT.format(layer=r"stem\.0", who="{who}", call=1), (0, 0)),
    "leaves-between": ("between", _leaves, LEFT.format(layer="head", who="{who}", call=1), (1, 0)),
    "skips": ("before", _skips, DIVERGED.format(one="head, call 1", other=r"stem\.0, call 1", who="{who}"), (0, 0)),
    "swaps": ("before", _swaps, DIVERGED.format(one="head, call 1", other=r"stem\.0, call 1", who="{who}"), (0, 0)),
    "repeats": (
        "between",
        _repeats,
        DIVERGED.format(one=r"stem\.0, call 2", other="head, call 1", who="{who}"),
        (1, 0),
    ),
    "repeats-last": ("after", _repeats, LEFT.format(layer=r"stem\.0", who="[0-2]", call=2), (1, 1)),
}


@pytest.mark.parametrize("replica", range(R))
@pytest.mark.parametrize("what", list(DIVERGENCES))
def test_replicas_that_diverge_are_named_with_their_layers(wrap, what, replica):
    place, step, text, calls = DIVERGENCES[what]
    parallel = wrap(scripted((replica, place, step)))
    with pytest.raises(ReplicaSyncError, match=text.replace("{who}", str(replica))) as caught:
        parallel(*batch())
    assert not isinstance(caught.value, TimeoutError)
    assert_next_forward_is_right(parallel, calls)


class Disagreeing(nn.Module):
    """Hands a layer without parameters another input in the last replica."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm(4, affine=False, track_running_stats=False)
        self.change = change

    def forward(self, x: Tensor, replica: Tensor) -> Tensor:
        return self.bn(self.change(x) if int(replica[0]) == R - 1 else x)


@pytest.mark.parametrize(
    ("change", "odd"),
    [
        (lambda x: x[:, :3], r"\(2, 3\) of torch.float64"),
        (lambda x: x[..., None], r"\(2, 4, 1\) of torch.float64"),
        (lambda x: x.float(), r"\(2, 4\) of torch.float32"),
    ],
    ids=["channels", "dimensions", "dtype"],
)
def test_replicas_that_disagree_on_the_input_are_told_what_they_have(wrap, change, odd):
    parallel = wrap(Disagreeing(change))
    text = (
        rf"(?s)expected inputs of one dtype, .*but got \(2, 4\) of torch.float64 in replica 0.*{odd} in replica 2; give"
    )
    with pytest.raises(ValueError, match=text) as caught:
        parallel(*batch())
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["Raised in the exchange of bn, call 1."]
    else:
        assert str(caught.value).rstrip().endswith("Raised in the exchange of bn, call 1.")


@pytest.mark.parametrize(
    "change", [lambda x: x[:, :3], lambda x: x[..., None, None], lambda x: x.float(), lambda x: x > 0]
)
def test_input_that_a_layer_refuses_leaves_its_buffers_untouched(wrap, change):
    def disagrees(model: Scripted, x: Tensor) -> Tensor:
        return model.stem(change(x))

    parallel = wrap(scripted((1, "before", disagrees)))
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
        parallel(*batch())
    assert not isinstance(caught.value, ReplicaSyncError)
    assert_next_forward_is_right(parallel, (0, 0))


def test_reduction_that_fails_reaches_the_caller(wrap, monkeypatch):
    parallel = wrap(scripted())

    def fails(*args: Any) -> None:
        raise FloatingPointError("the reduction")

    with monkeypatch.context() as patch:
        patch.setattr("sync_batchnorm.functional._merge", fails)
        with pytest.raises(FloatingPointError, match="the reduction"):
            parallel(*batch())
    assert_next_forward_is_right(parallel, (0, 0))


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


def test_error_that_takes_no_attributes_gets_its_note(monkeypatch):
    def fails(messages: Any) -> None:
        raise Frozen("not to be changed")

    with pytest.raises(Frozen, match="not to be changed") as caught:
        SyncMaster(fails).run_master(None)
    assert caught.value.__notes__ == ["Raised in the exchange of a SyncMaster of its own, call 1."]


def test_hook_that_fails_reaches_the_caller(wrap):
    parallel = wrap(scripted())

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        raise LookupError("the hook")

    handle = parallel.module.stem[0].register_forward_hook(hook)
    with pytest.raises(LookupError, match="the hook"):
        parallel(*batch())
    handle.remove()
    assert_next_forward_is_right(parallel, (1, 0))


def test_tensor_hook_that_fails_in_a_backward_leaves_the_next_step_right(wrap):
    def step(model: Scripted, x: Tensor) -> None:
        x.register_hook(_fail_in_backward)

    parallel = wrap(scripted((1, "between", step)))
    x, replica = batch()
    output = parallel(x.requires_grad_(), replica)
    with pytest.raises(LookupError, match="the gradient"):
        output.backward(torch.randn_like(output))
    assert_next_forward_is_right(parallel, (1, 1))


def _fail_in_backward(grad: Tensor) -> None:
    raise LookupError("the gradient")


def test_replica_that_is_stuck_ends_in_a_timeout_that_names_it(wrap):
    release = threading.Event()

    def is_stuck(model: Scripted, x: Tensor) -> None:
        release.wait()

    def frees_it_in_the_end(model: Scripted, x: Tensor) -> None:
        try:
            model.head(x)
        finally:
            release.set()

    parallel = wrap(scripted((1, "between", is_stuck), (0, "between", frees_it_in_the_end)), timeout=0.2)
    text = (
        rf"expected all replicas within 0\.2 seconds, but got a timeout while {WHO}( and {WHO})? waits? for replica 1 "
        r"on device cpu, which is running \(head, call 1\); pass a longer timeout if it is only slow"
    )
    with pytest.raises(TimeoutError, match=text) as caught:
        parallel(*batch())
    assert isinstance(caught.value, ReplicaSyncError)
    assert_next_forward_is_right(parallel, (1, 0))


def test_replicas_that_run_one_after_another_are_told_to_use_threads():
    parallel = patch_replication_callback(OneThread(scripted(), R), timeout=0.1)
    text = (
        r"expected all replicas within 0\.1 seconds, but got a timeout while replica 0 on device cpu waits for "
        r"replica 1 on device cpu, which has not started and replica 2 on device cpu, which has not started "
        r"\(stem\.0, call 1\); .*run replicas in threads of their own: one after another in one thread they can never"
    )
    with pytest.raises(TimeoutError, match=text):
        parallel(*batch())
