"""Counters of a weight stream: bytes read, tokens, and the time that each block waited for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepnvme.telemetry.report_figures import ReportFigures

_SHOWN = 5


@dataclass(frozen=True)
class StreamReport(ReportFigures):
    """Counters of a :class:`Streaming` since it was made or last reset; made by :meth:`Streaming.report`.

    ``str()`` returns the report as text, in which a GB is 10^9 bytes, and ``as_dict()`` its numbers. Units are seconds and
    bytes.
    """

    passes: int
    """Calls of the model."""
    seconds: float
    """Seconds spent in the model, and in blocks that were called without it."""
    bytes_read: int
    """Bytes read from the drive, including extents that were read ahead and then not used."""
    stalls: Mapping[str, float]
    """Seconds that each block waited for its weights, by the block's name."""
    tokens: int
    """Number of tokens generated: one per sequence for each decoding pass, and one for the prompt's pass if decoding follows it.
    With ``num_beams=3`` every beam counts: 18 for 6 tokens that are returned.

    Token ids are taken from ``input_ids``, else ``decoder_input_ids``, else the first argument if it is an integer tensor.
    """
    resident_bytes: int
    """Bytes of weights of blocks that stay in memory once they have been read."""
    limit: float | None
    """Bytes per second that the drive can deliver; None if :meth:`Streaming.measure_limit` was not called or read nothing."""
    prompt_tokens: int = 0
    """Number of tokens in passes of several positions: prompts, texts to be scored, and guesses of assisted generation."""

    @property
    def stalled(self) -> float:
        """Seconds that all blocks together waited for their weights."""
        return sum(self.stalls.values())

    @property
    def bytes_per_second(self) -> float:
        """Bytes read per second spent in the model; 0 if it was not called."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second spent in the model, including the time for prompts; 0 if the model was not called."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def share_of_limit(self) -> float | None:
        """``bytes_per_second`` as a share of ``limit``: 1 if the drive was never idle. None without a limit."""
        return None if self.limit is None else self.bytes_per_second / self.limit

    def __str__(self) -> str:
        share = "" if self.share_of_limit is None else f", {self.share_of_limit:.0%} of the drive's limit"
        prompts = f"{self.prompt_tokens} prompt tokens"
        tokens = f"{self.tokens} tokens generated, {self.tokens_per_second:.1f} tokens/s; {prompts}" if self.tokens else prompts
        lines = [
            f"{self.passes} pass{'' if self.passes == 1 else 'es'} in {self.seconds:.3f} s: {tokens}",
            f"read {self.bytes_read / 1e9:.3f} GB at {self.bytes_per_second / 1e9:.2f} GB/s{share};"
            f" {self.resident_bytes / 1e9:.3f} GB stay in memory",
            f"waited {self.stalled:.3f} s for weights",
        ]
        longest = sorted(self.stalls.items(), key=lambda stall: -stall[1])[:_SHOWN]
        lines += [f"  {seconds:8.3f} s  {block}" for block, seconds in longest if seconds >= 0.0005]
        return "\n".join(lines)
