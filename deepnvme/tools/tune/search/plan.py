"""Plans a search: how many settings each round measures, with how long transfers, within limits of time and of bytes written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .round_data import Round

FINALISTS = 6
"""Most settings of the last round, which decides among them."""
BATCH = 12
"""Most settings that are measured between two transfers with the reference setting."""
# Passes that are made however long they take: one alone would not tell the noise, and with fewer than eight Wilcoxon's test has
# no interval for the five differences of a final.
_LEAST_PASSES, _LEAST_FINAL_PASSES = 2, 8
# A quarter of the settings is kept each round: with 225, 57, 15 and 6, which leaves more bytes for each round than a third would.
_KEPT = 4
# Passes over the settings of a round that transfers are made short enough for, and the most that are made. Few of them, so that
# transfers are long, although the speed of short ones hardly varies more: on a busy machine, where a worker waits for a
# processor, only much in flight keeps the drive busy, and a transfer of 30 MiB does not show that. (Measured on two processors
# with a load of eight: by such transfers, settings were chosen that take up to 26 % longer for 128 MiB than the best.)
_PASSES, _MOST_PASSES = 8, 16
_FINAL_PASSES, _MOST_FINAL_PASSES = 16, 96
# The final's share of time and bytes, in shares of another round.
_FINAL_WEIGHT = 2.0
# A transfer has at least the bytes that are moved in this many seconds; but for a slow drive no fewer than the first number, and
# for a fast one no more than the second, which fills its queues.
_SHORTEST_SECONDS, _SHORTEST_BYTES = 0.02, (4 << 20, 16 << 20)
_WARM_UP_BYTES = 64 << 20


def settings_per_round(settings: int) -> list[int]:
    """Return how many of ``settings`` settings take part in each round; the last is the final."""
    counts = [settings]
    while counts[-1] > FINALISTS:
        counts.append(max(FINALISTS, math.ceil(counts[-1] / _KEPT)))
    return counts


def least_written(settings: int, io_size: int) -> int:
    """Return the bytes that a search among ``settings`` settings writes at least."""
    return min(io_size, _SHORTEST_BYTES[0]) * (1 + _least_transfers(settings_per_round(settings)))


@dataclass(frozen=True)
class Pace:
    """How long transfers take, as far as measured."""

    rate: float
    """Bytes per second, moved in each direction."""
    overhead: float
    """Seconds for each setting outside of the measured time: dropping pages, making handles."""

    @classmethod
    def of(cls, measured: Round, seconds: float) -> Pace:
        """Return the pace of a round that took ``seconds``, with what is not part of a transfer."""
        samples = [*measured.reference, *(each for found in measured.samples.values() for each in found)]
        rate = 1 / statistics.median(sample.seconds_per_byte for sample in samples)
        moving = sum(sample.seconds for sample in samples)
        return cls(rate, max(seconds - moving, 0.0) / len(samples))


@dataclass(frozen=True)
class RoundPlan:
    """What one round is to do."""

    nbytes: int
    """Bytes of each transfer, the same for all of the round."""
    least: int
    """Passes to make however long they take."""
    most: int
    """Passes to make if there is time."""
    seconds: float
    """Time for the round."""
    shortened: bool
    """Whether the limit of bytes written, rather than the time, ends the round."""


def warm_up_bytes(settings: int, io_size: int, writes_left: int | None) -> int:
    """Return the bytes of the first transfer in each direction, which tells the pace and is the warm-up."""
    shortest = min(io_size, _SHORTEST_BYTES[0])
    nbytes = min(io_size, _WARM_UP_BYTES)
    if writes_left is None:
        return nbytes
    return max(shortest, min(nbytes, shortest + writes_left - least_written(settings, io_size)))


def plan_round(counts: Sequence[int], io_size: int, pace: Pace, seconds_left: float, writes_left: int | None) -> RoundPlan:
    """Return what the next round is to do.

    Rounds share what is left of time and bytes equally, but for the last one, which gets more.

    Args:
        counts: Settings of this round and of those to follow.
        io_size: Bytes of the largest transfer.
        pace: How long transfers took so far.
        seconds_left: Until the search should end; may be negative.
        writes_left: Bytes that may still be written; at least what all rounds need at least. None for no limit.
    """
    final = len(counts) == 1
    share = _weight(final) / (_weight(True) + len(counts) - 1)
    seconds = max(seconds_left, 0.0) * share
    aim, most = (_FINAL_PASSES, _MOST_FINAL_PASSES) if final else (_PASSES, _MOST_PASSES)
    transfers, least = _transfers_per_pass(counts[0]), _least_passes(final)
    low, high = (min(io_size, each) for each in _SHORTEST_BYTES)
    shortest = min(max(_SHORTEST_SECONDS * pace.rate, low), high)
    nbytes = min(max((seconds / (transfers * aim) - pace.overhead) * pace.rate, shortest), io_size)
    if writes_left is None:
        return RoundPlan(_whole_mib(nbytes), least, most, seconds, shortened=False)
    later = low * _least_transfers(counts[1:])
    writes = min(max(writes_left * share, low * least * transfers), writes_left - later)
    allowed = _whole_mib(min(nbytes, max(writes / (transfers * aim), high), writes / (transfers * least)))
    passes = min(most, int(writes // (transfers * allowed)))
    in_time = seconds / (transfers * (allowed / pace.rate + pace.overhead))
    return RoundPlan(allowed, least, passes, seconds, shortened=passes < min(most, in_time))


def _whole_mib(nbytes: float) -> int:
    """Round down to whole MiB, if it is one at least."""
    return int(nbytes) >> 20 << 20 or int(nbytes)


def _weight(final: bool) -> float:
    """Return the share of a round in time and bytes, relative to the rounds before the final."""
    return _FINAL_WEIGHT if final else 1.0


def _least_passes(final: bool) -> int:
    """Return the passes that a round makes at least."""
    return _LEAST_FINAL_PASSES if final else _LEAST_PASSES


def _least_transfers(counts: Sequence[int]) -> int:
    """Return the transfers in each direction that rounds make at least, the last of which is the final; 0 for none."""
    *before, final = counts or [0]
    return _LEAST_FINAL_PASSES * _transfers_per_pass(final) + _LEAST_PASSES * sum(map(_transfers_per_pass, before))


def _transfers_per_pass(count: int) -> int:
    """Return the transfers of a pass in each direction: ``count`` settings, and the reference before each batch of them."""
    return count + math.ceil(count / BATCH)
