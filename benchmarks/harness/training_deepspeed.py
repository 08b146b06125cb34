"""ZeRO stage 3 with parameters and optimizer on the drive: ``python -m harness.training_deepspeed SETTINGS REQUESTS REPLIES``.

Runs in the interpreter that has DeepSpeed. One rank, over gloo, with the CPU Adam and the op that DeepSpeed's users have.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import deepspeed
import torch

from harness import training_buffers, training_models
from harness.serving import serve
from harness.training_models import STEPS_TO_SETTLE, TrainingShape
from harness.training_usage import PeakMemory, own_memory, return_freed_memory, transferred


class DeepSpeedTraining:
    """The same model, in DeepSpeed.

    Args:
        shape: Fields of a TrainingShape.
        directory: Where files are made.
        memory_budget: Bytes of all buffers for what is on the drive, as far as the sizes of tensors allow it.
        queue_depth: Of the op.
    """

    def __init__(self, *, shape: dict[str, Any], directory: str, memory_budget: int, queue_depth: int) -> None:
        self._shape, self._next = TrainingShape(**shape), 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(rank)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self._config = _config(self._shape, memory_budget, queue_depth, directory)
        return_freed_memory()
        self._before = own_memory()
        with deepspeed.zero.Init(config_dict_or_path=self._config):
            model = training_models.make(self._shape)
        self._engine = deepspeed.initialize(model=model, config=self._config)[0]
        for _ in range(STEPS_TO_SETTLE - 1):
            self.step()
        return_freed_memory()
        with PeakMemory() as memory:  # not while steps are timed
            self.step()
        self._growth = memory.highest - self._before

    def describe(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        parameters = optimizer.fp16_groups[0][0].nvme_swapper
        held = [parameters.buffers, parameters.partitioned_swap_buffer]
        held += optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
        offload = self._config["zero_optimization"]
        return {
            "version": deepspeed.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "optimizer": type(optimizer.optimizer).__name__,
            "swapper": type(optimizer.optimizer_swapper).__name__,
            "parameters": str(parameters.dtype),
            "growth": self._growth,
            "sub_groups": len(optimizer.fp16_groups),
            "buffer_bytes": sum(tensor.nbytes for tensor in held),
            "buffers": {name: {key: value for key, value in offload[name].items() if key != "nvme_path"}
                        for name in ("offload_param", "offload_optimizer")},
        }  # fmt: skip

    def step(self) -> dict[str, Any]:
        """Forward, backward and the optimizer's step; bytes are this process's, as the kernel counts them."""
        tokens = training_models.batch(self._shape, self._next)
        self._next += 1
        read, written = transferred()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        loss = self._engine(tokens)
        self._engine.backward(loss)
        self._engine.step()
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
        now = transferred()
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "bytes_read": now[0] - read,
            "bytes_written": now[1] - written,
            "loss": loss.item().hex(),
        }

    def close(self) -> dict[str, Any]:
        """Nothing: the files are in a directory that the benchmark removes."""
        return {}


def _config(shape: TrainingShape, memory_budget: int, queue_depth: int, directory: str) -> dict[str, Any]:
    """DeepSpeed's JSON configuration: ZeRO-3 with parameters and optimizer on the drive, in buffers of this many bytes."""
    buffers = training_buffers.divide(shape, memory_budget)
    nvme = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": shape.sequences,
        "gradient_clipping": 0.0,  # by default, to a norm of 1
        "bf16": {"enabled": shape.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},  # torch's default
        "aio": {"queue_depth": queue_depth, "block_size": 1 << 20, "intra_op_parallelism": 1, "overlap_events": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": buffers.sub_group_size,
            "stage3_prefetch_bucket_size": shape.largest_parameter,
            "stage3_max_live_parameters": buffers.parameter_buffers * shape.largest_parameter // 2,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": shape.largest_parameter,
            "offload_param": {
                **nvme,
                "buffer_count": buffers.parameter_buffers,
                "buffer_size": shape.largest_parameter,
                "max_in_cpu": 0,  # elements; by default, 1000 M stay in memory
                "pin_memory": False,
            },
            "offload_optimizer": {
                **nvme,
                "buffer_count": training_buffers.OPTIMIZER_BUFFERS,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: DeepSpeedTraining(**json.loads(settings)), ("step", "close"), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
