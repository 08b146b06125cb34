"""The pickle stream of torch.save, and the storages it refers to."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import zipfile
from typing import Any

import pytest
import torch

from deepnvme.checkpoint.formats.pt_pickle import pickled
from deepnvme.ops import load_async_io


def torchs(obj: Any) -> bytes:
    saved = io.BytesIO()
    torch.save(obj, saved)
    with zipfile.ZipFile(saved) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("/data.pkl")))


def ours(obj: Any) -> bytes:
    return pickled(obj, 2).stream


class TestWhatCannotBeSaved:
    def test_a_storage_of_two_dtypes_is_refused(self) -> None:
        tensor = torch.ones(4)
        for save in (torchs, ours):
            with pytest.raises(RuntimeError, match=r"storage|dtype"):
                save([tensor, tensor.view(torch.int32)])

    @pytest.mark.parametrize(
        "obj",
        [threading.Lock(), lambda: None, [torch.ones(3), (each for each in [])]],
        ids=["lock", "lambda", "generator"],
    )
    def test_an_object_that_cannot_be_pickled_is_refused(self, obj: object) -> None:
        with pytest.raises((TypeError, pickle.PicklingError, AttributeError)) as expected:
            torchs(obj)
        with pytest.raises(type(expected.value)):
            ours(obj)
        assert gc.isenabled()

    def test_a_tensor_that_needs_hooks_is_refused(self) -> None:
        tensor = torch.ones(3, requires_grad=True)
        tensor.register_hook(lambda gradient: gradient)
        for save in (torchs, ours):
            with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
                save(tensor)


def test_storages_are_numbered_as_the_stream_meets_them_each_once() -> None:
    one, other = torch.arange(3.0), torch.arange(5)
    found = pickled([other[1:], one, other, one.view(3, 1)], 2)
    assert [storage.data_ptr() for storage in found.storages] == [other.data_ptr(), one.data_ptr()]


def test_empty_storages_are_told_apart() -> None:
    assert len(pickled([torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int32)], 2).storages) == 3


@pytest.mark.parametrize("obj", [torch.nn.ReLU().state_dict(), {"a": torch.nn.Identity().state_dict()}], ids=["it", "in a dict"])
def test_an_empty_state_dict_keeps_its_metadata(obj: Any) -> None:
    assert ours(obj) == torchs(obj)


class TestNoneFor:
    """The filter before the question whether an object is a storage."""

    def test_types_given_are_not_asked_about_and_their_subclasses_are(self) -> None:
        class Text(str):
            __slots__ = ()

        asked: list[object] = []
        answer = load_async_io().checkpoint.none_for(frozenset((str, dict)), asked.append)
        for obj in ("a", {}, Text("b"), 3):
            assert answer(obj) is None
        assert asked == ["b", 3]

    def test_errors_and_answers_are_passed_on(self) -> None:
        answer = load_async_io().checkpoint.none_for(frozenset((str,)), {3: "three"}.__getitem__)
        assert answer(3) == "three"
        with pytest.raises(KeyError):
            answer(4)

    @pytest.mark.parametrize("given", [((str,), len), (frozenset(), None)], ids=["a tuple", "no function"])
    def test_anything_but_types_and_a_function_is_refused(self, given: tuple[Any, Any]) -> None:
        with pytest.raises(TypeError):
            load_async_io().checkpoint.none_for(*given)


def test_the_collector_is_left_as_it_was() -> None:
    gc.disable()
    try:
        ours({})
        assert not gc.isenabled()
    finally:
        gc.enable()
    ours({})
    assert gc.isenabled()
