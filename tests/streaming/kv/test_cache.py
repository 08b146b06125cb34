"""transformers' generation with its keys and values on a drive or in host memory, against DynamicCache."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.disks import MIB, Disk
from ...support.engines import FailedTransfer, transfers_are
from ...support.memory import leased_bytes
from .states import states

transformers = pytest.importorskip("transformers", reason="needs transformers")

from deepnvme.streaming import OffloadedCache, offload_kv  # noqa: E402
from deepnvme.streaming.kv import layer as kv_layer  # noqa: E402
from deepnvme.streaming.kv.drive import CHUNK_BYTES  # noqa: E402

from ...support.decoders import decoder, generated  # noqa: E402
from ...support.transformers_names import CACHE  # noqa: E402

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: decoder("Llama"),
    "llama, eager": lambda: decoder("Llama", attn_implementation="eager"),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_head=4, n_layer=3, vocab_size=64, n_positions=256),
    "mixtral": lambda: decoder("Mixtral", num_local_experts=4),
    "mistral, window of 9": lambda: decoder("Mistral", sliding_window=9),
    "gemma2, window of 8 in turns": lambda: decoder("Gemma2", sliding_window=8, head_dim=8),
    "qwen3, linear and full": lambda: decoder(
        "Qwen3Next",
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_hidden_layers=4,
    ),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few positions in each, so that short generation has many."""
    monkeypatch.setattr(kv_layer, "CHUNK_BYTES", 2048)
    torch.manual_seed(0)


@pytest.fixture
def llama() -> Any:
    return made(CONFIGS["llama"]())


@pytest.fixture
def cache(llama: Any, drive: Path) -> Iterator[OffloadedCache]:
    with OffloadedCache(llama.config, path=drive) as cache:
        yield cache


