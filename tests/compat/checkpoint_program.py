"""DeepSpeed's checkpoints in earnest, for an interpreter that has DeepSpeed: reads cases from standard input, prints what came of
each.

    python -m tests.compat.checkpoint_program < cases.json

Our checkpoint engine, or our file writer on our op, is put where DeepSpeed looks for them, in this process only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.model_checkpointing import writer_factory

from deepnvme.checkpoint import NVMeCheckpointEngine
from deepnvme.integrations.deepspeed import io as ours
from deepnvme.ops.op_builder import AsyncIOBuilder

from .training import train

WIDTH = 64
create = engine_module.create_checkpoint_engine
opened: list[str] = []


class Writer(ours.FastFileWriter):
    def __init__(self, file_path: str, config: Any) -> None:
        opened.append(os.path.basename(file_path))
        super().__init__(file_path, config)


class Pins:
    """For DeepSpeed's writers on a machine without an accelerator, where torch pins nothing."""

    @staticmethod
    def pin_memory(tensor: torch.Tensor, make_copy: bool = True) -> torch.Tensor:
        return tensor

    @staticmethod
    def is_pinned(tensor: torch.Tensor) -> bool:
        return True


def engine(case: dict[str, Any], which: str) -> Any:
    """``which``: "theirs", "ours", or "fast": DeepSpeed's own fast engine, with our writer."""
    own = which == "ours"
    engine_module.create_checkpoint_engine = (lambda config_params, **_: NVMeCheckpointEngine(config_params)) if own else create
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": case["stage"]},
        "bf16": {"enabled": case["stage"] > 0},
    }
    if which not in ("ours", "theirs"):
        writer = {"type": which, "io_buffer_size": 1 << 20, "io_buffer_double": case.get("double", True)}
        config["checkpoint"] = {"checkpoint_serialization": case.get("zipped", True), "writer": writer}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def run(case: dict[str, Any]) -> dict[str, Any]:
    directory = tempfile.mkdtemp(prefix="checkpoint-", dir=os.environ["IO_DIR"])
    opened.clear()
    try:
        trained = engine(case, case["saved_by"])
        train(trained, WIDTH, range(2))
        trained.save_checkpoint(directory, tag="saved", client_state={"text": "kept"})
        result: dict[str, Any] = {"class": type(trained.checkpoint_engine).__name__, "opened": list(opened)}
        result["files"] = sorted(path.name for path in Path(directory, "saved").iterdir())
        result["latest"] = Path(directory, "latest").read_text()
        result["continued"] = train(trained, WIDTH, range(2, 4))
        loaded = engine(case, case["loaded_by"])
        _, client_state = loaded.load_checkpoint(directory)
        result["client_state"] = client_state.get("text")
        result["resumed"] = train(loaded, WIDTH, range(2, 4))
        return result
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def contract() -> dict[str, list[str]]:
    """What DeepSpeed's have and ours lack."""
    from deepspeed import io as theirs

    lacking = {"engine": [name for name in vars(CheckpointEngine) if not name.startswith("__") and name != "_abc_impl"]}
    lacking["engine"] = [name for name in lacking["engine"] if name not in dir(NVMeCheckpointEngine)]
    fields = theirs.FastFileWriterConfig.__dataclass_fields__
    own = ours.FastFileWriterConfig.__dataclass_fields__
    lacking["config"] = [name for name in fields if name not in own or fields[name].default != own[name].default]
    if list(fields) != list(own):
        lacking["config"].append(f"order: {list(own)}")
    public = [name for name in dir(theirs.FastFileWriter) if not name.startswith("_")]
    lacking["FastFileWriter"] = [name for name in public if name not in dir(ours.FastFileWriter)]
    assert CheckpointCommitInfo.__dataclass_fields__.keys() == {"tag", "save_dir", "save_latest"}
    return lacking


if __name__ == "__main__":
    writer_factory.AsyncIOBuilder, writer_factory.get_accelerator = AsyncIOBuilder, Pins
    writer_factory.FastFileWriter, writer_factory.FastFileWriterConfig = Writer, ours.FastFileWriterConfig
    results: list[Any] = [run(case) for case in json.load(sys.stdin)]
    print("RESULTS " + json.dumps([*results, contract()]))
