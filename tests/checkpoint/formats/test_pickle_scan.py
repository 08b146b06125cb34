"""What a pickle refers to is found without making it, and without what a hostile one asks for."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from deepnvme.checkpoint.formats.pickle_scan import is_plain
from deepnvme.checkpoint.formats.pt_pickle import pickled
from deepnvme.ops import load_async_io

from ...support.objects import OBJECTS

MOST = (1 << 64) - 1


class TestHostilePickles:
    @pytest.mark.parametrize(
        "before",
        [
            b"", b"c", b"q", b"qc", b"\n", b"\nc", b"K\nq\n", b"abc\n", b"ctorch._utils\n", b"ctorch._utils\n_rebuild_tensor_v2",
            b"ctorch._utils\n_rebuild_tensor_v2\n", b"\ncollections\n", b"\x80ctorch\n", b"\xff\xfe", b"c\0c", b"X\n\0\0\0c",
        ],
        ids=repr,
    )  # fmt: skip
    @pytest.mark.parametrize("name", [b"ctorch._utils\n_rebuild_qtensor\n", b"cmodule of \xc3\xa9-\nClass.Inner\n", b"cc\nc\n"])
    def test_a_name_that_is_not_plain_cannot_hide(self, before: bytes, name: bytes) -> None:
        assert not is_plain(b"\x80\2" + before + name + b"q\0.")


class TestNames:
    @pytest.mark.parametrize("tensors", [1, 300])
    @pytest.mark.parametrize("kind", [dict, OrderedDict])
    def test_a_models_state_is_plain(self, tensors: int, kind: Any) -> None:
        storage = torch.zeros(10)
        state = kind((f"decoder.{index}.weight", storage.view(2, 5)) for index in range(tensors))
        assert is_plain(pickled(state, 2).stream)
        assert is_plain(pickled({"model": state, "step": 10, "dtype": torch.bfloat16}, 2).stream)

    @pytest.mark.parametrize("operation", [b"\x82\7", b"\x83\7\0", b"\x84\7\0\0\0"], ids=["1", "2", "4"])
    def test_what_is_registered_by_a_number_is_not_plain(self, operation: bytes) -> None:
        assert is_plain(b"\x80\2N.")
        assert not is_plain(b"\x80\2" + operation + b".")

    @pytest.mark.parametrize(
        ("stream", "names"),
        [
            (b"ca\nb\nca\nb\n.", [b"a\nb"]),
            (b"(ia\nb\n.", [b"a\nb"]),
            (b"X\4\0\0\0ca\nbca\n\n.", [b"a\n"]),
            (b"ca\nb\n\xff", None),
            (b"ca\nb", None),
            (b"\x8c\1a\x8c\1b\x93.", None),
        ],
        ids=repr,
    )
    def test_of_a_stream(self, stream: bytes, names: list[bytes] | None) -> None:
        assert load_async_io().checkpoint.pickle_walk(stream, 10)[-1] == names


class TestWalks:
    """What a pickle takes is known before anything is made of it."""

    @pytest.mark.parametrize("kind", OBJECTS)
    @pytest.mark.parametrize("protocol", [2, 5])
    def test_whatever_is_pickled_enters_the_memo(self, kind: str, protocol: int) -> None:
        deepest, unregistered, _, whole = walk(pickled(OBJECTS[kind](), protocol).stream)
        assert max(deepest, unregistered) < 20
        assert whole

    @pytest.mark.parametrize(
        ("stream", "expected"),
        [
            (b"", (0, 0, 0, False)),
            (b"((tt((.", (2, 1, 0, True)),
            (b"]]]q\0]q\1.", (0, 3, 1, True)),
            (b"]0}2\x8f", (0, 5, 0, False)),
            (b"q\0q\0]]", (0, 4, 0, False)),
            (b"X\xff\xff\xff\xff(((", (0, 0, 0, False)),
            (b"\x8d" + b"\xff" * 8 + b"(((", (0, 0, 0, False)),
            (b"cmodule\n((\n.", (0, 0, 0, True)),
            (b"(" * 300, (101, 0, 0, False)),
            (b"NN\x86N\x85NN\x87.", (2, 3, 0, True)),
            (b"N" + b"\x85" * 300, (101, 101, 0, False)),
            (b"(N\x85(0(N10\x85.", (2, 5, 0, True)),
            (b"N\x85q\0Nh\0\x85q\1]h\1\x85q\2.", (3, 2, 2, True)),
            (b"N\x85\x94N\x94q\0N\x85\x94h\2\x85.", (2, 3, 2, True)),
            (b"]q\4.", (0, 1, 4, False)),
            (b"]r\xff\xff\xff\xff.", (0, 1, (1 << 32) - 1, False)),
            (b"Np1_0\n" + b"N" * 20, (0, 1, MOST, False)),
            (b"Np99999999999999999999999\n.", (0, 1, MOST, False)),
            (b"N" + b"\x94" * 9 + b".", (0, 9, 8, True)),
            (b")q\0K\1q\1h\0q\2.", (0, 3, 2, True)),
            (b"]\x95" + bytes(8) + b"\x94.", (0, 1, 0, True)),
        ],
        ids=repr,
    )
    def test_of_a_stream(self, stream: bytes, expected: tuple[int, int, int, bool]) -> None:
        assert walk(stream) == expected

    @pytest.mark.parametrize(
        ("stream", "expected"),
        [
            (b"ca\nb\nNb.", True),
            (b"ca\nb\n2(Ntb.", True),
            (b"X\1\0\0\0a2\x93Nb.", True),
            (b"\x82\1Nb.", True),
            (b"ca\nb\nq\0]h\0Nb.", True),
            (b"ca\nb\nq\1]q\1h\1Nb.", False),
            (b"ca\nb\n)RNb.", False),
            (b"]ca\nb\na.", False),
        ],
        ids=repr,
    )
    def test_a_state_that_is_set_of_what_it_names(self, stream: bytes, expected: bool) -> None:
        assert load_async_io().checkpoint.pickle_walk(stream, 10)[3] is expected

    def test_a_long_text_is_entered_behind_the_frame_that_follows_it(self) -> None:
        file = io.BytesIO()
        pickle.dump([[bytes(100_000 + index), 1.5] for index in range(30)], file, 4)
        stream = file.getvalue()
        assert stream.count(b"\x95") >= 30
        assert walk(stream)[1] <= 1

    @pytest.mark.parametrize("protocol", range(6))
    def test_tuples_in_tuples_are_counted_through_the_memo(self, protocol: int) -> None:
        chain: list[Any] = [(None,)]
        for _ in range(29):
            chain += [(len(chain), chain[-1]), "text", [chain[-1]]]
            chain[-1], chain[-3] = chain[-3], chain[-1]
        assert walk(pickle.dumps(chain, protocol))[0] >= 30
        assert walk(pickle.dumps(chain, protocol), 20) >= (21, 0)


def walk(stream: bytes, most: int = 100) -> tuple[int, int, int, bool]:
    deepest, unregistered, memo, _, whole, _ = load_async_io().checkpoint.pickle_walk(stream, most)
    return deepest, unregistered, memo, whole
