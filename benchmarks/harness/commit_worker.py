"""One workload, with the package of the commit that this process imports:
``python -m harness.commit_worker SETTINGS REQUESTS REPLIES``.

Uses public names alone, and modules of the harness that import nothing of the package: older commits have others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import deepnvme
from deepnvme.memory import BufferPool
from harness import llama, meter, training_models
from harness.layers import Layers, loss_of
from harness.llama import Shape
from harness.serving import serve
from harness.training_models import STEPS_TO_SETTLE, TrainingShape

Turn = Callable[[], object]


def raw(directory: Path, scale: float) -> Turn:
    """A tensor written to an existing file and read back."""
    engine = deepnvme.Engine()
    tensor = torch.ones(int(scale * (512 << 20)), dtype=torch.uint8)
    engine.write(tensor, directory / "tensor").result()

    def turn() -> None:
        engine.write(tensor, directory / "tensor").result()
        engine.read(tensor, directory / "tensor").result()

    return turn


def step(directory: Path, scale: float) -> Turn:
    return _step(directory, scale, torch.bfloat16)


def fp32_step(directory: Path, scale: float) -> Turn:
    return _step(directory, scale, torch.float32)


def fp32_step_in_little_memory(directory: Path, scale: float) -> Turn:
    """With a buffer pool that has room for the sub-groups in flight and their gradients, and for no copies of parameters."""
    return _step(directory, scale, torch.float32, pool=BufferPool("164MiB"))


def _step(directory: Path, scale: float, dtype: torch.dtype, **given: Any) -> Turn:
    """A step of AdamW with its states on the drive, in sub-groups of one matrix."""
    width = 2048
    model = Layers(width, max(2, int(scale * 12)), dtype)
    loss_of(model, width, dtype).backward()
    masters = dtype != torch.float32
    options: dict[str, Any] = {"master_weights": masters, "sub_group_size": width * width, "lr": 1e-4, "fused": True, **given}
    optimizer = deepnvme.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, nvme_path=directory, **options)
    optimizer.step()
    return optimizer.step


def training(directory: Path, scale: float) -> Turn:
    """A step of a Llama with parameters, gradients, states and activations on the drive, a quarter of them in memory."""
    from deepnvme.offload import OffloadedTraining

    shape = TrainingShape(512, max(2, int(scale * 12)), 1000, sequences=4, tokens=64, dtype="float32")
    model = training_models.make(shape, recomputed=False)
    options: dict[str, Any] = {"memory_budget": shape.nbytes // 4, "activations": "nvme", "lr": 1e-4, "fused": True}
    trained = OffloadedTraining(model, torch.optim.AdamW, blocks=model.blocks, nvme_path=directory, **options)
    batch = training_models.batch(shape, 0)
    for _ in range(STEPS_TO_SETTLE):
        trained.step(batch)
    return lambda: trained.step(batch)


def swappers(directory: Path, scale: float) -> Turn:
    """Gradients to DeepSpeed's swapper class, and a step over all sub-groups, as ZeRO stage 3 does them."""
    from deepnvme.swap.zero import AIO_DEFAULT_DICT, PipelinedOptimizerSwapper

    numel, groups = max(1 << 18, int(scale * (4 << 20))), 10
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(groups)]
    for number, parameter in enumerate(parameters):
        parameter.ds_id = f"{number}"  # type: ignore[attr-defined]
    gradient = torch.full((numel,), 1e-3)
    optimizer = torch.optim.AdamW([torch.empty(1, requires_grad=True)], fused=True)
    settings = SimpleNamespace(buffer_count=16, pipeline_read=True, pipeline_write=True)
    swapper = PipelinedOptimizerSwapper(settings, AIO_DEFAULT_DICT, directory, optimizer, numel, "cpu", torch.float32, None)
    swapper.initialize_parameters(parameters, [torch.ones(numel) for _ in parameters])

    def turn() -> None:
        for parameter in reversed(parameters):
            swapper.swap_out_gradients(parameter, [0], [gradient])
        for number, parameter in enumerate(parameters):
            following = parameters[number + 1] if number + 1 < groups else None
            swapper.swap_in_optimizer_state(parameter, async_parameter=following)
            optimizer.param_groups[0]["params"] = [parameter]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []
            swapper.swap_out_optimizer_state(parameter, async_swap=following is not None)

    return turn


def save(directory: Path, scale: float) -> Turn:
    state = _state(scale)
    return lambda: deepnvme.save(state, directory / "state.pt")


