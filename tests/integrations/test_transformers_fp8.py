"""Checkpoints in FP8, streamed from their own files, give the bits that transformers gives when it dequantises them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.drives.aio_config import AioConfig
from deepnvme.streaming import from_pretrained, offload_experts, stream
from deepnvme.streaming.experts.expert_files import places_in, slices_in
from deepnvme.streaming.experts.expert_reader import explain

from ..support.engines import transfers_through
from ..support.faulty_filesystem import FaultyFilesystem
from ..support.fp8 import dequantized, to_fp8
from . import models

KINDS = ["llama", "llama-tied", "mixtral", "deepseek"]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**models.prompts()).logits


def by_transformers(folder: Path, **how: Any) -> transformers.PreTrainedModel:
    """The model in memory, dequantised by transformers."""
    dequantize = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantize, **how)


def changed(folder: Path, **changes: Any) -> None:
    """Change tensors of a checkpoint of one file; None removes one."""
    file = folder / "model.safetensors"
    state = {**safetensors.torch.load_file(file), **changes}
    safetensors.torch.save_file({name: each for name, each in state.items() if each is not None}, file, {"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_weights_logits_and_tokens_are_those_of_transformers(kind: str, drive: Path) -> None:
    models.checkpoint(kind, drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    known = by_transformers(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", experts="streamed")
    assert type(model) is type(known)
    for _ in range(2):
        assert torch.equal(logits(model), logits(known))
    assert torch.equal(models.tokens(model), models.tokens(known))
    model.streaming.close(restore=True)
    for (name, weight), (other, expected) in zip(model.state_dict().items(), known.state_dict().items(), strict=True):
        assert (name, weight.dtype) == (other, expected.dtype)
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_dtype_that_is_asked_for_is_that_of_the_values(dtype: torch.dtype, drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", dtype=dtype, memory_budget="1MB")
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert torch.equal(logits(model), logits(by_transformers(drive / "checkpoint", dtype=dtype)))


@pytest.mark.parametrize(
    ("block", "suffix", "quantization"),
    [
        ((48, 40), "_scale_inv", {}),
        ((1, 32), "_scale_inv", {}),
        ((1, 10_000), "_scale", {"quant_method": "compressed-tensors", "weight_block_size": None}),
        ((10_000, 10_000), "_scale", {"quant_method": "fbgemm_fp8", "weight_block_size": None}),
    ],
)
def test_blocks_that_do_not_divide_a_weight_and_scales_for_rows_or_for_all(
    block: tuple[int, int], suffix: str, quantization: Any, drive: Path
) -> None:
    """transformers has no packages for some of these, and blocks of another size for others."""
    known = models.checkpoint("llama", drive / "checkpoint")
    known.load_state_dict(to_fp8(drive / "checkpoint", block, suffix, **quantization))
    model = from_pretrained(drive / "checkpoint")
    assert torch.equal(logits(model), logits(known))


def test_exponents_as_scales_and_scales_of_activations(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    state = safetensors.torch.load_file(drive / "checkpoint" / "model.safetensors")
    changes = {
        name: scales.log2().round().add(127).to(torch.uint8) for name, scales in state.items() if name.endswith("_scale_inv")
    }
    changes |= {name.replace("weight_scale_inv", "activation_scale"): torch.ones(()) for name in changes}
    changed(drive / "checkpoint", **changes)
    known = by_transformers(drive / "checkpoint")
    assert torch.equal(logits(from_pretrained(drive / "checkpoint")), logits(known))


SCALES = "model.layers.2.self_attn.q_proj.weight_scale_inv"


def test_missing_and_wrong_scales_are_named_with_file_and_offset(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    for change, why in (
        (None, r"has no 'model\.layers\.2\.self_attn\.q_proj\.weight_scale_inv' or "),
        (torch.ones(2, 3), r"do not fit: a weight of shape \(64, 64\) has scales of shape \(2, 2\).*got the shape \(2, 3\)"),
        (torch.ones(2, 2, dtype=torch.int32), r"are torch\.int32"),
    ):
        changed(drive / "checkpoint", **{SCALES: change})
        with pytest.raises(CorruptCheckpoint, match=rf"q_proj\.weight' at offset \d+ is in FP8 .*{why}") as raised:
            from_pretrained(drive / "checkpoint")
        assert raised.value.filename == str(drive / "checkpoint" / "model.safetensors")


def test_what_is_not_the_known_fp8_is_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    name = SCALES.removesuffix("_scale_inv")
    state = safetensors.torch.load_file(drive / "checkpoint" / "model.safetensors")
    changed(drive / "checkpoint", **{name: state[name].float().to(torch.float8_e5m2)})
    with pytest.raises(CorruptCheckpoint, match="only float8_e4m3fn is dequantised"):
        from_pretrained(drive / "checkpoint")
    changed(drive / "checkpoint", **{name: state[name], name + "_zero_point": torch.zeros(1)})
    with pytest.raises(CorruptCheckpoint, match="with zero points"):
        from_pretrained(drive / "checkpoint")
    models.checkpoint("llama", drive / "plain")
    config = json.loads((drive / "checkpoint" / "config.json").read_text())
    (drive / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no FP8 weights"):
        from_pretrained(drive / "plain")
    config["quantization_config"]["quant_method"] = "gptq"
    (drive / "checkpoint" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantised \(gptq\), which is not streamed"):
        from_pretrained(drive / "checkpoint")


def test_a_scale_that_is_nan_or_zero_is_what_it_is(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    scales = torch.tensor([[float("nan"), 0.0], [1.0, -1.0]])
    changed(drive / "checkpoint", **{SCALES: scales})
    known = by_transformers(drive / "checkpoint").model.layers[2].self_attn.q_proj.weight
    model = from_pretrained(drive / "checkpoint")
    model.streaming.close(restore=True)
    found = model.model.layers[2].self_attn.q_proj.weight
    assert torch.equal(found.isnan(), known.isnan())
    assert torch.equal(found.nan_to_num(nan=7), known.nan_to_num(nan=7))


def test_shards_and_options_of_the_configuration(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint", max_shard_size="60KB")
    to_fp8(drive / "checkpoint")
    files = {path.name: list(safetensors.torch.load_file(path)) for path in (drive / "checkpoint").glob("*.safetensors")}
    assert len(files) > 2
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (drive / "checkpoint" / "model.safetensors.index.json").write_text(json.dumps(index))
    known = by_transformers(drive / "checkpoint", num_hidden_layers=5)
    model = from_pretrained(drive / "checkpoint", num_hidden_layers=5)
    assert len(model.model.layers) == 5
    assert getattr(model.config, "quantization_config", None) is None
    assert torch.equal(logits(model), logits(known))


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_has_the_values(kind: str, drive: Path) -> None:
    models.checkpoint(kind, drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    known = by_transformers(drive / "checkpoint")
    for _ in range(2):  # built, and opened
        model = from_pretrained(drive / "checkpoint", path=drive / "store", kv_offload="nvme", aio_config=AioConfig())
        assert type(model) is type(known)
        assert torch.equal(logits(model), logits(known))
        assert torch.equal(models.tokens(model), models.tokens(known))
        model.streaming.close()
    smaller = from_pretrained(drive / "checkpoint", path=drive / "int8", quantize="int8")
    assert (logits(smaller) - logits(known)).abs().max() < 0.05 * logits(known).abs().max()


def test_a_store_is_not_built_of_a_checkpoint_that_changes_or_cannot_be_read(drive: Path, faulty: Any) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint")
    broken = faulty("threads", error=errno.EIO, error_every=1)
    with transfers_through(broken), pytest.raises(OSError, match="offset") as raised:
        from_pretrained(drive / "checkpoint", path=drive / "store")
    assert raised.value.errno == errno.EIO
    file = drive / "checkpoint" / "model.safetensors"
    with pytest.raises(CorruptCheckpoint, match="was changed") as changed:
        from_pretrained(drive / "checkpoint", path=drive / "store", progress=lambda done, total: os.utime(file))
    assert changed.value.filename == str(file)
    changed_model = from_pretrained(drive / "checkpoint", path=drive / "store")
    assert torch.equal(logits(changed_model), logits(by_transformers(drive / "checkpoint")))


# -- embeddings that are read by rows ----------------------------------------------------------------------------------


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_an_embedding_in_fp8_have_the_bits_of_transformers(dtype: torch.dtype, drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint", chosen=lambda name, _: name == EMBEDDING)
    known = by_transformers(drive / "checkpoint", dtype=dtype)
    model = from_pretrained(drive / "checkpoint", dtype=dtype, min_table_bytes=1000)
    assert list(model.streaming.tables) == [EMBEDDING]
    table = model.streaming.tables[EMBEDDING]
    assert torch.equal(logits(model), logits(known))
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert 0 < table.stats().rows_read < 100
    assert table.nbytes == 320 * 64
    with pickle.loads(pickle.dumps(table)) as again:
        assert torch.equal(again.read(torch.arange(320)), known.model.embed_tokens.weight)
    model.streaming.close(restore=True)
    assert torch.equal(model.model.embed_tokens.weight, known.model.embed_tokens.weight)


@pytest.mark.parametrize("exponents", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (48, 40), (1, 32), (1, 10_000), (10_000, 10_000)])
def test_rows_with_scales_for_blocks_for_rows_or_for_all(block: tuple[int, int], exponents: bool, drive: Path) -> None:
    made = models.checkpoint("llama", drive / "checkpoint")
    values = to_fp8(drive / "checkpoint", block, chosen=lambda name, _: name == EMBEDDING)[EMBEDDING]
    if exponents:
        state = safetensors.torch.load_file(drive / "checkpoint" / "model.safetensors")
        powers = state[EMBEDDING + "_scale_inv"].log2().round()
        changed(drive / "checkpoint", **{EMBEDDING + "_scale_inv": powers.add(127).to(torch.uint8)})
        values = dequantized(state[EMBEDDING], powers.exp2(), block, torch.bfloat16)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made.config)  # in bfloat16
    model.model.rotary_emb = made.model.rotary_emb
    with stream(model, drive / "checkpoint", min_table_bytes=1000) as streaming:
        assert list(streaming.tables) == [EMBEDDING]
        ids = torch.randint(320, (40, 10))
        assert torch.equal(model.model.embed_tokens(ids), values[ids])


@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpTextConfig"), reason="this transformers has no qwen4_exp")
@pytest.mark.parametrize(("block", "tables"), [((1, 32), 2), ((3, 32), 2), ((10_000, 10_000), 0)])
def test_tables_of_several_tensors_in_fp8(block: tuple[int, int], tables: int, drive: Path) -> None:
    """Where a block would span two of the tensors, the scales are no grid of the whole table, which is streamed as a whole."""
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(models.qwen4_exp())
    made.save_pretrained(drive / "checkpoint")
    shutil.copytree(drive / "checkpoint", drive / "values")
    values = to_fp8(drive / "checkpoint", block, chosen=lambda name, _: "ngram_embedding" in name)
    safetensors.torch.save_file(values, drive / "values" / "model.safetensors", {"format": "pt"})
    known = type(made).from_pretrained(drive / "values")
    model = from_pretrained(drive / "checkpoint", min_table_bytes=1000, experts="streamed")
    assert sum("ngram" in name for name in model.streaming.tables) == tables
    assert torch.equal(logits(model), logits(known))


def scales_apart(folder: Path) -> Path:
    """Move the scales of a checkpoint of one file to a file of their own, which is returned."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    scales = {name: state.pop(name) for name in list(state) if name.endswith("_scale_inv")}
    (folder / "model.safetensors").unlink()
    names = "weights.safetensors", "scales.safetensors"
    for part, name in zip((state, scales), names, strict=True):
        safetensors.torch.save_file(part, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, names[0]) | dict.fromkeys(scales, names[1])}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / names[1]


