"""Mixtures of transformers whose experts are read on demand: the same logits and tokens as in memory, in every bit."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.streaming import WeightMismatch, from_pretrained, offload_experts, pretrained, stream
from deepnvme.streaming.extent_cache import ExtentCache

from ..support.engines import failing
from ..support.interrupts import ctrl_c_in_a_wait_for
from .models import LLAMA_SIZES, prompts, tokens, transformers

_FEW: dict[str, Any] = {"num_hidden_layers": 3, "num_experts_per_tok": 2, **LLAMA_SIZES}
MIXTURES: dict[str, transformers.PretrainedConfig] = {
    "mixtral": transformers.MixtralConfig(num_local_experts=4, **_FEW),
    "qwen3": transformers.Qwen3MoeConfig(moe_intermediate_size=48, num_experts=8, head_dim=16, **_FEW),
    "olmoe": transformers.OlmoeConfig(num_experts=8, eos_token_id=None, **{**_FEW, "intermediate_size": 48}),
    "deepseek": transformers.DeepseekV3Config(
        first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=32,
        kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, **{**_FEW, "num_key_value_heads": 4},
    ),
    # Packed in the file, transposed, gate and up interleaved, with biases.
    "gpt-oss": transformers.GptOssConfig(
        num_local_experts=8, head_dim=16, layer_types=["full_attention"] * 3, **{**_FEW, "intermediate_size": 48}
    ),
}  # fmt: skip
BUDGET = 300_000
"""Bytes: a part of the experts."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, config in MIXTURES.items():
        torch.manual_seed(3)
        folders[kind] = tmp_path_factory.mktemp(kind)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[kind])
    return folders


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_logits_and_tokens_are_those_of_the_model_in_memory(
    checkpoints: dict[str, Path], kind: str, implementation: str, dtype: torch.dtype
) -> None:
    options = {"experts_implementation": implementation, "dtype": dtype}
    memory, offloaded = (load(checkpoints[kind], **options) for _ in range(2))
    with offload_experts(offloaded, checkpoints[kind], memory_budget=BUDGET) as experts, torch.inference_mode():
        assert torch.equal(offloaded(**prompts()).logits, memory(**prompts()).logits)  # prefill of a padded batch
        assert torch.equal(tokens(offloaded), tokens(memory))  # decode with a cache
        sampled = []
        for model in (memory, offloaded):
            torch.manual_seed(7)
            sampled.append(tokens(model, do_sample=True, temperature=2.0))
        assert torch.equal(*sampled)
        report = experts.report()
        assert report.bytes_read
        assert report.hit_rate
        assert len(report.layers) == (2 if kind == "deepseek" else 3)


