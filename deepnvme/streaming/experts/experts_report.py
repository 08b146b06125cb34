"""Counters of experts that are read on demand: how often they were in memory when they were chosen, and the bytes read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepnvme.telemetry.report_figures import ReportFigures


@dataclass(frozen=True)
class LayerUses(ReportFigures):
    """Uses of the experts of one layer. An expert that several tokens of one call choose is used once in the call."""

    chosen: int
    """Experts used."""
    hits: int
    """Experts among them whose weights were all in memory when the layer was called."""

    @property
    def read(self) -> int:
        """Experts that were read, as a whole or in part."""
        return self.chosen - self.hits


@dataclass(frozen=True)
class ExpertsReport(ReportFigures):
    """Counters of :class:`OffloadedExperts` since the experts were offloaded or the counters last reset.

    ``str()`` returns the report as text, in which a MB is 10^6 bytes and a GB is 10^9, and ``as_dict()`` its numbers, with those
    of each layer.
    """

    layers: Mapping[str, LayerUses]
    """Uses by the name of the module that has all experts of a layer."""
    tokens: int
    """Tokens that the layer with the most tokens has routed. 0 if experts are modules of their own."""
    bytes_read: int
    """Bytes read from the drive."""
    bytes_missed: int
    """Bytes of the experts' weights that were chosen while they were not in memory. The rest of ``bytes_read`` is pages around
    weights, and experts read ahead that an error then kept from being used."""
    seconds: float
    """Seconds within calls of the modules that have the experts. The rest of the model's time is not among them."""
    seconds_reading: float
    """Seconds with at least one read in flight, whether or not a layer waited for it."""
    seconds_waited: float
    """Seconds that layers waited for their experts."""
    memory_budget: int
    """Limit of the bytes of experts in memory."""
    budget_for_90_percent: int
    """Bytes of the smallest set of experts that had 90 % of all uses. With this ``memory_budget`` for experts, beside that for
    other weights, 90 % would be in memory once each was read, if tokens went on choosing like this."""

    @property
    def hit_rate(self) -> float:
        """Share of the experts used that were in memory when the layer was called; 0 if none was used."""
        chosen = sum(layer.chosen for layer in self.layers.values())
        return sum(layer.hits for layer in self.layers.values()) / chosen if chosen else 0.0

    @property
    def drive_share(self) -> float:
        """Share of ``seconds`` with at least one read in flight. It says nothing about how fast the drive was."""
        return min(1.0, self.seconds_reading / self.seconds) if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes read for each second with a read in flight; 0 without reads. ``ds_io`` measures the drive's limit."""
        return self.bytes_read / self.seconds_reading if self.seconds_reading else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for a token; 0 without tokens."""
        return self.bytes_read / self.tokens if self.tokens else 0.0

    def as_dict(self, prefix: str = "") -> dict[str, int | float]:
        """Return all numbers of the report by name, those of a layer as ``layers_NAME_hits``, see :class:`LayerUses`.

        Args:
            prefix: Prepended to all names.
        """
        figures = super().as_dict(prefix)
        for name, layer in self.layers.items():
            figures.update(layer.as_dict(f"{prefix}layers_{name}_"))
        return figures

    def __str__(self) -> str:
        chosen = sum(layer.chosen for layer in self.layers.values())
        text = (
            f"{f'{self.tokens} tokens' if self.tokens else 'calls'} used {chosen} experts, {self.hit_rate:.1%} of them in memory;"
            f" read {self.bytes_read / 1e6:.1f} MB"
            f"{f' ({self.bytes_per_token / 1e6:.1f} MB a token)' if self.tokens else ''}; waited {self.seconds_waited:.3f} s, and"
            f" the drive was reading for {self.drive_share:.0%} of {self.seconds:.3f} s, {self.bytes_per_second / 1e9:.2f} GB/s"
        )
        if self.budget_for_90_percent > self.memory_budget:
            text += (
                f"; once read, 90 % would have been in memory with {self.budget_for_90_percent / 1e6:.1f} MB of experts instead"
                f" of {self.memory_budget / 1e6:.1f} MB"
            )
        return text


def most_used_bytes(experts: Iterable[tuple[int, int]], share: float) -> int:
    """Return the bytes of as many experts, those with the most uses, as have had ``share`` of all uses.

    Args:
        experts: For each expert, the number of its uses and its bytes.
        share: From 0 to 1.
    """
    most_used = sorted(experts, reverse=True)
    left, total = share * sum(uses for uses, _ in most_used), 0
    for uses, nbytes in most_used:
        if left <= 0:
            break
        left -= uses
        total += nbytes
    return total