def made(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompt(batch: int = 2, positions: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (batch, positions), generator=torch.Generator().manual_seed(seed))


def same(cache: Any, reference: Any) -> bool:
    """Whether they hold the same in all layers."""
    return all(
        torch.equal(getattr(mine, name), getattr(theirs, name))
        for mine, theirs in zip(cache.layers, reference.layers, strict=True)
        for name in ("keys", "values")
    )


# What goes wrong.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"memory_budget": -1}, "-1"),
        ({"memory_budget": "10 parsecs"}, "memory_budget must be a number of bytes.*'10 parsecs'"),
        ({"prefetch": -1}, "prefetch"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_made(
    llama: Any, drive: Path, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        OffloadedCache(llama.config, drive, **wrong)
    with pytest.raises(ValueError, match=says):
        offload_kv(llama, drive, **wrong)
    assert not any(drive.iterdir())


def test_an_encoder_decoder_model_is_refused(drive: Path) -> None:
    with pytest.raises(ValueError, match="use an EncoderDecoderCache"):
        OffloadedCache(transformers.T5Config(num_layers=2), drive)


def test_layers_of_a_kind_that_cannot_be_offloaded_are_named(drive: Path) -> None:
    config = decoder("Llama")
    config.layer_types = ["full_attention", "hybrid", "full_attention"]
    with pytest.raises(ValueError, match="hybrid"):
        OffloadedCache(config, path=drive)
    assert not any(drive.iterdir())


def test_states_that_autograd_would_need_are_refused(llama: Any, cache: OffloadedCache) -> None:
    with pytest.raises(RuntimeError, match="no_grad"):
        llama(prompt(), **{CACHE: cache})
    with torch.no_grad():
        llama(prompt(), **{CACHE: cache})


def test_states_of_another_batch_are_refused_and_harm_nothing(cache: OffloadedCache) -> None:
    cache.update(*states(positions=40), layer_idx=0)
    with pytest.raises(ValueError, match="batch=3"):
        cache.update(*states(batch=3), layer_idx=0)
    with pytest.raises(ValueError, match="one dtype"):
        cache.update(states()[0], states()[1].double(), layer_idx=0)
    assert cache.update(*states(), layer_idx=0)[0].shape[2] == 41


def test_a_full_disk_is_reported_with_its_directory_and_the_cache_works_after_a_reset(
    llama: Any, small_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_layer, "CHUNK_BYTES", CHUNK_BYTES)
    with OffloadedCache(llama.config, path=small_disk.path) as cache:
        cache.update(*states(positions=20 * MIB // 256), layer_idx=0)
        with pytest.raises(OSError, match=str(small_disk.path)) as full:
            cache.update(*states(positions=20 * MIB // 256), layer_idx=1)
        assert full.value.errno == errno.ENOSPC
        with pytest.raises(RuntimeError, match="reset"):
            cache.update(*states(), layer_idx=2)
        monkeypatch.undo()
        cache.reset()
        assert torch.equal(generated(llama, prompt(), cache), generated(llama, prompt()))


class Failing:
    """Transfers of these kinds fail while this is entered: those of the numbers given, each by its future."""

    def __init__(self, path: Path, *kinds: str) -> None:
        self.count = 0
        self.numbers: Collection[int] = ()
        self._path, self._kinds = str(path), kinds
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> Failing:
        self._replaced.enter_context(transfers_are(self._replace))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.close()

    def _replace(self, kind: str, sound: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._transfer, sound) if kind in self._kinds else sound

    def _transfer(self, sound: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        if self.count in self.numbers:
            return FailedTransfer(OSError(errno.EIO, f"fault {self.count}", self._path))
        return sound(*arguments)


def test_a_read_that_fails_names_the_file_and_leaves_no_memory_behind(llama: Any, cache: OffloadedCache, drive: Path) -> None:
    path = drive / "deepnvme-kv-0" / "deepnvme-store.data"
    leased = leased_bytes()
    with Failing(path, "read") as failing:
        failing.numbers = range(20, 1000)  # what fails while it is read ahead is read once more
        with pytest.raises(OSError, match="fault") as error:
            generated(llama, prompt(), cache)
        assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))
        del error
        failing.numbers = ()
        with pytest.raises(RuntimeError, match="fault"):
            generated(llama, prompt(), cache)
    cache.reset()
    gc.collect()
    assert leased_bytes() <= leased
    assert torch.equal(generated(llama, prompt(), cache), generated(llama, prompt()))


@pytest.mark.slow
def test_any_transfer_that_fails_is_told_of_once_and_no_token_is_wrong(llama: Any, cache: OffloadedCache, drive: Path) -> None:
    with Failing(drive, "read", "write") as failing:
        _each_fails(llama, cache, drive, failing)


def _each_fails(llama: Any, cache: OffloadedCache, drive: Path, failing: Failing) -> None:
    expected = generated(llama, prompt())
    assert torch.equal(generated(llama, prompt(), cache), expected)
    for number in range(1, failing.count + 1, 5):
        cache.reset()
        failing.count, failing.numbers = 0, (number,)
        raised: list[OSError] = []
        try:
            assert torch.equal(generated(llama, prompt(), cache), expected)  # what was written in vain is not read
        except OSError as error:
            raised.append(copy.copy(error))
        failing.numbers = ()  # how many transfers there are depends on how long they take
        for error in raised:
            assert (error.errno, error.strerror, error.filename) == (errno.EIO, f"fault {number}", str(drive))
            with pytest.raises(RuntimeError, match=f"fault {number}: '{drive}'.*reset"):
                cache.update(*states(), layer_idx=0)
        cache.reset()
        assert torch.equal(generated(llama, prompt(), cache), expected)  # without an error that was told of before


def test_a_forward_that_is_broken_off_between_two_layers_is_not_gone_on_with(llama: Any, cache: OffloadedCache) -> None:
    ids = prompt()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        for before in ([], [ids]):  # in the first forward, and in a later one
            for each in before:
                llama(each, **{CACHE: cache})
            handle = llama.model.layers[1].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                llama(ids[:, :1], **{CACHE: cache})
            handle.remove()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="reset"):
                    llama(ids[:, :1], **{CACHE: cache})
            cache.reset()
            assert torch.equal(generated(llama, ids, cache), generated(llama, ids))
            cache.reset()


@pytest.mark.parametrize("change", [lambda cache: cache.reorder_cache(torch.tensor([1, 0])), lambda cache: cache.crop(-3)])
def test_a_change_that_reaches_some_layers_only_is_not_gone_on_with(
    llama: Any, cache: OffloadedCache, change: Callable[[OffloadedCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        llama(prompt(), **{CACHE: cache})

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in ("crop", "batch_select_indices"):
                patch.setattr(cache.layers[1], name, stop)
            with pytest.raises(KeyboardInterrupt):
                change(cache)
        with pytest.raises(RuntimeError, match="reset"):
            llama(prompt(positions=1), **{CACHE: cache})


def test_a_closed_cache_says_so(llama: Any, cache: OffloadedCache) -> None:
    generated(llama, prompt(), cache)
    cache.close()
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        cache.update(*states(), layer_idx=0)


def test_the_files_go_when_the_cache_does(llama: Any, drive: Path) -> None:
    cache = OffloadedCache(llama.config, path=drive)
    generated(llama, prompt(), cache)
    assert sum(file.stat().st_size for file in drive.rglob("*")) > 0
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert not any(drive.iterdir())


def test_caches_in_one_path_do_not_disturb_each_other(llama: Any, drive: Path) -> None:
    with OffloadedCache(llama.config, path=drive) as one, OffloadedCache(llama.config, path=drive) as other:
        first, second = generated(llama, prompt(), one), generated(llama, prompt(seed=2), other)
        assert len(list(drive.iterdir())) == 2
    assert torch.equal(first, generated(llama, prompt()))
    assert torch.equal(second, generated(llama, prompt(seed=2)))


# What generation gives.


ALL_IN_MEMORY = {"memory_budget": 1 << 30}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, {}) for name in CONFIGS),
        *((name, ALL_IN_MEMORY) for name in ("llama", "gemma2, window of 8 in turns")),
        ("llama", {"prefetch": 0}),
        ("gemma2, window of 8 in turns", {"memory_budget": 24 << 10}),
        ("llama", {"memory_budget": 24 << 10}),
    ],
)
def test_tokens_are_those_of_a_dynamic_cache(name: str, place: dict[str, Any], drive: Path) -> None:
    model = made(CONFIGS[name]())
    ids = prompt()
    ids[0, :4] = 0  # padded on the left
    mask = (ids != 0).long()
    cache = OffloadedCache(model.config, drive, **place)
    tokens = generated(model, ids, cache, attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    expected = generated(model, ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(tokens.sequences, expected.sequences)
    assert all(map(torch.equal, tokens.logits, expected.logits))
    assert (cache.report().bytes_read > 0) == (place != ALL_IN_MEMORY)
    cache.close()


@pytest.mark.parametrize("name", ["llama", "gemma2, window of 8 in turns"])
@pytest.mark.parametrize("memory_budget", [1 << 30, 24 << 10])
def test_beam_search_finds_the_same(name: str, memory_budget: int, drive: Path) -> None:
    model = made(CONFIGS[name]())
    settings = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0}
    with OffloadedCache(model.config, drive, memory_budget=memory_budget) as cache:
        assert torch.equal(generated(model, prompt(), cache, **settings), generated(model, prompt(), **settings))


def test_beam_search_rewrites_nothing(llama: Any, cache: OffloadedCache) -> None:
    generated(llama, prompt(), cache, num_beams=3)
    report = cache.report()
    assert report.bytes_written == report.bytes_on_drive > 0


@pytest.mark.parametrize("name", ["llama", "mistral, window of 9"])
def test_a_prompt_may_come_in_pieces(name: str, drive: Path) -> None:
    model = made(CONFIGS[name]())
    with OffloadedCache(model.config, path=drive) as cache:
        tokens = generated(model, prompt(positions=50), cache, prefill_chunk_size=16)
    assert torch.equal(tokens, generated(model, prompt(positions=50), prefill_chunk_size=16))


@pytest.mark.parametrize("name", ["llama", "mistral, window of 9"])
def test_assisted_generation_takes_back_what_was_guessed_wrong(name: str, drive: Path) -> None:
    model, assistant = made(CONFIGS[name]()), made(decoder("Llama", num_hidden_layers=1))
    with OffloadedCache(model.config, path=drive) as cache:
        tokens = generated(model, prompt(batch=1), cache, assistant_model=assistant)
    assert torch.equal(tokens, generated(model, prompt(batch=1)))


def test_a_conversation_goes_on_with_the_cache(llama: Any, cache: OffloadedCache) -> None:
    said = generated(llama, prompt(), cache)
    more = torch.cat([said, prompt(positions=5, seed=3)], dim=1)
    assert torch.equal(generated(llama, more, cache), generated(llama, more))


def test_generate_makes_a_cache_of_its_own_each_time(llama: Any, drive: Path) -> None:
    expected = generated(llama, prompt())
    offload_kv(llama, path=drive)
    assert torch.equal(generated(llama, prompt()), expected)
    assert not any(drive.iterdir())
    kept = generated(llama, prompt(), return_dict_in_generate=True)
    assert torch.equal(kept.sequences, expected)
    assert getattr(kept, CACHE).get_seq_length() == expected.shape[1] - 1
    assert getattr(kept, CACHE).report().bytes_on_drive > 0
    assert torch.equal(generated(llama, prompt(), transformers.DynamicCache(config=llama.config)), expected)
    getattr(kept, CACHE).close()


@pytest.mark.parametrize("setting", [{"use_cache": False}, {"cache_implementation": "dynamic"}], ids=str)
@pytest.mark.parametrize("given", ["call", "config", "default"])
def test_how_generate_is_to_cache_is_said_by_its_options(
    llama: Any, drive: Path, monkeypatch: pytest.MonkeyPatch, given: str, setting: dict[str, Any]
) -> None:
    offload_kv(llama, path=drive)
    monkeypatch.setattr("deepnvme.streaming.kv.cache.OffloadedCache", lambda *_, **__: pytest.fail("a cache was made"))
    if given == "call":
        generated(llama, prompt(), **setting)
    elif given == "config":
        llama.generate(prompt(), transformers.GenerationConfig(max_new_tokens=2, **setting))
    else:
        for name, value in setting.items():
            monkeypatch.setattr(llama.generation_config, name, value)
        generated(llama, prompt())


def test_a_model_whose_states_do_not_grow_is_left_as_it_is(drive: Path) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1, pad_token_id=0)
    model = transformers.MambaForCausalLM(config).eval()
    expected = model.generate(prompt(), max_new_tokens=4, do_sample=False)
    offload_kv(model, path=drive)
    assert torch.equal(model.generate(prompt(), max_new_tokens=4, do_sample=False), expected)


def test_a_model_that_does_not_generate_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="LlamaModel does not generate"):
        offload_kv(llama.model, ".")


# What is done to a cache.


@pytest.fixture(params=["drive", "memory"])
def pair(request: pytest.FixtureRequest, llama: Any, drive: Path) -> Iterator[tuple[OffloadedCache, Any]]:
    """A cache on the drive, or in memory, and one of transformers', with the same in them."""
    with OffloadedCache(llama.config, drive, memory_budget=0 if request.param == "drive" else 1 << 30) as cache:
        reference = transformers.DynamicCache(config=llama.config)
        for seed, positions in enumerate([30, 1, 1, 9, 1]):
            extend(cache, reference, positions, seed)
        yield cache, reference


def extend(cache: OffloadedCache, reference: Any, positions: int, seed: int = 7) -> None:
    batch = reference.layers[0].keys.shape[0] if reference.get_seq_length() else 2
    for layer in range(3):
        new = states(batch, positions, seed=10 * seed + layer)
        got, expected = cache.update(*new, layer_idx=layer), reference.update(*new, layer_idx=layer)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-17),
        lambda cache: cache.crop(-41),
        lambda cache: cache.crop(-42),
        lambda cache: cache.crop(0),
        lambda cache: cache.reset(),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: (cache.reorder_cache(torch.tensor([1, 1])), cache.crop(-20)),
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
        lambda cache: (cache.batch_repeat_interleave(2), cache.reorder_cache(torch.tensor([3, 0, 0, 2]))),
    ],
)
def test_changes_are_those_of_a_dynamic_cache(pair: tuple[OffloadedCache, Any], change: Callable[[Any], Any]) -> None:
    cache, reference = pair
    assert same(cache, reference)
    for each in pair:
        change(each)
    assert cache.get_seq_length() == reference.get_seq_length()
    assert reference.get_seq_length() == 0 or same(cache, reference)
    for positions in (1, 12, 1):
        extend(cache, reference, positions)
    assert same(cache, reference)