class Alignments(TorchDispatchMode):
    """Notes how the second operand of each matrix product is aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.linear.default"):
            self.found.append(args[1].data_ptr() % 64)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt-oss"])
def test_weights_are_aligned_as_in_memory(checkpoints: dict[str, Path], kind: str) -> None:
    """Products of few rows have other last bits otherwise. Merged weights are tensors; others, views of mapped files."""
    memory, offloaded = (load(checkpoints[kind], experts_implementation="eager") for _ in range(2))
    with offload_experts(offloaded, checkpoints[kind], memory_budget=BUDGET), torch.no_grad():
        with Alignments() as expected:
            memory(**prompts())
        with Alignments() as found:
            offloaded(**prompts())
    assert found.found == expected.found != []


def test_logits_are_the_same_where_torch_has_no_grouped_mm_for_processors(checkpoints: dict[str, Path]) -> None:
    """As torch 2.10 and older for weights that are not aligned, as mapped ones."""
    memory, offloaded = (load(checkpoints["qwen3"], experts_implementation="grouped_mm") for _ in range(2))
    with (
        mock.patch("transformers.integrations.moe.is_torch_less_or_equal", return_value=True),
        offload_experts(offloaded, checkpoints["qwen3"], memory_budget=BUDGET),
        torch.inference_mode(),
    ):
        assert torch.equal(offloaded(**prompts()).logits, memory(**prompts()).logits)


@pytest.mark.parametrize("budget", [0, BUDGET])
@pytest.mark.parametrize("kind", MIXTURES)
def test_from_pretrained_reads_experts_on_demand_and_streams_the_rest(
    checkpoints: dict[str, Path], kind: str, budget: int
) -> None:
    memory = load(checkpoints[kind])
    model = from_pretrained(checkpoints[kind], memory_budget=budget)
    with model.streaming as streaming:
        assert torch.equal(tokens(model), tokens(memory))
        assert streaming.experts is not None
        assert streaming.experts.report().bytes_read
        streaming.close(restore=True)
    assert torch.equal(tokens(model), tokens(memory))


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_stream_reads_the_rest_where_the_files_have_the_experts_by_themselves_or_packed(
    checkpoints: dict[str, Path], kind: str
) -> None:
    memory, model = load(checkpoints[kind]), load(checkpoints[kind])
    with offload_experts(model, checkpoints[kind], memory_budget=BUDGET), stream(model, checkpoints[kind]):
        assert torch.equal(tokens(model), tokens(memory))


def test_stream_refuses_the_rest_where_transformers_renames_it(checkpoints: dict[str, Path]) -> None:
    memory, model = load(checkpoints["mixtral"]), load(checkpoints["mixtral"])
    with offload_experts(model, checkpoints["mixtral"], memory_budget=BUDGET):
        with pytest.raises(WeightMismatch, match=r"renames them, use .*from_pretrained(.|\n)*block_sparse_moe"):
            stream(model, checkpoints["mixtral"])
        assert torch.equal(tokens(model), tokens(memory))


@pytest.mark.parametrize("restore", [False, True])
def test_ctrl_c_while_the_stream_is_closed_leaves_a_model_that_works(
    checkpoints: dict[str, Path], restore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = tokens(load(checkpoints["olmoe"])), from_pretrained(checkpoints["olmoe"])
    with monkeypatch.context() as patched:
        patched.setattr(ExtentCache, "drain", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            model.streaming.close(restore)
    assert torch.equal(tokens(model), expected)
    model.streaming.close(restore)
    if restore:
        assert torch.equal(tokens(model), expected)
    else:
        with pytest.raises(RuntimeError, match=r"is streamed, and in memory only"):
            tokens(model)


def test_static_caches_and_assisted_generation(checkpoints: dict[str, Path]) -> None:
    memory, assistant = (load(checkpoints["qwen3"]) for _ in range(2))
    model = from_pretrained(checkpoints["qwen3"], memory_budget=BUDGET)
    with model.streaming as streaming:
        assert streaming.experts is not None
        for options in ({"cache_implementation": "static", "disable_compile": True}, {"assistant_model": assistant}):
            how = {**prompts(rows=1), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
            assert torch.equal(model.generate(**how), memory.generate(**how))


def test_experts_are_streamed_with_their_layers_if_all_fit_or_if_asked(checkpoints: dict[str, Path]) -> None:
    expected = tokens(load(checkpoints["qwen3"]))
    for options in ({"memory_budget": "1GB"}, {"experts": "streamed"}):
        model = from_pretrained(checkpoints["qwen3"], **options)
        with model.streaming as streaming:
            assert streaming.experts is None
            assert torch.equal(tokens(model), expected)


def test_weights_that_stay_in_memory_count_as_they_are_in_the_files(checkpoints: dict[str, Path], drive: Path) -> None:
    """They stay in float32, two times as many bytes as the model's weights have."""
    load(checkpoints["olmoe"], dtype=torch.float32).save_pretrained(drive)
    known = load(drive, dtype=torch.bfloat16)
    nbytes = sum(weight.nbytes for weight in known.parameters())
    for share, on_demand in ((1.05, True), (1.7, True), (3, False)):
        model = from_pretrained(drive, dtype=torch.bfloat16, memory_budget=int(share * nbytes))
        with model.streaming as streaming:
            assert (streaming.experts is not None) == on_demand
            assert torch.equal(tokens(model), tokens(known))
            streaming.reset()
            tokens(model)
            assert streaming.report().bytes_read == 0


def test_a_share_is_one_of_the_memory_where_the_model_computes(checkpoints: dict[str, Path]) -> None:
    with (
        mock.patch("torch.cuda.mem_get_info", return_value=(40_000, 80_000)),
        mock.patch("deepnvme.streaming.pretrained.Streaming") as made,
    ):
        from_pretrained(checkpoints["olmoe"], memory_budget="50%", device="cuda")
    (_, _, _, budget, _), options = made.call_args
    assert budget == 20_000
    options["experts"].close()


