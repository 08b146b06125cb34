"""Results of the tuner, without tuning: for what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune.folder import folder_facts
from deepnvme.tools.tune.results import Figures, Result, Search, Tuning


def tuning_of(folders: Sequence[Path]) -> Tuning:
    """Results for folders: the best for the one numbered n is a depth of n + 1, at n + 1 GB/s; for all together it is 100."""
    facts = [folder_facts(folder) for folder in folders]

    def search(depth: int, *numbers: int) -> Search:
        figures = Figures(float(depth), 0.01, 0.002)
        best = Result(AioConfig(block_size=4 << 20, queue_depth=depth), "io_uring", figures, figures, 1)
        return Search(tuple(facts[number] for number in numbers), best, "the only one", 1, 1.0, (best,))

    searches = [search(number + 1, number) for number in range(len(folders))]
    if len(folders) > 1:
        searches.append(search(100, *range(len(folders))))
    return Tuning(1 << 20, 1.0, 0, tuple(searches))