def load(directory: Path, scale: float) -> Turn:
    deepnvme.save(_state(scale), directory / "state.pt")
    return lambda: deepnvme.load(directory / "state.pt")


def _state(scale: float) -> dict[str, torch.Tensor]:
    """Matrices of 8 MiB, each followed by two short vectors."""
    return {
        f"{number}.{name}": torch.full(shape, 0.5, dtype=torch.bfloat16)
        for number in range(max(2, int(scale * 100)))
        for name, shape in (("weight", (1024, 4096)), ("bias", (1024,)), ("norm", (1024,)))
    }


def forward(directory: Path, scale: float) -> Turn:
    return _streamed(directory, scale, share=0.0)


def half_resident(directory: Path, scale: float) -> Turn:
    return _streamed(directory, scale, share=0.5)


def _streamed(directory: Path, scale: float, share: float) -> Turn:
    """A forward of a Llama with its weights on the drive, ``share`` of which stay in memory."""
    from deepnvme.streaming import WeightStore, stream

    shape = Shape(1024, max(4, int(scale * 24)), 8000)
    llama.save(shape, directory / "checkpoint")
    WeightStore.build(directory / "checkpoint", directory / "store").close()
    model = llama.empty(shape)
    stream(model, WeightStore.open(directory / "store"), memory_budget=int(share * shape.nbytes))
    ids = torch.ones((1, 1), dtype=torch.long)

    def turn() -> None:
        with torch.inference_mode():
            model(ids, use_cache=False)

    turn()  # learns the order
    return turn


def kv(directory: Path, scale: float) -> Turn:
    """Tokens generated with all keys and values on the drive but the newest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from deepnvme.streaming import OffloadedCache

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 1000}
    config = LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.ones((16, max(16, int(scale * 512))), dtype=torch.long)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8}

    def turn() -> None:
        with OffloadedCache(config, path=directory) as cache:
            model.generate(ids, cache=cache, do_sample=False, **options)

    return turn


def rows(directory: Path, scale: float) -> Turn:
    """Random rows of 512 bytes, a sixteenth of the table's in memory."""
    from deepnvme.tables import Table

    count = max(1 << 14, int(scale * (1 << 20)))
    table = Table.from_tensor(directory / "table", torch.ones(count, 128), memory_budget=count * 32)
    generator = torch.Generator().manual_seed(0)

    def turn() -> None:
        for _ in range(8):
            table.read(torch.randint(count, (1 << 14,), generator=generator))

    return turn


def bag(directory: Path, scale: float) -> Turn:
    """Steps of an EmbeddingBag whose rows and SparseAdam's averages are in a table, an eighth of it in memory."""
    from deepnvme.nn import EmbeddingBagOnDisk
    from deepnvme.tables import RowOptimizer

    count, width = max(1 << 14, int(scale * (1 << 19))), 64
    options: dict[str, Any] = {"mode": "sum", "optimizer": torch.optim.SparseAdam, "memory_budget": count * width * 3 // 2}
    bags = EmbeddingBagOnDisk(count, width, path=directory / "bag", values=lambda a, b: torch.ones(b - a, width), **options)
    optimizer = RowOptimizer(bags, lr=1e-3)
    generator = torch.Generator().manual_seed(0)

    def turn() -> None:
        for _ in range(4):
            bags(torch.randint(count, (1 << 10, 8), generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return turn


WORKLOADS: dict[str, Callable[[Path, float], Turn]] = {
    "raw": raw,
    "step": step,
    "fp32_step": fp32_step,
    "fp32_step_in_little_memory": fp32_step_in_little_memory,
    "training": training,
    "swappers": swappers,
    "save": save,
    "load": load,
    "forward": forward,
    "half_resident": half_resident,
    "kv": kv,
    "rows": rows,
    "bag": bag,
}


class CommitWorker:
    """``scale``: of the workload's size, 1 for some hundred MB."""

    def __init__(self, *, workload: str, directory: str, scale: float) -> None:
        deepnvme.Engine()  # what comes with the first use of the engine is not the workload's
        meter.forget_peak()
        self._turn = WORKLOADS[workload](Path(directory), scale)
        self._turn()

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "package": str(Path(deepnvme.__file__).parent)}

    def turn(self) -> dict[str, float]:
        begun = time.perf_counter()
        self._turn()
        return {"seconds": time.perf_counter() - begun}

    def peak(self) -> dict[str, int]:
        """Bytes of resident memory at its highest, of the whole process since the workload was made."""
        return {"peak": meter.peak()}


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: CommitWorker(**json.loads(settings)), ("turn", "peak"), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