@pytest.mark.parametrize("memory_budget", [0, 1 << 20])
def test_what_inference_mode_has_put_there_goes_on_outside_of_it(llama: Any, drive: Path, memory_budget: int) -> None:
    with OffloadedCache(llama.config, drive, memory_budget=memory_budget) as cache:
        reference = transformers.DynamicCache(config=llama.config)
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
            for positions in (30, 1, 1):
                with mode():
                    got = cache.update(*states(2, positions), layer_idx=0)
                with torch.no_grad():
                    expected = reference.update(*states(2, positions), layer_idx=0)
                assert all(map(torch.equal, got, expected))


def test_a_view_that_somebody_keeps_is_not_overwritten(cache: OffloadedCache) -> None:
    for layer in range(3):
        cache.update(*states(positions=40, seed=layer), layer_idx=layer)
    kept = [cache.update(*states(seed=3 + layer), layer_idx=layer) for layer in range(3)]
    for layer, (keys, values) in enumerate(kept):
        before, new = states(positions=40, seed=layer), states(seed=3 + layer)
        assert torch.equal(keys, torch.cat([before[0], new[0]], dim=2))
        assert torch.equal(values, torch.cat([before[1], new[1]], dim=2))


# Memory.


@pytest.mark.slow
def test_memory_beyond_the_budget_is_a_few_layers(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_layer, "CHUNK_BYTES", CHUNK_BYTES)
    layers, positions = 24, 8192
    config = decoder("Llama", num_hidden_layers=layers)
    layer_bytes = 2 * positions * 2 * 64 * 4  # 8 MiB of keys and values
    new = states(batch=1, positions=positions // 4, dim=64)
    step = states(batch=1, dim=64)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = _peak()
    budget = 3 * layer_bytes
    with OffloadedCache(config, path=drive, memory_budget=budget) as cache:
        for _ in range(4):
            for layer in range(layers):
                cache.update(*new, layer_idx=layer)
        for _ in range(8):
            for layer in range(layers):
                assert cache.update(*step, layer_idx=layer)[0].shape[2] > positions
        report = cache.report()
        resident = sum(not layer.streamed for layer in cache.layers)
        peak = _peak() - before
    assert report.bytes_on_drive >= (layers - 3) * (layer_bytes - 2 * MIB)
    assert resident == 2  # each with room for an eighth more
    assert peak < budget + 2 * layer_bytes + layers * 2 * MIB + 32 * MIB < layers * layer_bytes


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_layers_on_the_drive_are_spread_among_those_in_memory(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_layer, "CHUNK_BYTES", 64 << 10)
    with OffloadedCache(decoder("Llama", num_hidden_layers=8), path=drive, memory_budget=3_500_000) as cache:
        for seed in range(4):
            for layer in range(8):
                cache.update(*states(positions=500, seed=seed), layer_idx=layer)
        streamed = [layer.streamed for layer in cache.layers]
    assert sum(streamed) == 4
    assert len(set(itertools.pairwise(streamed))) == 2, "each second one"
