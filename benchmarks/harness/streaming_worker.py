"""A Llama in a process of its own, with its weights in memory or on the drive:
``python -m harness.streaming_worker SETTINGS REQUESTS REPLIES``."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deepnvme.tools.tune.folder import drop_pages
from harness import llama
from harness.llama import Shape
from harness.meter import measure
from harness.serving import serve
from harness.workloads import ContenderFailed


class StreamingWorker:
    """``kind``: memory, deepnvme, in_place or accelerate. ``weights``: a directory of safetensors, a store, or what disk_offload
    writes and reads."""

    def __init__(
        self, *, kind: str, shape: dict[str, int], weights: str, checkpoint: str = "", budget: int = 0, prefetch: int = 2
    ) -> None:
        self._kind, self._shape = kind, Shape(**shape)
        self._weights, self._checkpoint = Path(weights), Path(checkpoint)
        self._budget, self._prefetch = budget, prefetch
        self._dropping = 0.0
        self._streaming: Any = None
        self._model: Any = None
        # What comes with the first use of torch and transformers, memory above all, is not the streaming's.
        warm = llama.empty(Shape(256, 1, 100)).to_empty(device="cpu")
        with torch.inference_mode():
            warm(torch.zeros((1, 2), dtype=torch.long))

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}

    def save(self) -> dict[str, Any]:
        """Write the directory of safetensors."""
        llama.save(self._shape, self._weights)
        return {}

    def start(self) -> dict[str, Any]:
        """Make the model in the way that the contender is named after."""
        getattr(self, f"_start_{self._kind}")()
        return {}

    def _start_memory(self) -> None:
        self._model = llama.loaded(self._shape, self._weights)

    def _start_deepnvme(self) -> None:
        from deepnvme.streaming import WeightStore, stream

        self._model = llama.empty(self._shape)
        store = WeightStore.open(self._weights)
        self._streaming = stream(self._model, store, prefetch=self._prefetch, memory_budget=self._budget)

    def _start_in_place(self) -> None:
        from deepnvme.streaming import stream

        self._model = llama.empty(self._shape)
        self._streaming = stream(self._model, self._weights, prefetch=self._prefetch, memory_budget=self._budget)

    def _start_accelerate(self) -> None:
        try:
            from accelerate import disk_offload
        except ImportError as error:
            raise ContenderFailed("not run: install accelerate") from error
        written = (self._weights / "index.json").exists()
        model = llama.empty(self._shape) if written else llama.loaded(self._shape, self._checkpoint)
        model.register_forward_pre_hook(lambda *_: self._drop())
        self._model = disk_offload(model, self._weights, execution_device=torch.device("cpu"))

    def _drop(self) -> None:
        """A model that does not fit into memory does not fit into the page cache either."""
        begun = time.perf_counter()
        drop_pages(self._weights.iterdir())
        self._dropping += time.perf_counter() - begun

    def forward(self, *, sequences: int, tokens: int) -> dict[str, float]:
        """One pass."""
        ids = self._ids(sequences, tokens)
        return self._timed(lambda: self._model(ids, use_cache=False))

    def generate(self, *, prompts: int, tokens: int, new: int) -> dict[str, float]:
        ids = self._ids(prompts, tokens)
        return self._timed(lambda: self._generated(ids, new))

    def answers(self, *, prompts: int, tokens: int, new: int) -> dict[str, Any]:
        """What a pass finds, bit by bit, and what is generated."""
        ids = self._ids(prompts, tokens)
        with torch.inference_mode():
            logits = self._model(ids).logits
        digest = hashlib.sha256(bytes(logits.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()
        return {"logits": digest, "tokens": self._generated(ids, new).tolist()}

    def first(self) -> dict[str, int]:
        """Make the model and compute one token. Return the bytes that this process has sent to drives meanwhile."""
        import deepnvme.streaming  # noqa: F401  # whose bytecode may have to be written

        before = _bytes_written()
        self.start()
        self.forward(sequences=1, tokens=1)
        return {"written": _bytes_written() - before}

    def peak(self, *, passes: int) -> dict[str, float | int | None]:
        """Bytes by which memory grows at most, from before the model is streamed."""

        def work() -> None:
            self.start()
            for _ in range(passes):
                self.forward(sequences=1, tokens=1)

        return {"growth": measure(work)["peak_growth"]}

    def _generated(self, ids: torch.Tensor, new: int) -> torch.Tensor:
        found: torch.Tensor = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return found

    def _timed(self, work: Any) -> dict[str, float]:
        """Seconds of some work, without those in which accelerate drops the page cache."""
        self._dropping = 0.0
        begun = time.perf_counter()
        with torch.inference_mode():
            work()
        return {"seconds": time.perf_counter() - begun - self._dropping}

    def _ids(self, sequences: int, tokens: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(0)
        return torch.randint(1, self._shape.vocabulary, (sequences, tokens), generator=drawn)


def _bytes_written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    methods = ("save", "start", "forward", "generate", "answers", "first", "peak")
    serve(lambda: StreamingWorker(**json.loads(settings)), methods, int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