def test_a_file_of_scales_that_is_changed_is_named(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint", chosen=lambda name, _: name == EMBEDDING)
    scales = scales_apart(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", min_table_bytes=1000)
    os.utime(scales)
    with pytest.raises(CorruptCheckpoint, match="was changed") as changed_scales:
        model.model.embed_tokens(torch.tensor([3]))
    assert changed_scales.value.filename == str(scales)


def test_scales_of_rows_that_cannot_be_read_are_named(drive: Path, faulty: Any) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    to_fp8(drive / "checkpoint", chosen=lambda name, _: name == EMBEDDING)
    scales = scales_apart(drive / "checkpoint")
    where = weights_in(drive / "checkpoint")[EMBEDDING + "_scale_inv"]
    assert isinstance(where, Location)
    with (
        transfers_through(faulty("threads", error=errno.EIO, error_every=1)),
        pytest.raises(OSError, match=f"offset {where.offset}") as raised,
    ):
        from_pretrained(drive / "checkpoint", min_table_bytes=1000)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(scales))


@pytest.mark.parametrize(
    ("kind", "experts", "told"),
    [("llama", None, "offset"), ("mixtral", "streamed", "offset"), ("mixtral", "on-demand", r"expert \d of 'model.* at offset")],
)
def test_scales_of_blocks_and_experts_that_cannot_be_read_are_named_and_the_next_call_works(
    kind: str, experts: Any, told: str, direct_disk: FaultyFilesystem
) -> None:
    folder = direct_disk / "checkpoint"
    models.checkpoint(kind, folder)
    to_fp8(folder, chosen=lambda name, _: "mlp" in name or "experts" in name)
    known = by_transformers(folder)
    scales = scales_apart(folder)
    model = from_pretrained(folder, experts=experts, prefetch=0)
    direct_disk.fail("read", times=-1, name=scales.name)
    with pytest.raises(OSError, match=told) as raised:
        logits(model)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(scales))
    direct_disk.heal()
    assert torch.equal(logits(model), logits(known))
    model.streaming.close()


