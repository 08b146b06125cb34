"""A file's bytes, wherever they lie: as if they had been put one after the other."""

from __future__ import annotations

from array import array

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.memory.alignment import PAGE
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM

from ...support.examples import examples
from ...support.memory import pattern

pieces = st.lists(
    st.one_of(
        st.binary(max_size=300).map(lambda text: ("text", text)),
        st.integers(0, PAGE).map(lambda nbytes: ("padding", nbytes)),
        st.integers(0, 3 * PAGE).map(lambda nbytes: ("tensor", nbytes)),
        st.integers(DIRECT_FROM - 2, DIRECT_FROM + 3 * PAGE).map(lambda nbytes: ("tensor", nbytes)),
        st.sampled_from([2 * DIRECT_FROM, CHUNK + 7]).map(lambda nbytes: ("storage", nbytes)),
    ),
    max_size=12,
)
_PATTERN = torch.frombuffer(bytearray(pattern(2 * CHUNK)), dtype=torch.uint8)


def image_of(pieces: list[tuple[str, bytes | int]]) -> tuple[FileImage, torch.Tensor]:
    """And what it should hold."""
    image, content = FileImage(), []
    for index, (kind, what) in enumerate(pieces):
        if isinstance(what, bytes):
            image.add_text(what)
            content.append(torch.frombuffer(bytearray(what), dtype=torch.uint8) if what else torch.empty(0, dtype=torch.uint8))
        elif kind == "padding":
            image.add_padding(what)
            content.append(torch.full((what,), ord("Z"), dtype=torch.uint8))
        else:
            tensor = _PATTERN[index : index + what].clone()
            image.add(tensor if kind == "tensor" else tensor.untyped_storage())
            content.append(tensor)
    return image, torch.cat(content) if content else torch.empty(0, dtype=torch.uint8)


class TestCopies:
    @settings(deadline=None, max_examples=examples(30))
    @given(pieces, st.data())
    def test_any_range_is_that_of_the_concatenation(self, pieces: list[tuple[str, bytes | int]], data: st.DataObject) -> None:
        image, content = image_of(pieces)
        assert image.nbytes == len(content)
        for _ in range(3):
            begin = data.draw(st.integers(0, image.nbytes))
            end = data.draw(st.integers(begin, image.nbytes))
            into = torch.zeros(end - begin, dtype=torch.uint8)
            image.copy(begin, end, into)
            assert torch.equal(into, content[begin:end])

    @settings(deadline=None, max_examples=examples(30))
    @given(st.lists(st.tuples(st.binary(max_size=50), st.integers(0, PAGE), st.integers(0, 2 * PAGE)), max_size=10))
    def test_sources_added_at_once_are_as_those_added_one_by_one(self, rows: list[tuple[bytes, int, int]]) -> None:
        tensors = [_PATTERN[index : index + nbytes] for index, (_, _, nbytes) in enumerate(rows)]
        one_by_one, at_once = FileImage(), FileImage()
        for image in (one_by_one, at_once):
            image.add_text(b"before")
        for (text, padding, _), tensor in zip(rows, tensors, strict=True):
            one_by_one.add_text(text)
            one_by_one.add_padding(padding)
            one_by_one.add(tensor)
        texts = [text for text, _, _ in rows]
        paddings = array("Q", [padding for _, padding, _ in rows])
        at_once.add_each(tensors, b"".join(texts), array("Q", map(len, texts)), paddings)
        for image in (one_by_one, at_once):
            image.add_text(b"after")
        found, expected = (torch.zeros(image.nbytes, dtype=torch.uint8) for image in (at_once, one_by_one))
        at_once.copy(0, at_once.nbytes, found)
        one_by_one.copy(0, one_by_one.nbytes, expected)
        assert torch.equal(found, expected)
        assert at_once.digest() == one_by_one.digest()


class TestRanges:
    @settings(deadline=None, max_examples=examples(30))
    @given(pieces, st.data())
    def test_they_tile_what_was_asked_for_aligned_in_the_file(
        self, pieces: list[tuple[str, bytes | int]], data: st.DataObject
    ) -> None:
        image, content = image_of(pieces)
        pages = -(-image.nbytes // PAGE)
        begin = data.draw(st.integers(0, pages)) * PAGE
        end = min(max(begin, data.draw(st.integers(0, pages)) * PAGE), image.nbytes)
        at = min(begin, end)
        for part in image.ranges(at, end):
            assert part.begin == at
            assert part.begin % PAGE == 0
            assert part.end % PAGE == 0 or part.end == end
            assert part.end > part.begin
            if part.tensor is not None:
                assert torch.equal(part.tensor, content[part.begin : part.end])
            else:
                assert part.end - part.begin <= CHUNK
            at = part.end
        assert at == end

    def test_large_pieces_are_written_from_where_they_are(self) -> None:
        large = torch.zeros(DIRECT_FROM, dtype=torch.uint8)
        image = FileImage()
        image.add_text(b"head")
        image.add_padding(PAGE - 4)
        image.add(large)
        image.add_text(b"tail")
        inside = [part for part in image.ranges() if part.tensor is not None]
        assert [(part.begin, part.end) for part in inside] == [(PAGE, PAGE + DIRECT_FROM)]
        assert inside[0].tensor is not None
        assert inside[0].tensor.data_ptr() == large.data_ptr()
