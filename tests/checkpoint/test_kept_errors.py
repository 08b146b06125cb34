from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

from deepnvme.checkpoint.file_io import clear_frames, clearing_frames

PROGRAM = """
def raising(ours):
    raise ValueError("no bytes")

def reading(call):
    ours = b""
    try:
        call(ours)
    except ValueError as error:
        raise OSError("unread") from error

def read_later(error):
    ours = b""
    raise OSError("unread") from error
"""
OURS: dict[str, Any] = {"__name__": "deepnvme.reading"}
exec(PROGRAM, OURS)
raising, reading, read_later = OURS["raising"], clearing_frames(OURS["reading"]), clearing_frames(OURS["read_later"])


def theirs(memory: bytes) -> None:
    raise ValueError("no bytes")


def kept(error: BaseException | None) -> set[str]:
    """The functions that still have their variables."""
    found = set()
    trace: TracebackType | None = error.__traceback__ if error is not None else None
    while trace is not None:
        if {"ours", "memory"} & set(trace.tb_frame.f_locals):
            found.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return found


def failed(call: Any, *args: Any) -> BaseException:
    with pytest.raises((OSError, ValueError)) as caught:
        call(*args)
    return caught.value


def test_an_error_and_its_cause_keep_no_variables_of_ours() -> None:
    error = failed(reading, raising)
    assert error.__cause__ is not None
    assert kept(error) | kept(error.__cause__) == set()


def test_a_cause_that_was_handled_before_keeps_none_either() -> None:
    cause = failed(raising, b"")
    assert kept(cause) == {"raising"}
    failed(read_later, cause)
    assert kept(cause) == set()


def test_functions_of_others_keep_theirs() -> None:
    error = failed(reading, theirs)
    assert kept(error) == set()
    assert kept(error.__cause__) == {"theirs"}


def test_a_generator_of_others_that_is_suspended_goes_on() -> None:
    def failing() -> Iterator[BaseException]:
        try:
            theirs(b"")
        except ValueError as error:
            yield error
        yield OSError()

    errors = failing()
    clear_frames(next(errors))
    assert isinstance(next(errors), OSError)


def test_errors_that_led_to_each_other() -> None:
    error, other = failed(raising, b""), failed(raising, b"")
    error.__context__, other.__context__ = other, error
    clear_frames(error)
    assert kept(error) | kept(other) == set()
