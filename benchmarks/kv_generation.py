"""Generating with keys and values in memory and on the drive: OffloadedCache against the caches of transformers.

    python benchmarks/kv_generation.py --dir /mnt/nvme --json kv_generation.json

Each contender generates the same tokens in its turn: a ratio is taken round by round, between neighbours in time. Needs
transformers.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import document
from harness.figures import Verdict
from harness.optimizer_steps import drive_limits, quieten
from harness.tables import comparison_table, spread_text, table, verdict_table
from harness.workloads import ContenderFailed

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory

NVME = "deepnvme, drive"
HALF = "deepnvme, half of it in memory"


@dataclass(frozen=True)
class Settings:
    """The model and the prompts."""

    directory: Path
    rounds: int
    width: int
    layers: int
    sequences: int
    prompt_tokens: int
    new_tokens: int

    @property
    def nbytes(self) -> int:
        """Of all keys and values in the end, in float32."""
        return 2 * 4 * self.width * self.layers * self.sequences * (self.prompt_tokens + self.new_tokens)


@dataclass
class Measurements:
    """Everything one run found out."""

    verdicts: list[Verdict] = field(default_factory=list)
    comparison: Comparison[str, Counts] = field(default_factory=Comparison)


class Generation:
    """A Llama with random weights that generates for the same prompts, whichever cache it is given."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise ContenderFailed(f"not run: install transformers ({error})") from error
        torch.manual_seed(0)
        self.config = LlamaConfig(
            hidden_size=settings.width,
            intermediate_size=settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.width // 32,
            vocab_size=1000,
            max_position_embeddings=settings.prompt_tokens + settings.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        self._model = LlamaForCausalLM(self.config).eval()
        self._ids = torch.randint(1, 1000, (settings.sequences, settings.prompt_tokens))
        self._new = settings.new_tokens
        self._directory = directory
        self._expected: torch.Tensor | None = None

    def with_cache(self, make: Callable[[], Any]) -> Callable[[], Counts]:
        """A contender: it generates with a new cache, and says whether its tokens differ from those of the first contender."""

        def turn() -> Counts:
            quieten(self._directory)
            begun = time.perf_counter()
            with contextlib.ExitStack() as stack, torch.inference_mode():
                cache = make()
                if hasattr(cache, "report"):  # one of ours
                    stack.enter_context(cache)
                tokens = self._model.generate(
                    self._ids,
                    attention_mask=torch.ones_like(self._ids),
                    cache=cache,
                    do_sample=False,
                    max_new_tokens=self._new,
                    min_new_tokens=self._new,
                )
                seconds = time.perf_counter() - begun
                report = asdict(cache.report()) if hasattr(cache, "report") else {}
            if self._expected is None:
                self._expected = tokens
            differs = int(not torch.equal(tokens, self._expected))
            return {"seconds": seconds, "tokens_per_second": self._new * len(tokens) / seconds, "differs": differs, **report}

        return turn


def offloading(config: Any) -> Any:
    """transformers' own cache that moves layers to host memory. Raises ContenderFailed without a device to move them from."""
    from transformers import DynamicCache

    if not torch.cuda.is_available():
        raise ContenderFailed("not run: it moves keys and values between a CUDA device and host memory")
    return DynamicCache(config=config, offloading=True)


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    check_memory(4 * settings.nbytes, "give fewer --sequences")
    drive.check(settings.directory, 2 * settings.nbytes)
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="kv_generation-", dir=settings.directory) as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        generation = Generation(settings, directory)
        from transformers import DynamicCache

        from deepnvme.streaming import OffloadedCache

        config, half = generation.config, settings.nbytes // 2
        caches: dict[str, Callable[[], Any]] = {
            "DynamicCache": lambda: DynamicCache(config=config),
            "DynamicCache, offloading": lambda: offloading(config),
            "deepnvme, memory": lambda: OffloadedCache(config, path=directory, memory_budget=2 * settings.nbytes),
            NVME: lambda: OffloadedCache(config, path=directory),
            HALF: lambda: OffloadedCache(config, path=directory, memory_budget=half),
        }
        contenders = {who: generation.with_cache(make) for who, make in caches.items()}
        for who in ("DynamicCache", "deepnvme, memory", NVME):
            progress(f"trying: {who}")
            contenders[who]()  # touches the memory
        nbytes = min(settings.nbytes, 1 << 30)
        limits = stack.enter_context(drive_limits(directory / "limits", nbytes, settings.rounds, ("read",)))
        comparison = measure_interleaved("generate", {"limits": limits, **contenders}, settings.rounds, progress)
    measurements.comparison = comparison

    def of_bound(ours: Counts, limit: Counts, in_memory: Counts) -> float:
        share: float = max(ours["bytes_read"] / limit["read"], in_memory["seconds"]) / ours["seconds"]
        return share

    what = f"generating {settings.new_tokens} tokens for {settings.sequences} prompts of {settings.prompt_tokens}"
    in_memory = f"{what}, times as fast: in host memory / DynamicCache"
    measurements.verdicts += [
        judge(comparison, in_memory, ("deepnvme, memory", "DynamicCache"), times_as_fast, "at least", 0.9),
        judge(
            comparison,
            f"{what}: share of the speed of max(bytes read / read limit, DynamicCache)",
            (NVME, "limits", "DynamicCache"),
            of_bound,
            "at least",
            0.7,
        ),
        judge(comparison, f"{what}, times as fast: half of it in memory / none", (HALF, NVME), times_as_fast, "at least", 1.0),
        *(
            judge(comparison, f"turns whose tokens differ: {who}", (who,), lambda one: one["differs"], "at most", 0, summed=True)
            for who in ("deepnvme, memory", NVME, HALF)
        ),
    ]
    return measurements