# -- experts on demand -------------------------------------------------------------------------------------------------


def in_both_forms(kind: str, drive: Path, block: tuple[int, int]) -> tuple[Path, transformers.PreTrainedModel]:
    """A checkpoint in FP8, and the model of its values in memory."""
    models.checkpoint(kind, drive / "checkpoint")
    shutil.copytree(drive / "checkpoint", drive / "values")
    values = to_fp8(drive / "checkpoint", block)
    safetensors.torch.save_file(values, drive / "values" / "model.safetensors", {"format": "pt"})
    return drive / "checkpoint", transformers.AutoModelForCausalLM.from_pretrained(drive / "values")


@pytest.mark.parametrize("block", [(32, 32), (24, 40)])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek"])
def test_experts_in_fp8_are_read_on_demand(kind: str, block: tuple[int, int], drive: Path) -> None:
    """Where blocks do not divide the rows of gate, those of up begin in the middle of a block of both together."""
    folder, known = in_both_forms(kind, drive, block)
    model = from_pretrained(folder, memory_budget=400_000, experts="on-demand")
    assert torch.equal(logits(model), logits(known))
    assert torch.equal(models.tokens(model), models.tokens(known))
    report = model.streaming.experts.report()
    assert report.hit_rate
    assert report.bytes_read
    model.streaming.close(restore=True)
    assert torch.equal(models.tokens(model), models.tokens(known))
    for (name, weight), (_, expected) in zip(model.state_dict().items(), known.state_dict().items(), strict=True):
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_a_model_in_memory_are_offloaded_to_its_files_in_fp8(implementation: str, drive: Path) -> None:
    folder, _ = in_both_forms("mixtral", drive, (32, 32))
    known, model = (by_transformers(folder, experts_implementation=implementation) for _ in range(2))
    with offload_experts(model, folder, memory_budget=0):
        assert torch.equal(logits(model), logits(known))


