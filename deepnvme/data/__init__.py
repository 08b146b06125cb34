"""Training samples on the drive, read in truly random order by an engine instead of worker processes.

**The idea.** A drive reads small pieces from anywhere as fast as it reads long ones, if enough reads are in flight. So nothing is
shuffled approximately: a keyed permutation names the next samples, and one engine call reads a whole batch of them, some batches
ahead of the training step.

**Layers.** Each file knows only those above it in this table.

| file | what it has |
|---|---|
| `order.py` | `EpochSampler`: a permutation in O(1) memory; which samples a rank has in an epoch |
| `layouts.py` | `Layout`: where the bytes of each sample are, and how they become a sample; formats in place |
| `sample_files.py` | the format of `SampleWriter`: records, manifest, index, data files (docs/formats.md) |
| `mds.py`, `arrow.py`, `tfrecord.py` | files of MosaicML streaming, Hugging Face datasets and TensorFlow, in place |
| `writer.py` | `SampleWriter`: append, commit, merge |
| `reading.py` | `StoredSamples`: numbers -> ranges of files, one engine call -> samples, or an error that names the sample |
| `dataset.py` | `SampleDataset`, `TokenDataset`: which layout a path has |
| `loader.py` | `DataLoader`: reads ahead in the sampler's order, decodes in threads, collates, resumes |

**Invariants.**

1. A reader sees whole commits: the manifest is replaced when data and index are on stable storage, and names how many samples
   of each part count. Bytes beyond them mean nothing.
2. A batch owns its memory. Bytes are read into memory that is leased for this batch, and leased again when no tensor over it is
   alive. If a caller keeps so many samples that nothing is left to lease, ordinary memory is used.
3. The order is a function of (seed, epoch, ranks, number of samples). So a position is two numbers, epoch and batch.
4. Only the thread that iterates starts reads. Threads that decode wait for a read, and touch nothing of the loader.
5. An engine belongs to one process: a forked or unpickled dataset opens its files again when it is first used.
"""

from .dataset import SampleDataset, TokenDataset
from .layouts import CorruptSamples, SampleUnreadable
from .loader import DataLoader, LoaderStats
from .order import EpochSampler
from .writer import SampleWriter, merge_samples

__all__ = [
    "CorruptSamples",
    "DataLoader",
    "EpochSampler",
    "LoaderStats",
    "SampleDataset",
    "SampleUnreadable",
    "SampleWriter",
    "TokenDataset",
    "merge_samples",
]


def __dir__() -> list[str]:
    """Return the public names, without the submodules that define them."""
    return sorted(__all__)