def test_a_budget_that_holds_no_extent_is_refused_with_what_it_is_for(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"all \d+ without the experts, .* got 100"):
        from_pretrained(checkpoints["olmoe"], memory_budget=100)


def test_half_of_little_memory_holds_no_extent(checkpoints: dict[str, Path]) -> None:
    with mock.patch("deepnvme.streaming.streamed_model.available_memory", return_value=200):
        model = from_pretrained(checkpoints["olmoe"], memory_budget="auto", experts="on-demand")
    with model.streaming as streaming:
        assert torch.equal(tokens(model), tokens(load(checkpoints["olmoe"])))
        assert streaming.report().resident_bytes == 0


def test_experts_that_were_closed_without_restore_cannot_be_restored_with_the_stream(checkpoints: dict[str, Path]) -> None:
    model = from_pretrained(checkpoints["olmoe"])
    model.streaming.experts.close()
    with pytest.raises(RuntimeError, match="load the model again"):
        model.streaming.close(restore=True)
    model.streaming.close()


def test_a_conversion_that_is_refused_has_converted_nothing(checkpoints: dict[str, Path]) -> None:
    known, model = load(checkpoints["olmoe"]), from_pretrained(checkpoints["olmoe"], memory_budget=BUDGET)
    with model.streaming as streaming:
        expected = tokens(known)
        for convert in (model.half, lambda: model.to(torch.float64), model.share_memory):
            with pytest.raises(RuntimeError, match=r"what streams the model"):
                convert()
            assert torch.equal(tokens(model), expected)
        assert model.to("cpu") is model
        streaming.close(restore=True)
    assert model.half().lm_head.weight.dtype == torch.float16