def test_packed_experts_in_fp8(drive: Path) -> None:
    known = models.checkpoint("mixtral", drive / "checkpoint")
    state = {name: weight.detach().clone() for name, weight in known.state_dict().items()}
    safetensors.torch.save_file(state, drive / "checkpoint" / "model.safetensors", {"format": "pt"})
    known.load_state_dict(to_fp8(drive / "checkpoint", (40, 48), chosen=lambda name, _: ".experts." in name))
    for how in ("on-demand", "streamed"):
        model = from_pretrained(drive / "checkpoint", experts=how)
        assert torch.equal(logits(model), logits(known))
        model.streaming.close()


def test_an_expert_or_its_scales_that_cannot_be_read_are_named(drive: Path) -> None:
    folder, known = in_both_forms("mixtral", drive, (32, 32))
    model = from_pretrained(folder, experts="on-demand")
    assert torch.equal(logits(model), logits(known))
    weight = "model.layers.1.mlp.experts.gate_up_proj"
    numbers: dict[str, int | None] = {weight: None}
    whole = by_transformers(folder)
    part = slices_in(whole, places_in(whole, folder, numbers)[0], numbers)[weight][3]
    assert len(part.scale_ranges) == 2  # of gate and of up
    for index, (path, offset, nbytes) in enumerate((*part.ranges, *part.scale_ranges)):
        broken = OSError(errno.EIO, "broken")
        broken.indices = [index]  # type: ignore[attr-defined]
        told = explain(broken, part)
        assert told.strerror is not None
        assert told.strerror.startswith("broken: expert 3 of 'model.layers.1.mlp.experts' (gate_up_proj) could not be read")
        assert told.strerror.endswith(f"{nbytes} bytes at offset {offset}")
        assert told.filename == path
    (folder / "model.safetensors").touch()
    with pytest.raises(CorruptCheckpoint, match="changed"):
        logits(model)
