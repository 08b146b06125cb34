"""Small models of transformers, and what they generate with a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from .transformers_names import CACHE

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 64}
GENERATION = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def decoder(name: str, **settings: Any) -> Any:
    """The configuration of a small decoder of that architecture."""
    return getattr(transformers, f"{name}Config")(**{**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, **settings})


def generated(model: Any, ids: torch.Tensor, cache: Any = None, **settings: Any) -> torch.Tensor:
    """What ``generate`` returns, with that cache or with transformers' own."""
    given = {} if cache is None else {CACHE: cache}
    tokens: torch.Tensor = model.generate(ids, **{"max_new_tokens": 14, **GENERATION, **settings}, **given)
    return tokens