# -- the command line --------------------------------------------------------------------------------------------------


def counts_table(comparison: Comparison[str, Counts]) -> str:
    """What each cache counted: tokens, and bytes in memory, on the drive and moved."""
    columns = {"tokens_per_second": 1.0, "bytes_in_memory": 1e6, "bytes_on_drive": 1e6, "bytes_read": 1e6, "bytes_written": 1e6}
    rows = [
        [who, *(spread_text(Spread.of([sample[key] / unit for sample in samples])) if key in samples[0] else "-"
                for key, unit in columns.items())]
        for who, samples in comparison.samples.items()
        if samples and "differs" in samples[0]
    ]  # fmt: skip
    return table("Caches", ["contender", "tokens/s", "MB in memory", "MB on the drive", "MB read", "MB written"], rows, left=1)


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    figures = {"bytes": settings.nbytes, "comparison": measurements.comparison.as_json()}
    return document("kv_generation", started, settings, measurements.verdicts, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, help="turns of each contender (default: 7)")
    parser.add_argument("--width", type=positive, default=256, help="of the Llama, a multiple of 32 (default: 256)")
    parser.add_argument("--layers", type=positive, help="of the Llama (default: 6)")
    parser.add_argument("--sequences", type=positive, help="to generate for at once (default: 16)")
    parser.add_argument("--prompt-tokens", type=positive, help="in each of them (default: 512)")
    parser.add_argument("--new-tokens", type=positive, help="to generate for each (default: 16)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    if given.width % 32:
        parser.error(f"--width: {given.width} is not a multiple of 32")
    settings = Settings(
        directory=given.dir,
        rounds=given.rounds or (2 if given.quick else 7),
        width=given.width,
        layers=given.layers or (2 if given.quick else 6),
        sequences=given.sequences or (4 if given.quick else 16),
        prompt_tokens=given.prompt_tokens or (300 if given.quick else 512),
        new_tokens=given.new_tokens or (4 if given.quick else 16),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("kv_generation") as started:
        measurements = measure(settings, print_step)
    print(comparison_table("generate", measurements.comparison))
    print(counts_table(measurements.comparison))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
