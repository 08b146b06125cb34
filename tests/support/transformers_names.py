"""What transformers calls things, which differs between its versions."""

import inspect

import transformers

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""A model's argument for its KV cache, and the attribute of what ``generate`` returns: "cache" since 5.24."""
