"""What a stream tells of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from deepnvme.streaming.stream_report import StreamReport
from deepnvme.streaming.streamed_forwards import StreamCounters

REPORT = StreamReport(
    passes=2,
    seconds=4.0,
    bytes_read=8 * 10**9,
    stalls={f"layers.{index}": index / 10 for index in range(7)} | {"norm": 0.0001},
    tokens=100,
    resident_bytes=10**9,
    limit=None,
    prompt_tokens=17,
)


def test_nothing_has_happened_yet() -> None:
    report = StreamReport(0, 0.0, 0, {}, 0, 0, 1e9)
    assert (report.bytes_per_second, report.tokens_per_second, report.share_of_limit, report.stalled) == (0, 0, 0, 0)
    assert str(report).startswith("0 passes in 0.000 s: 0 prompt tokens\n")


def test_rates_are_of_all_the_time_in_the_model() -> None:
    assert (REPORT.bytes_per_second, REPORT.tokens_per_second) == (2e9, 25.0)
    assert REPORT.share_of_limit is None
    assert dataclasses.replace(REPORT, limit=2.5e9).share_of_limit == pytest.approx(0.8)
    assert REPORT.stalled == pytest.approx(2.1001)


def test_the_longest_stalls_are_shown() -> None:
    assert str(REPORT).splitlines() == [
        "2 passes in 4.000 s: 100 tokens generated, 25.0 tokens/s; 17 prompt tokens",
        "read 8.000 GB at 2.00 GB/s; 1.000 GB stay in memory",
        "waited 2.100 s for weights",
        *(f"     {index / 10:.3f} s  layers.{index}" for index in (6, 5, 4, 3, 2)),
    ]
    assert "at 2.00 GB/s, 80% of the drive's limit;" in str(dataclasses.replace(REPORT, limit=2.5e9))
    assert str(dataclasses.replace(REPORT, passes=1, stalls={"norm": 0.0001})).splitlines()[0].startswith("1 pass in")
    assert "norm" not in str(dataclasses.replace(REPORT, stalls={"norm": 0.0001}))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_are_counted_however_they_are_given(dtype: torch.dtype) -> None:
    ids, one = torch.ones(2, 5, dtype=dtype), torch.ones(2, 1, dtype=dtype)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], int, int]] = [
        ((), {}, 0, 0),
        ((ids.float(),), {}, 0, 0),
        (("text",), {}, 0, 0),
        ((ids,), {}, 0, 10),
        ((), {"input_ids": ids}, 0, 10),
        ((), {"decoder_input_ids": one}, 2, 0),
        ((), {"input_ids": ids, "decoder_input_ids": one}, 0, 10),
        ((ids.float(),), {"decoder_input_ids": one}, 2, 0),
        ((ids[:, 0],), {}, 0, 2),
        ((torch.tensor(1),), {}, 1, 0),
        ((ids[:, :0],), {}, 0, 0),
    ]
    for args, kwargs, tokens, prompt in calls:
        tally = StreamCounters()
        tally.called(args, kwargs)
        assert (tally.passes, tally.tokens, tally.prompt_tokens) == (1, tokens, prompt)


@pytest.mark.parametrize(
    ("positions", "tokens", "prompt"),
    [
        ([8, 1, 1, 1], 4, 8),  # with a KV cache: the pass of the prompt generates one, too
        ([8, 9, 10, 11], 4, 8),  # without
        ([8, 8, 8], 0, 24),  # texts that are scored
        ([4, 4, 1, 1], 3, 8),  # a prompt in two parts
        ([8, 1, 1, 6, 1], 5, 14),  # two prompts
        ([1, 1, 1], 3, 0),  # a decoder's, that begins with one token
    ],
)
def test_generated_tokens_are_told_from_those_of_prompts(positions: list[int], tokens: int, prompt: int) -> None:
    tally = StreamCounters()
    for count in positions:
        tally.called((torch.ones(3, count, dtype=torch.int64),), {})
    assert (tally.tokens, tally.prompt_tokens) == (3 * tokens, 3 * prompt)
