"""ZeRO stage 3 with its optimizer's states on the drive: ``python -m harness.deepspeed_worker SETTINGS REQUESTS REPLIES``.

Runs in the interpreter that has DeepSpeed. One rank, over gloo, with the CPU Adam that DeepSpeed's users have.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from typing import Any

import deepspeed
import torch

from harness import meter
from harness.layers import Layers, loss_of
from harness.serving import serve

_STEPS_TO_SETTLE = 2  # the first makes the states and their files


class DeepSpeedWorker:
    """``op``, ``classes``: whose op moves the states, and whose swappers have it do so; "deepspeed" or "deepnvme".

    ``queue_depth``: of the op; None for no ``aio`` block at all. ``package_at``: where this package is, for an interpreter that
    has not.
    """

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        sub_group: int,
        buffers: int,
        pipelined: bool,
        directory: str,
        op: str,
        classes: str,
        queue_depth: int | None,
        package_at: str,
    ) -> None:
        sys.path.append(package_at)  # last: beside the package there may be another torch
        if op == "deepnvme":
            importlib.import_module("deepnvme.integrations.deepspeed").enable(swappers=classes == "deepnvme")
        self._width = width
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(rank)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self._engine = deepspeed.initialize(
            model=Layers(width, layers), config=_config(sub_group, buffers, pipelined, queue_depth, directory)
        )[0]
        self._step, self._seconds = self._engine.optimizer.step, 0.0
        self._engine.optimizer.step = self._timed_step
        for _ in range(_STEPS_TO_SETTLE):
            self.prepare()
            self.step()
        self._peak_of_start = meter.peak()
        meter.forget_peak()  # where the kernel refuses, that of training is at least as high: for every contender alike

    def describe(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        swapper = optimizer.optimizer_swapper
        return {
            "version": deepspeed.__version__,
            "torch": torch.__version__,
            "optimizer": type(optimizer.optimizer).__name__,
            "swapper": f"{type(swapper).__module__}.{type(swapper).__name__}",
            # Ours has an engine, in place of a handle.
            "op": type(getattr(swapper, "aio_handle", None)).__module__,
            "sub_groups": len(optimizer.fp16_groups),
        }

    def prepare(self) -> dict[str, str]:
        """Gradients, which go to the drive during backward; this is not timed. The loss is exact."""
        loss = loss_of(self._engine, self._width)
        self._engine.backward(loss)
        return {"loss": loss.item().hex()}

    def step(self) -> dict[str, float]:
        self._engine.step()
        return {"seconds": self._seconds}

    def train(self, *, steps: int) -> dict[str, Any]:
        """Some steps in a row. Seconds of the optimizer's part of one, and of all of it, on average; losses, exactly; bytes that
        resident memory was at its highest, while everything was made and since."""
        losses, seconds = [], 0.0
        begun = time.perf_counter()
        for _ in range(steps):
            losses.append(self.prepare()["loss"])
            seconds += self.step()["seconds"]
        whole = time.perf_counter() - begun
        return {
            "seconds": seconds / steps,
            "whole_seconds": whole / steps,
            "losses": losses,
            "peak_of_start": self._peak_of_start,
            "peak": meter.peak(),
        }

    def _timed_step(self, *arguments: Any, **keywords: Any) -> Any:
        begun = time.perf_counter()
        result = self._step(*arguments, **keywords)
        self._seconds = time.perf_counter() - begun
        return result


def _config(sub_group: int, buffers: int, pipelined: bool, queue_depth: int | None, directory: str) -> dict[str, Any]:
    """DeepSpeed's JSON configuration: ZeRO-3 with the optimizer on the drive."""
    aio = {"queue_depth": queue_depth, "block_size": 1 << 20, "intra_op_parallelism": 1, "overlap_events": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": directory,
                "buffer_count": buffers,
                "pipeline_read": pipelined,
                "pipeline_write": pipelined,
            },
        },
        **({} if queue_depth is None else {"aio": aio}),
    }


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: DeepSpeedWorker(**json.loads(settings)), ("prepare", "step", "train"), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
