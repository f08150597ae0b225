"""Exceptions travel from a replica to the caller with their type, their text, and without their frames."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import dataclass

import pytest

from sync_batchnorm import ReplicaSyncError
from sync_batchnorm.errors import CapturedError, ReplicaTimeoutError, add_note, is_caused_by


class NeedsTwo(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


class SaysSomethingElse(Exception):
    def __str__(self):
        return "something else"


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


class Stubborn(BaseException):
    def __init__(self, first, *, keyword):
        super().__init__(first)


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


class Thing:
    pass


def caught(error, replica=1):
    try:
        raise error
    except BaseException as raised:
        return CapturedError(raised, replica, "cpu")


def test_rebuilt_exception_has_type_text_and_traceback_of_the_replica():
    error = caught(ValueError("the cause")).rebuild()
    assert type(error) is ValueError
    assert str(error).startswith("Caught ValueError in replica 1 on device cpu.\nOriginal Traceback (most recent call")
    assert "in caught\n    raise error" in str(error)
    assert str(error).endswith("ValueError: the cause\n")


def test_rebuilt_key_error_prints_its_lines():
    error = caught(KeyError("lost")).rebuild()
    assert type(error) is KeyError
    assert "\nOriginal Traceback" in str(error)


@pytest.mark.parametrize(
    "error", [NeedsTwo("first", 2), SaysSomethingElse(), UnicodeDecodeError("ascii", b"", 0, 1, "x")]
)
def test_exception_that_one_string_cannot_make_becomes_a_runtime_error(error):
    rebuilt = caught(error).rebuild()
    assert type(rebuilt) is RuntimeError
    assert str(rebuilt).startswith(f"Caught {type(error).__name__} in replica 1 on device cpu.")
    assert str(error) in str(rebuilt)


def test_exception_without_a_text_is_named():
    assert "Unprintable" in str(caught(Unprintable()).rebuild())


def test_traceback_that_cannot_be_made_does_not_hide_the_error(monkeypatch):
    def fails(*args):
        raise MemoryError

    monkeypatch.setattr("traceback.format_exception", fails)
    text = str(caught(ValueError("the cause")).rebuild())
    assert text == (
        "Caught ValueError in replica 1 on device cpu.\nOriginal ValueError: its text and traceback could not be made"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), Stubborn("first", keyword=1)])
def test_what_is_no_exception_keeps_its_arguments(error):
    rebuilt = caught(error).rebuild()
    assert type(rebuilt) is type(error)
    assert rebuilt.args == error.args
    assert rebuilt.__traceback__ is None


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_caught_exception_keeps_nothing_of_its_frames(kind):
    def fail():
        thing = Thing()
        things.append(weakref.ref(thing))
        raise kind

    things = []
    try:
        fail()
    except BaseException as error:
        kept = CapturedError(error, 0, "cpu")
    gc.collect()
    assert things[0]() is None
    assert kind.__name__ in repr(kept.rebuild()) + str(kept.rebuild())


def test_errors_pickle():
    for kind in (ReplicaSyncError, ReplicaTimeoutError):
        error = pickle.loads(pickle.dumps(kind("text")))
        assert type(error) is kind
        assert str(error) == "text"


def test_timeout_is_a_timeout_error():
    assert issubclass(ReplicaTimeoutError, TimeoutError)
    assert issubclass(ReplicaTimeoutError, ReplicaSyncError)


def _raised_while_handling(first, second, cause=None):
    try:
        try:
            raise first
        except Exception as error:
            raise second from (error if cause else None)
    except Exception as error:
        return error


def test_error_with_the_text_of_the_break_is_caused_by_it():
    assert is_caused_by(ReplicaSyncError("released"), "released")
    assert is_caused_by(ReplicaSyncError("Caught ReplicaSyncError in replica 0: released"), "released")


@pytest.mark.parametrize("cause", [True, False])
def test_error_while_the_release_was_handled_is_caused_by_it(cause):
    assert is_caused_by(_raised_while_handling(ReplicaSyncError("released"), KeyError(1), cause), "released")


def test_error_with_the_release_as_its_cause_alone_is_caused_by_it():
    error = ValueError()
    error.__cause__ = ReplicaSyncError("released")  # as of ``raise error from released``, outside of a handler
    assert is_caused_by(error, "released")


@pytest.mark.parametrize("error", [ReplicaSyncError("another"), ValueError("released"), None])
def test_other_errors_are_not_caused_by_the_break(error):
    assert not is_caused_by(error, "released")


def test_chain_that_closes_is_walked_once():
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    assert not is_caused_by(first, "released")


@pytest.mark.parametrize(
    "error", [ValueError("text"), KeyError("key"), RuntimeError(), ValueError("two", 2), OSError(2, "x"), Frozen("x")]
)
def test_note_travels_in_the_text(error):
    add_note(error, "The note.")
    assert "\nThe note.\n" in str(CapturedError(error, 0, "cpu").rebuild())
