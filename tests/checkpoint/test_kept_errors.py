from __future__ import annotations

from types import TracebackType

import pytest

from deepnvme.checkpoint.kept_errors import clearing_frames


def raising(memory: bytes) -> None:
    raise ValueError("no bytes")


@clearing_frames
def reading() -> None:
    try:
        raising(b"")
    except ValueError as error:
        raise OSError("unread") from error


def kept(trace: TracebackType | None) -> list[str]:
    names = []
    while trace is not None:
        if "memory" in trace.tb_frame.f_locals:
            names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


def test_an_error_and_its_cause_keep_no_variables() -> None:
    with pytest.raises(OSError, match="unread") as caught:
        reading()
    assert caught.value.__cause__ is not None
    assert kept(caught.value.__traceback__) == []
    assert kept(caught.value.__cause__.__traceback__) == []


def test_an_error_that_the_caller_was_handling_keeps_its_variables() -> None:
    with pytest.raises(ValueError, match="no bytes") as handled:
        raising(b"")
    try:
        raise handled.value
    except ValueError:
        with pytest.raises(OSError, match="unread") as caught:
            reading()
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__context__ is handled.value
    assert "raising" in kept(handled.value.__traceback__)
