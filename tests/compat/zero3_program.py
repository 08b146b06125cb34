"""ZeRO stage 3 in earnest, for an interpreter that has DeepSpeed: reads cases from standard input, prints what came of each.

    python -m tests.compat.zero3_program < cases.json

By case: DeepSpeed "alone", on our "op", or with "our swappers" too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters

from deepnvme.integrations import deepspeed as integration

from .accesses import ACCESSES
from .training import train

WIDTH = 768  # a layer in bf16 is 1.1 MB: more than the least that is swapped
LAYERS = 6


class Layers(torch.nn.Sequential):
    """Leaves out those whose numbers are ``skipped``."""

    skipped: tuple[int, ...] = ()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            if number not in self.skipped:
                input = layer(input)
        return input


@contextlib.contextmanager
def world(name: str, checkpoint: bool) -> Iterator[None]:
    """What DeepSpeed finds."""
    if name != "alone":
        integration.enable(swappers=name == "our swappers", checkpoint=checkpoint)
    try:
        yield
    finally:
        integration.disable()


def engine(case: dict[str, Any], directory: str) -> Any:
    width = case.get("width", WIDTH)
    torch.manual_seed(1)
    partition_parameters.Init.param_id = 0  # which names the files, and begins anew in another process
    pipelined = case.get("pipelined", True)
    offload: dict[str, Any] = {
        "offload_optimizer": {
            "device": case.get("device", "nvme"),
            "nvme_path": directory,
            "buffer_count": case.get("buffer_count", 16),
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
            "fast_init": case.get("fast_init", False),
        }
    }
    if case.get("offload_param"):
        offload["offload_param"] = {
            "device": "nvme",
            "nvme_path": directory,
            "buffer_count": case["offload_param"],
            "buffer_size": width * (width + 1),
            "max_in_cpu": 0,
        }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.get("accumulate", 1),
        "gradient_clipping": case.get("clip", 0.0),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": width * width * case.get("layers_of_a_sub_group", 1),
            "stage3_param_persistence_threshold": 0,
            **({"stage3_prefetch_bucket_size": case["prefetch"]} if "prefetch" in case else {}),
            **offload,
        },
        "bf16": {"enabled": case.get("dtype") == "bf16"},
        **({"checkpoint": {"writer": {"type": case["writer"]}}} if "writer" in case else {}),
    }
    # Parameters are parted, and go to the drive, as they are made, or all of them with the engine.
    with deepspeed.zero.Init(config_dict_or_path=config) if case.get("zero_init") else contextlib.nullcontext():
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(width, width, bias=case.get("bias", "resume" not in case)), torch.nn.GELU()]
        model = Layers(*layers)
    optimizers = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }
    return deepspeed.initialize(model=model, optimizer=optimizers[case.get("optimizer", "adamw")](), config=config)[0]


def digests(folder: str) -> dict[str, str]:
    """Of what a checkpoint would have of the swap files."""
    files = [file for file in Path(folder).iterdir() if file.suffix == ".swp" and "gradient" not in file.name]
    return {file.name: hashlib.sha256(file.read_bytes()[: WIDTH * WIDTH * 4]).hexdigest() for file in sorted(files)}


def train_on(trained: Any, case: dict[str, Any], batches: range, directory: str, seen: list[str] | None = None) -> list[str]:
    """The losses. ``seen``: gets what the case's accesses, "before step" and "after step", see."""
    losses = []
    seen = [] if seen is None else seen

    def access(when: str) -> None:
        if trained.is_gradient_accumulation_boundary() or when == "after step":
            seen.extend(ACCESSES[case.get(when, "nothing")](trained, number))

    for number in batches:
        if "skips" in case and number % case.get("skips every", 2) == case.get("skips in", 1):
            trained.module.skipped = tuple(case["skips"])
        losses += train(trained, case.get("width", WIDTH), range(number, number + 1), lambda: access("before step"))
        trained.module.skipped = ()
        access("after step")
    return losses


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def parts_of(*swappers: Any) -> list[str]:
    """The classes of swappers, and of what they consist of."""
    parts = {type(part) for swapper in swappers if swapper is not None for part in (swapper, *vars(swapper).values())}
    return sorted(full_name(part) for part in parts if part.__module__.startswith(("deepnvme.", "deepspeed.")))


def run(case: dict[str, Any]) -> dict[str, Any]:
    if "directories" in case:
        directory = case["directories"][int(os.environ["RANK"])]
    else:
        directory = tempfile.mkdtemp(prefix="zero3-", dir=os.environ["IO_DIR"])
    try:
        with world(case["world"], case.get("checkpoint", False)):
            trained = engine(case, directory)
            seen: list[str] = []
            result: dict[str, Any] = {"losses": train_on(trained, case, range(case["steps"]), directory, seen), "seen": seen}
            if case.get("device", "nvme") == "cpu":
                return result
            if "resume" in case:  # without biases, the last of which is too small to be swapped, and DeepSpeed loads only what is
                saved = case.get("saved in", directory)
                trained.save_checkpoint(saved, tag="saved")
                again = range(case["steps"], case["steps"] + case["resume"])
                result["continued"] = train_on(trained, case, again, directory)
                loaded = engine(case, os.path.join(directory, "anew"))
                loaded.load_checkpoint(saved, tag="saved")
                result["resumed"] = train_on(loaded, case, again, directory)
                trained.load_checkpoint(saved, tag="saved")
                result["rewound"] = train_on(trained, case, again, directory)
            else:
                result["files"] = digests(trained.optimizer.optimizer_swapper.swap_folder)
            swapper = trained.optimizer.optimizer_swapper
            result["class"] = full_name(type(swapper))
            result["parts"] = parts_of(swapper, trained.optimizer.fp16_groups[0][0].nvme_swapper)
            result["groups"] = len(trained.optimizer.fp16_groups)
            result["folder"] = swapper.swap_folder
            result["checkpoint engine"] = full_name(type(trained.checkpoint_engine))
            return result
    except Exception as error:
        facts = {"errno": getattr(error, "errno", None), "path": getattr(error, "filename", None)}
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(), **facts}
    finally:
        if "directories" not in case:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    results = [run(case) for case in json.load(sys.stdin)]
    print("RESULTS " + json.dumps(results))
