"""FP8 weights of a checkpoint are streamed with their scales by any module, wherever weights and scales lie."""

from __future__ import annotations

import errno
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.streaming import Streaming, stream
from deepnvme.streaming.weights.scales import quantization_beside

from ...support.engines import transfers_through
from ...support.fp8 import dequantized, quantized

WIDTHS = [200, 96, 333, 130, 57]


def chain(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Linear layers of shapes that are no multiples of a block."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(inside, out) for inside, out in pairwise(WIDTHS))).to(dtype)


def saved(memory: nn.Module, path: Path, block: tuple[int, int] = (128, 128), **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Save a model in FP8, and give it the values that this has. Returns the tensors in the file."""
    state: dict[str, torch.Tensor] = {}
    for name, weight in memory.state_dict().items():
        state[name] = weight.clone()
        if weight.dim() > 1:
            state[name], state[name + "_scale_inv"] = quantized(weight, block)
            weight.copy_(dequantized(state[name], state[name + "_scale_inv"], block, weight.dtype))
    safetensors.torch.save_file({**state, **more}, path)
    return state


def check(streamed: nn.Module, memory: nn.Module) -> None:
    inputs = torch.linspace(-1, 1, 3 * WIDTHS[0]).view(3, -1).to(memory[0].weight.dtype)  # type: ignore[index,union-attr,arg-type]
    with torch.no_grad():
        assert torch.equal(streamed(inputs), memory(inputs))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_layers_of_any_shape_compute_what_they_do_in_memory(dtype: torch.dtype, prefetch: int, drive: Path) -> None:
    memory, streamed = chain(dtype), chain(dtype)
    saved(memory, drive / "model.safetensors")
    with stream(streamed, drive / "model.safetensors", prefetch=prefetch) as streaming:
        for _ in range(3):
            check(streamed, memory)
        streaming.close(restore=True)
    check(streamed, memory)


@pytest.mark.parametrize("spaces", [1, 2, 3, 5])
def test_codes_and_scales_may_begin_at_any_byte(spaces: int, drive: Path) -> None:
    memory, streamed, file = chain(), chain(), drive / "model.safetensors"
    saved(memory, file)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ") + b" " * spaces
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with stream(streamed, file):
        check(streamed, memory)


def test_scales_in_another_file_and_tied_weights(drive: Path) -> None:
    memory, streamed = (nn.Sequential(*(nn.Linear(130, 130) for _ in range(3))) for _ in range(2))
    for each in (memory, streamed):
        each[2].weight = each[0].weight
    state = saved(memory, drive / "all.safetensors")
    del state["2.weight"], state["2.weight_scale_inv"]
    scales = [name for name in state if name.endswith("_scale_inv")]
    safetensors.torch.save_file({name: state.pop(name) for name in scales}, drive / "scales.safetensors")
    safetensors.torch.save_file(state, drive / "codes.safetensors")
    names = dict.fromkeys(state, "codes.safetensors") | dict.fromkeys(scales, "scales.safetensors")
    (drive / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with stream(streamed, drive / "model.safetensors.index.json"), torch.no_grad():
        assert streamed[2].weight is streamed[0].weight
        assert torch.equal(streamed(torch.ones(1, 130)), memory(torch.ones(1, 130)))
        (drive / "scales.safetensors").touch()
        with pytest.raises(CorruptCheckpoint, match="was changed") as raised:
            streamed(torch.ones(1, 130))
    assert raised.value.filename == str(drive / "scales.safetensors")


def test_a_read_that_fails_is_told_of_and_the_next_call_works(drive: Path, faulty: Any) -> None:
    memory, streamed = chain(), chain()
    saved(memory, drive / "model.safetensors")
    with stream(streamed, drive / "model.safetensors", prefetch=0):
        broken = faulty("threads", error=errno.EIO, error_every=1)
        with transfers_through(broken), pytest.raises(OSError, match="offset") as raised:
            check(streamed, memory)
        assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(drive / "model.safetensors"))
        check(streamed, memory)


@pytest.mark.parametrize("nested", [False, True])
def test_the_size_of_blocks_is_that_of_the_configuration_beside_the_files(nested: bool, drive: Path) -> None:
    """Blocks of 100 and of 128 rows are as many."""
    memory, streamed = chain(), chain()
    saved(memory, drive / "model.safetensors", (100, 100))
    config: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [100, 100]}}
    (drive / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    with stream(streamed, drive):
        check(streamed, memory)
    config["quantization_config"] = {"config_groups": {"group_0": {"weights": {"block_structure": [100, 100]}}}}
    (drive / "config.json").write_text(json.dumps(config))
    with stream(streamed := chain(), drive / "model.safetensors"):
        check(streamed, memory)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"quantization_config": {"weight_block_size": [0, 1]}}'])
def test_a_configuration_that_says_nothing_means_blocks_of_128(text: str, drive: Path) -> None:
    memory, streamed = chain(), chain()
    saved(memory, drive / "model.safetensors")
    assert quantization_beside(drive) is None
    (drive / "config.json").write_text(text)
    with stream(streamed, drive):
        check(streamed, memory)


def test_all_weights_in_fp8_have_scales_or_none(drive: Path) -> None:
    memory, streamed = chain(), chain()
    state = saved(memory, drive / "model.safetensors")
    safetensors.torch.save_file({name: each for name, each in state.items() if name != "2.weight_scale_inv"}, drive / "some")
    with pytest.raises(CorruptCheckpoint, match=r"'2\.weight' at offset \d+ is in FP8 .* has no '2\.weight_scale_inv'"):
        stream(streamed, drive / "some")
    safetensors.torch.save_file({name: each for name, each in state.items() if "scale" not in name}, drive / "none")
    for name, weight in memory.state_dict().items():
        weight.copy_(state[name])  # cast to the dtype of the model
    with stream(streamed, drive / "none"):
        check(streamed, memory)


def test_a_model_that_has_the_scales_itself_gets_them(drive: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
            self.weight_scale = nn.Parameter(torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ (self.weight.float() * self.weight_scale)

    codes = torch.arange(16.0).view(4, 4).to(torch.float8_e4m3fn)
    state = {"weight": codes, "weight_scale": torch.full((1,), 3.0)}
    safetensors.torch.save_file(state, drive / "model.safetensors")
    with stream(model := Scaled(), drive / "model.safetensors"):
        assert torch.equal(model(torch.eye(4)), codes.float() * 3)


def test_a_weight_whose_bytes_do_not_follow_one_another_is_refused(drive: Path) -> None:
    weight, scales = quantized(torch.randn(4, 8), (128, 128))
    torch.save({"weight": weight.t(), "weight_scale": scales}, drive / "model.pt")
    with pytest.raises(CorruptCheckpoint, match="not one range of bytes in a file"):
        stream(nn.Linear(4, 8, bias=False), drive / "model.pt")


def test_a_stream_has_little_more_memory_than_the_values(drive: Path) -> None:
    """The codes of a weight are dequantised where they lie: two bytes a value, and not three."""
    memory, streamed = nn.Linear(2048, 4096, bias=False).bfloat16(), nn.Linear(2048, 4096, bias=False).bfloat16()
    saved(memory, drive / "model.safetensors")
    with stream(streamed, drive / "model.safetensors") as streaming:
        assert isinstance(streaming, Streaming)
        nbytes = streaming._reader.nbytes("")
        assert 2 * 2048 * 4096 <= nbytes < 2 * 2048 * 4096 + (5 << 20)
