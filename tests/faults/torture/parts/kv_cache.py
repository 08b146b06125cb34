"""Faults and Ctrl-C under a KV cache on the drive: the same tokens, or an error that is named until the cache is reset."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import random as randoms
from pathlib import Path
from typing import Any

import torch

from ....support.engines import transfers_through
from ....support.interrupts import ctrl_c_every
from ....support.memory import leased_bytes
from .. import Wrong, streams

SHORT, SECONDS = 3, 90

_NEW = 6


def requires() -> str | None:
    return None if importlib.util.find_spec("transformers") else "needs transformers"


def attack(random: randoms.Random, directory: Path) -> None:
    from deepnvme.streaming import OffloadedCache
    from deepnvme.streaming.kv import layer

    layer.CHUNK_BYTES = 2048  # a few positions in each
    model = _model(random.choice([None, 9]))
    prompt = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(random.randrange(1 << 30)))
    expected = _generated(model, prompt, None)
    settings = {"memory_budget": random.choice([0, 12 << 10]), "prefetch": random.randint(0, 2)}
    leased = leased_bytes()
    with OffloadedCache(model.config, path=directory, **settings) as cache:
        if random.random() < 0.5:
            _generated(model, prompt, cache)
            cache.reset()
        if random.random() < 0.3:
            _with_faults(random, model, prompt, cache, expected, directory)
        for _ in range(3):
            _with_an_interrupt(random, model, prompt, cache, expected)
        cache.reset()
        report = cache.report()
        kept = leased_bytes() - leased
        if report.bytes_on_drive or kept > 0:
            raise Wrong(f"a cache that was reset holds {report}, and {kept} bytes of buffers")
        for _ in range(2):
            if not torch.equal(_generated(model, prompt, cache), expected):
                raise Wrong("other tokens after a reset")
            cache.reset()
    if list(directory.iterdir()):
        raise Wrong(f"a closed cache left {list(directory.iterdir())}")


def _with_faults(
    random: randoms.Random, model: Any, prompt: torch.Tensor, cache: Any, expected: torch.Tensor, directory: Path
) -> None:
    error = random.choice([errno.EIO, errno.ENOSPC])
    with transfers_through(streams.faulty_engine(random, error)):
        for _ in range(random.randint(1, 3)):
            try:
                if not torch.equal(_generated(model, prompt, cache), expected):
                    raise Wrong("other tokens while transfers fail")
            except OSError as raised:
                if raised.errno != error or not str(raised.filename).startswith(str(directory)):
                    raise Wrong(f"{raised!r} with filename {raised.filename!r} was raised for errno {error}") from raised
                _check_refusal(model, prompt, cache, raised)
            cache.reset()


def _check_refusal(model: Any, prompt: torch.Tensor, cache: Any, first: OSError) -> None:
    for _ in range(2):
        try:
            _generated(model, prompt, cache)
        except RuntimeError as refused:
            cause = refused.__cause__
            if not isinstance(cause, OSError) or (cause.errno, cause.filename) != (first.errno, first.filename):
                raise Wrong(f"{refused!r} does not say that it is for {first!r}") from refused
        else:
            raise Wrong(f"a cache was used after {first!r}")


def _with_an_interrupt(random: randoms.Random, model: Any, prompt: torch.Tensor, cache: Any, expected: torch.Tensor) -> None:
    import transformers

    from ....support.transformers_names import CACHE

    begin = prompt.shape[1]
    pieces = [(0, begin), (begin, begin + 1), (begin + 1, begin + 2)]

    def forwards() -> None:
        with torch.no_grad():
            for start, end in pieces:
                model(expected[:, start:end], **{CACHE: cache})

    with contextlib.suppress(KeyboardInterrupt), ctrl_c_every(random.uniform(0.0005, 0.02)):
        forwards()
    there = cache.get_seq_length()
    if there and there < expected.shape[1]:
        # Whatever it holds: all of some forwards, or it says that it is not to be used.
        reference = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            for start, end in pieces[: 1 + there - begin]:
                model(expected[:, start:end], **{CACHE: reference})
            following = expected[:, there : there + 1]
            try:
                logits = model(following, **{CACHE: cache}).logits
            except RuntimeError as refused:
                if "reset()" not in str(refused):
                    raise
            else:
                if not torch.equal(logits, model(following, **{CACHE: reference}).logits):
                    raise Wrong("other logits after an interrupt")
    streams.in_another_thread(cache.reset)


def _generated(model: Any, prompt: torch.Tensor, cache: Any) -> torch.Tensor:
    from ....support.transformers_names import CACHE

    given = {} if cache is None else {CACHE: cache}
    settings = {"max_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens: torch.Tensor = model.generate(prompt, **settings, **given)
    return tokens


def _model(window: int | None) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    config = transformers.MistralConfig(num_hidden_layers=3, pad_token_id=0, sliding_window=window, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
