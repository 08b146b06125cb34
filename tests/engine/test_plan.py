"""How one transfer is cut into blocks, and which way each goes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SECTORS = (512, 512)
PAGE = 4096
BLOCK = 65536

# offset, length, address, (memory, offset) alignment, block size -> (begin, end, route) of each span
TABLE = {
    "one page": (0, 4096, 0, SECTORS, BLOCK, [(0, 4096, "zero_copy")]),
    "one page, memory askew": (0, 4096, 1, SECTORS, BLOCK, [(0, 4096, "staged")]),
    "one page, memory on the drive's own alignment": (0, 4096, 4, (4, 512), BLOCK, [(0, 4096, "zero_copy")]),
    "one byte": (0, 1, 0, SECTORS, BLOCK, [(0, 1, "buffered")]),
    "one sector is part of a page": (0, 512, 0, SECTORS, BLOCK, [(0, 512, "buffered")]),
    "a byte short of a page": (0, 4095, 0, SECTORS, BLOCK, [(0, 4095, "buffered")]),
    "a byte more than a page": (0, 4097, 0, SECTORS, BLOCK, [(0, 4096, "zero_copy"), (4096, 4097, "buffered")]),
    "a page's length across two pages": (1, 4096, 1, SECTORS, BLOCK, [(1, 4097, "buffered")]),
    "head, body and tail": (
        4095, 4098, 4095, SECTORS, BLOCK, [(4095, 4096, "buffered"), (4096, 8192, "zero_copy"), (8192, 8193, "buffered")],
    ),
    "memory aligned where the head begins, not the body": (
        100, 8192, 0, SECTORS, BLOCK, [(100, 4096, "buffered"), (4096, 8192, "staged"), (8192, 8292, "buffered")],
    ),
    "memory and file askew by the same amount": (
        100, 8192, 100, SECTORS, BLOCK, [(100, 4096, "buffered"), (4096, 8192, "zero_copy"), (8192, 8292, "buffered")],
    ),
    "from a sector that does not start a page": (
        512, 8192, 512, SECTORS, BLOCK,
        [(512, 4096, "buffered"), (4096, 8192, "zero_copy"), (8192, 8704, "buffered")],
    ),
    "sectors larger than a page": (0, 12288, 0, (8192, 8192), BLOCK, [(0, 8192, "zero_copy"), (8192, 12288, "buffered")]),
    "no direct I/O": (0, 8192, 0, None, BLOCK, [(0, 8192, "buffered")]),
    "no direct I/O, nothing aligned": (7, 8192, 3, None, BLOCK, [(7, 8199, "buffered")]),
    "nothing": (4096, 0, 0, SECTORS, BLOCK, []),
    "nothing, without direct I/O": (0, 0, 0, None, BLOCK, []),
    "past 2^31": (2**31 + 4096, 4096, 0, SECTORS, BLOCK, [(2**31 + 4096, 2**31 + 8192, "zero_copy")]),
    "up to the largest file": (2**63 - 4097, 4096, 4095, SECTORS, BLOCK, [(2**63 - 4097, 2**63 - 1, "buffered")]),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_a_transfer_takes_the_route_that_its_alignment_allows(testing: ModuleType, case: str) -> None:
    offset, length, address, alignment, block_size, expected = TABLE[case]
    spans, _ = testing.plan(offset, length, address, alignment, block_size, BLOCK, PAGE)
    routes = [(begin, end, route) for begin, end, _, route in spans]
    # Two neighbouring buffered spans say the same as one.
    assert _merged(routes) == _merged(expected)


def _merged(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    merged: list[tuple[int, int, str]] = []
    for begin, end, route in spans:
        if merged and merged[-1][1] == begin and merged[-1][2] == route:
            begin = merged.pop()[0]
        merged.append((begin, end, route))
    return merged


# block size, staging size, address -> offsets at which a body of 64 KiB at offset 0 is cut
@pytest.mark.parametrize(
    ("block_size", "staging_size", "address", "length"),
    [
        pytest.param(16384, 65536, 0, 16384, id="the block size"),
        pytest.param(10000, 65536, 0, 9728, id="whole sectors of a block size that is none"),
        pytest.param(65536, 8192, 0, 65536, id="not the staging size, in place"),
        pytest.param(65536, 8192, 1, 8192, id="the staging size, staged"),
        pytest.param(4096, 8192, 1, 4096, id="the block size, staged"),
    ],
)
def test_blocks_are_as_long_as(testing: ModuleType, block_size: int, staging_size: int, address: int, length: int) -> None:
    _, blocks = testing.plan(0, 65536, address, SECTORS, block_size, staging_size, PAGE)
    assert blocks[0][1] == length


def powers(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most).map(lambda exponent: 1 << exponent)


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a plan: at most a few hundred blocks, near round figures as often as not."""
    block_size = draw(st.one_of(powers(9, 22), st.integers(512, 1 << 22)))
    alignment = draw(st.none() | st.tuples(powers(0, 16), powers(9, 16)))
    near = st.builds(lambda unit, times, by: max(unit * times + by, 0), powers(9, 24), st.integers(0, 64), st.integers(-3, 3))
    return {
        "offset": draw(st.one_of(near, st.integers(0, 2**62))),
        "length": min(draw(st.one_of(near, st.integers(0, 1 << 20))), 200 * min(block_size, 4096)),
        "address": draw(st.one_of(near, st.integers(0, 2**47))),
        "alignment": alignment,
        "block_size": block_size,
        # as the engine chooses it
        "staging_size": max(min(block_size, 1 << 20) // 4096 * 4096, 4096),
        "page_size": draw(st.sampled_from([4096, 16384, 65536])),
        "on_device": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"whole_pages": True}, {"whole_sectors": True}])),
    }


@given(plans())
@settings(deadline=None, max_examples=300)
def test_blocks_are_the_transfer_in_order_each_within_its_limits(testing: ModuleType, arguments: dict[str, Any]) -> None:
    _, blocks = testing.plan(**arguments)
    page = arguments["page_size"]
    memory_alignment, offset_alignment = arguments["alignment"] or (1, 1)
    longest = max(arguments["block_size"], memory_alignment, offset_alignment)
    pages: dict[bool, set[int]] = {True: set(), False: set()}
    at = arguments["offset"]
    for offset, length, route in blocks:
        assert offset == at
        assert length > 0
        at += length
        pages[route == "buffered"] |= {offset // page, (offset + length - 1) // page}
        if route in ("staged", "padded") or arguments["on_device"]:
            assert length <= arguments["staging_size"]
        assert length <= max(longest, page if route == "padded" else 0)  # the rest of a file's last page is one block
        if route != "buffered":
            assert arguments["alignment"] is not None
            assert offset % offset_alignment == 0
        if route == "padded":
            assert (offset % page, page % offset_alignment) == (0, 0)
            assert length < page
        elif route != "buffered":
            assert length % offset_alignment == 0
        if route == "zero_copy":
            assert (arguments["address"] + offset - arguments["offset"]) % memory_alignment == 0
    assert at == arguments["offset"] + arguments["length"]
    assert not pages[True] & pages[False]  # no page is both direct and buffered