def test_names_in_the_files_that_transformers_changes_are_told_with_what_does_so(checkpoints: dict[str, Path]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(MIXTURES["olmoe"])
    with pytest.raises(WeightMismatch, match=r"experts\.0(.|\n)*deepnvme\.streaming\.from_pretrained\(checkpoint\)"):
        stream(model, checkpoints["olmoe"])


def test_what_experts_on_demand_need_is_told(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for options in ({"experts": "on-demand", "path": tmp_path / "store"}, {"experts": "maybe"}):
        with pytest.raises(ValueError, match=r"experts must be 'on-demand' \(without path\)"):
            from_pretrained(checkpoints["qwen3"], **options)


def test_what_fails_in_the_middle_of_generate_is_told_and_the_next_call_works(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["olmoe"])
    expected = tokens(model)
    with offload_experts(model, checkpoints["olmoe"], memory_budget=BUDGET):
        assert torch.equal(tokens(model), expected)
        with failing("read", first=20, count=10**6):
            with pytest.raises(OSError, match=r"expert \d of 'model\.layers\.\d\.mlp\.experts' .* at offset") as raised:
                tokens(model)
            assert raised.value.errno == errno.EIO
        assert torch.equal(tokens(model), expected)
        with ctrl_c_in_a_wait_for("read"), pytest.raises(KeyboardInterrupt):
            tokens(model)
        assert torch.equal(tokens(model), expected)


class Adapted(torch.nn.Module):
    """A linear layer with an adapter of low rank."""

    def __init__(self, linear: torch.nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = linear
        torch.manual_seed(4)
        self.down, self.up = (torch.nn.Parameter(torch.randn(*shape) / 8) for shape in ((2, inputs), (outputs, 2)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(inputs) + (inputs @ self.down.T) @ self.up.T
        return result


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_adapters_of_other_modules_are_trained_as_in_memory(checkpoints: dict[str, Path], implementation: str) -> None:
    options = {"experts_implementation": implementation, "dtype": torch.float32}
    budget = 1 << 30 if implementation != "grouped_mm" else BUDGET  # others keep weights until the backward
    weights = []
    for how in ("in memory", "offloaded", "streamed"):
        if how == "streamed":
            model = from_pretrained(checkpoints["qwen3"], memory_budget="1GB", experts="on-demand", **options)
            model.requires_grad_(False)
        else:
            model = load(checkpoints["qwen3"], **options).requires_grad_(False)
        experts = None if how != "offloaded" else offload_experts(model, checkpoints["qwen3"], memory_budget=budget)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, 64, 64)
        adapters = [weight for weight in model.parameters() if weight.requires_grad]
        assert len(adapters) == 2 * 3
        optimizer = torch.optim.SGD(adapters, lr=0.1)
        for _ in range(3):
            model(**prompts(), labels=prompts()["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(adapters)
        # As peft does, saves and loads those of the adapters.
        saved = {name: weight.clone() for name, weight in model.state_dict().items() if name.endswith((".down", ".up"))}
        assert len(saved) == len(adapters)
        torch.nn.init.zeros_(adapters[0])
        assert not model.load_state_dict(saved, strict=False).unexpected_keys
        assert torch.equal(adapters[0], next(iter(saved.values())))
        if experts is not None:
            experts.close()
    assert all(torch.equal(expected, found) for expected, *others in zip(*weights, strict=True) for found in others)


def test_two_models_on_one_folder_and_calls_in_threads(checkpoints: dict[str, Path]) -> None:
    expected = tokens(load(checkpoints["olmoe"]))
    first, second = (from_pretrained(checkpoints["olmoe"], memory_budget=BUDGET) for _ in range(2))
    with first.streaming, second.streaming, ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(tokens, [first, second, first, second]))


def sharded(folder: Path) -> dict[str, Any]:
    """A mixture in several files, and its index."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES["olmoe"])
    model.save_pretrained(folder, max_shard_size="100KB")
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def test_an_index_that_lies_is_told(drive: Path) -> None:
    index = sharded(drive)["weight_map"]
    name = next(name for name in index if "experts.3.down_proj" in name)
    other = next(file for file in index.values() if file != index[name])
    model = load(drive)
    text = json.dumps({"metadata": {}, "weight_map": {**index, name: other}})
    (drive / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=re.escape(name)) as raised:
        offload_experts(model, drive, memory_budget=BUDGET)
    assert Path(str(raised.value.filename)).parent == drive
    streamed = from_pretrained(drive, memory_budget=BUDGET)  # which reads the headers of all files, as transformers does
    assert torch.equal(tokens(streamed), tokens(model))
    streamed.streaming.close()


def test_a_shard_that_is_replaced_after_its_header_was_read_is_named(drive: Path) -> None:
    weights, replaced = sharded(drive)["weight_map"], set()
    found_in = {file: {name for name, other in weights.items() if other == file} for file in weights.values()}
    locate = pretrained.locate_weights

    def then_replace(*arguments: Any) -> Any:
        located = locate(*arguments)
        for file, names in found_in.items():
            if all(".experts." in name for name in names):
                changed = {name: weight + 1 for name, weight in load_file(drive / file).items()}
                save_file(changed, drive / "new", metadata={"format": "pt"})
                os.replace(drive / "new", drive / file)
                replaced.add(str(drive / file))
        return located

    with (
        mock.patch.object(pretrained, "locate_weights", then_replace),
        pytest.raises(CorruptCheckpoint, match="changed") as raised,
    ):
        from_pretrained(drive, memory_budget=BUDGET, experts="on-demand")
    assert raised.value.filename in replaced


@pytest.mark.parametrize("lost", ["all of it", "its end"])
def test_a_shard_that_is_missing_or_cut_off_is_named(drive: Path, lost: str) -> None:
    index = sharded(drive)["weight_map"]
    model, shard = load(drive), drive / next(file for name, file in index.items() if "experts.3.down_proj" in name)
    if lost == "all of it":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 100)
    for call in (lambda: offload_experts(model, drive, memory_budget=BUDGET), lambda: from_pretrained(drive)):
        with pytest.raises(OSError, match=re.escape(shard.name)):
            call()


def test_experts_that_transformers_would_rearrange_are_refused(checkpoints: dict[str, Path]) -> None:
    """As the files of Qwen3-VL have them: packed, but transposed."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    model = load(checkpoints["gpt-oss"])
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    mapping = [WeightConverter(name, name, operations=[Transpose(1, 2)]) for name in names]
    with (
        mock.patch.object(conversion_mapping, "get_model_conversion_mapping", return_value=mapping),
        pytest.raises(ValueError, match=r"rearranges '.*experts\.\w+_proj'.*Transpose"),
    ):
        offload_experts(model, checkpoints["gpt-oss"], memory_budget=BUDGET)
