"""Which experts of a mixture should stay in memory: hit rates of eviction policies on traces of routing, in simulation.

    python benchmarks/expert_residents.py

Prints, for each trace and capacity, the share of the chosen experts that each policy has in memory when they are chosen, and that
of the best fixed choice: the experts that the whole trace uses most, in memory from the beginning. One trace is of
a mixture of random weights, for which it needs transformers; the others are drawn. Needs no drive.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

LAYERS, EXPERTS, CHOSEN = 8, 64, 8
Expert = tuple[int, int]
"""Layer and number."""
Trace = list[Expert]
"""Experts in the order of their use: of each token, those of the first layer, then those of the second, and so on."""


def zipf(count: int, exponent: float = 1.0) -> list[float]:
    """Return weights by rank."""
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def draw(shuffled: random.Random, order: Sequence[int]) -> list[int]:
    """Draw different experts of one layer, earlier ones in ``order`` more often, and return them sorted."""
    keys = {expert: shuffled.random() ** (1 / weight) for expert, weight in zip(order, zipf(len(order)), strict=True)}
    return sorted(sorted(order, key=lambda expert: -keys[expert])[:CHOSEN])


def orders(shuffled: random.Random) -> list[list[int]]:
    """Return for each layer its experts, the most popular first."""
    return [shuffled.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]


def independent(tokens: int, topic: int, shuffled: random.Random) -> Trace:
    """Each token draws anew from the popular experts; after ``topic`` tokens, others are popular."""
    trace: Trace = []
    for token in range(tokens):
        if token % topic == 0:
            popular = orders(shuffled)
        trace += [(layer, expert) for layer in range(LAYERS) for expert in draw(shuffled, popular[layer])]
    return trace


def repeated(tokens: int, words: int, shuffled: random.Random) -> Trace:
    """A word routes to the experts that it had before, but for one in ten layers; words are as frequent as Zipf says."""
    popular, text = orders(shuffled), shuffled.choices(range(words), zipf(words), k=tokens)
    routes = {word: [draw(shuffled, popular[layer]) for layer in range(LAYERS)] for word in set(text)}
    trace: Trace = []
    for word, layer in itertools.product(text, range(LAYERS)):
        chosen = routes[word][layer] if shuffled.random() > 0.1 else draw(shuffled, popular[layer])
        trace += [(layer, expert) for expert in chosen]
    return trace


def random_mixture(tokens: int, words: int, seed: int) -> Trace:
    """What the routers of a mixture of random weights choose for words as frequent as Zipf says. Needs transformers."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.OlmoeConfig(
        num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, vocab_size=words, **sizes
    )
    model = transformers.OlmoeForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    found: list[list[list[int]]] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: found.append(args[1].sort().values.tolist()))
    with torch.inference_mode():
        model(torch.multinomial(torch.tensor(zipf(words)), tokens, replacement=True).view(1, -1), use_cache=False)
    return [(layer, expert) for token in range(tokens) for layer, chosen in enumerate(found) for expert in chosen[token]]


def lru(trace: Trace, capacity: int) -> int:
    """Return the hits if the expert used longest ago is dropped."""
    held: OrderedDict[Expert, None] = OrderedDict()
    hits = 0
    for expert in trace:
        hits += expert in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def frequency(trace: Trace, capacity: int, half_life: float) -> int:
    """Return the hits if the expert used least is dropped, a use counting half after ``half_life`` tokens (inf: LFU)."""
    uses: dict[Expert, float] = {}
    held: set[Expert] = set()
    hits = 0
    for count, expert in enumerate(trace):
        now = count / (LAYERS * CHOSEN * half_life)
        before = uses.get(expert, -math.inf)
        uses[expert] = max(before, now) + math.log2(1 + 2 ** -abs(before - now))
        hits += expert in held
        if expert not in held and len(held) == capacity:
            held.remove(min(held, key=uses.__getitem__))
        held.add(expert)
    return hits


def s3_fifo(trace: Trace, capacity: int) -> int:
    """Return the hits of S3-FIFO: a small queue for new experts, a main queue, and a list of those dropped from the small one."""
    small: deque[Expert] = deque()
    main: deque[Expert] = deque()
    ghosts: OrderedDict[Expert, None] = OrderedDict()
    count: dict[Expert, int] = {}
    hits = 0
    for expert in trace:
        if expert in count:
            hits += 1
            count[expert] = min(count[expert] + 1, 3)
            continue
        while len(small) + len(main) >= capacity:
            if small and len(small) >= max(capacity // 10, 1):
                old = small.popleft()
                if count[old]:
                    main.append(old)
                    count[old] = 0
                else:
                    del count[old]
                    ghosts[old] = None
                    if len(ghosts) > capacity:
                        ghosts.popitem(last=False)
            else:
                old = (main or small).popleft()
                if count[old]:
                    count[old] -= 1
                    main.append(old)
                else:
                    del count[old]
        (main if expert in ghosts else small).append(expert)
        ghosts.pop(expert, None)
        count[expert] = 0
    return hits


def best_fixed(trace: Trace, capacity: int) -> int:
    """Return the hits if the experts that the whole trace uses most are in memory from the beginning."""
    return sum(uses for _, uses in Counter(trace).most_common(capacity))


HALF_LIVES = (4, 16, 64, 256, 1024)
POLICIES: dict[str, Callable[[Trace, int], int]] = {
    "LRU": lru,
    "S3-FIFO": s3_fifo,
    "LFU": lambda trace, capacity: frequency(trace, capacity, math.inf),
    **{f"aged {half}": lambda trace, capacity, half=half: frequency(trace, capacity, half) for half in HALF_LIVES},  # type: ignore[misc]
    "best fixed": best_fixed,
}


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(None if arguments is None else list(arguments))
    shuffled = random.Random(options.seed)
    traces = {
        "one topic": independent(options.tokens, options.tokens, shuffled),
        "a topic each 300 tokens": independent(options.tokens, 300, shuffled),
        "a topic each 60 tokens": independent(options.tokens, 60, shuffled),
        "text that repeats": repeated(options.tokens, 500, shuffled),
        "a random mixture": random_mixture(options.tokens, 500, options.seed),
    }
    print(f"{'trace':26}{'memory':>8}" + "".join(f"{name:>11}" for name in POLICIES))
    for (name, trace), share in itertools.product(traces.items(), (0.1, 0.3, 0.6)):
        capacity = int(share * LAYERS * EXPERTS)
        rates = "".join(f"{policy(trace, capacity) / len(trace):11.1%}" for policy in POLICIES.values())
        print(f"{name:26}{share:8.0%}{rates}", flush=True)


if __name__ == "__main__":
    main()
