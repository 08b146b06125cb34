"""Which blocks a ``BlockStore`` evicts, against LRU, LFU and ARC: hit rates on simulated requests.

    python benchmarks/block_eviction.py --dir /mnt/nvme/bench [--requests 200000] [--json FILE]

A request asks for the blocks of a prompt in order. Blocks from the first miss on are computed and put. The hit rate is that of
the blocks before the first miss, since a prompt's later blocks are no use without the earlier ones. All contenders count the
blocks of a request from the last to the first, so that the beginnings of prompts stay longest. The store's blocks have one byte.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from deepnvme.kvstore import BlockStore

Keys = list[bytes]


class Policy(Protocol):
    """What keeps at most so many keys."""

    def get(self, keys: Keys) -> Sequence[bool]:
        """Return whether each key is there, and count a use of those that are."""

    def put(self, keys: Keys) -> None:
        """Have each key."""


class Store:
    """A ``BlockStore``."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.store = BlockStore(folder, 12288 + 4224 * slots, 1)
        if self.store.stats().slots != slots:
            raise RuntimeError(f"the store has {self.store.stats().slots} slots, not {slots}")

    def get(self, keys: Keys) -> list[bool]:
        return self.store.touch(keys)

    def put(self, keys: Keys) -> None:
        self.store.put_many(keys, bytes(len(keys))).result()


class LRU:
    """Evicts the key that was used longest ago."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.kept: OrderedDict[bytes, None] = OrderedDict()

    def get(self, keys: Keys) -> list[bool]:
        found = [key in self.kept for key in keys]
        for key, there in zip(reversed(keys), reversed(found), strict=True):
            if there:
                self.kept.move_to_end(key)
        return found

    def put(self, keys: Keys) -> None:
        for key in reversed(keys):
            self.kept[key] = None
            self.kept.move_to_end(key)
            if len(self.kept) > self.slots:
                self.kept.popitem(last=False)


class LFU:
    """Evicts the key that was used least often since the beginning, also before an eviction; of equals the oldest."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.uses: Counter[bytes] = Counter()
        self.kept: dict[bytes, tuple[int, int]] = {}
        self.heap: list[tuple[int, int, bytes]] = []
        self.time = itertools.count()

    def get(self, keys: Keys) -> list[bool]:
        found = [key in self.kept for key in keys]
        for key, there in zip(reversed(keys), reversed(found), strict=True):
            if there:
                self._use(key)
        return found

    def put(self, keys: Keys) -> None:
        for key in reversed(keys):
            if key not in self.kept and len(self.kept) == self.slots:
                while True:
                    uses, time, victim = heapq.heappop(self.heap)
                    if self.kept.get(victim) == (uses, time):
                        break
                del self.kept[victim]
            self._use(key)

    def _use(self, key: bytes) -> None:
        self.uses[key] += 1
        self.kept[key] = (self.uses[key], next(self.time))
        heapq.heappush(self.heap, (*self.kept[key], key))


class ARC:
    """Megiddo and Modha's adaptive replacement cache."""

    def __init__(self, slots: int) -> None:
        self.slots, self.target = slots, 0
        self.once, self.often = OrderedDict[bytes, None](), OrderedDict[bytes, None]()
        self.was_once, self.was_often = OrderedDict[bytes, None](), OrderedDict[bytes, None]()

    def get(self, keys: Keys) -> list[bool]:
        found = [key in self.once or key in self.often for key in keys]
        for key, there in zip(reversed(keys), reversed(found), strict=True):
            if there:
                self.once.pop(key, None)
                self.often[key] = None
                self.often.move_to_end(key)
        return found

    def put(self, keys: Keys) -> None:
        for key in reversed(keys):
            if key in self.once or key in self.often:
                self.get([key])
            else:
                self._insert(key)

    def _insert(self, key: bytes) -> None:
        if key in self.was_once:
            self.target = min(self.slots, self.target + max(1, len(self.was_often) // len(self.was_once)))
            self._replace(False)
            del self.was_once[key]
            self.often[key] = None
        elif key in self.was_often:
            self.target = max(0, self.target - max(1, len(self.was_once) // len(self.was_often)))
            self._replace(True)
            del self.was_often[key]
            self.often[key] = None
        else:
            if len(self.once) + len(self.was_once) == self.slots:
                if len(self.once) < self.slots:
                    self.was_once.popitem(last=False)
                    self._replace(False)
                else:
                    self.once.popitem(last=False)
            elif len(self.once) + len(self.often) + len(self.was_once) + len(self.was_often) >= self.slots:
                if len(self.once) + len(self.often) + len(self.was_once) + len(self.was_often) == 2 * self.slots:
                    self.was_often.popitem(last=False)
                self._replace(False)
            self.once[key] = None

    def _replace(self, was_often: bool) -> None:
        if len(self.once) + len(self.often) < self.slots:
            return
        if self.once and (len(self.once) > self.target or (was_often and len(self.once) == self.target)):
            self.was_once[self.once.popitem(last=False)[0]] = None
        else:
            self.was_often[self.often.popitem(last=False)[0]] = None


def block_key(*parts: int) -> bytes:
    return b"".join(part.to_bytes(8, "little") for part in parts)


def zipf(requests: int, keys: int, exponent: float, scan: int = 0) -> Iterator[Keys]:
    """Single blocks by Zipf's law; with ``scan``, half of the requests are scans of so many blocks that never come again."""
    random_numbers = random.Random(1)
    weights = list(itertools.accumulate(1 / (rank + 1) ** exponent for rank in range(keys)))
    fresh = itertools.count()
    drawn = iter(random_numbers.choices(range(keys), cum_weights=weights, k=requests))
    for number, key in enumerate(drawn):
        if scan and number % (2 * scan) == 0:
            yield from ([block_key(1, next(fresh))] for _ in range(scan))
        yield [block_key(0, key)]


def agents(requests: int, sessions: int, one_shot: float) -> Iterator[Keys]:
    """Agents that extend their prompts turn by turn, in random order; a share of the requests are prompts that never come again.

    A session begins with one of 16 prompts of 8 to 64 blocks, some more popular than others, adds 2 to 16 blocks a turn, and ends
    after 3 to 30 turns. Sessions differ in how often they come.
    """
    random_numbers = random.Random(2)
    prompts = [[block_key(2, prompt, each) for each in range(random_numbers.randint(8, 64))] for prompt in range(16)]
    popularity = [1 / (rank + 1) for rank in range(len(prompts))]
    fresh = itertools.count()

    def session() -> tuple[Keys, int, float]:
        return (
            list(random_numbers.choices(prompts, popularity)[0]),
            random_numbers.randint(3, 30),
            random_numbers.expovariate(1) + 0.1,
        )

    live = [session() for _ in range(sessions)]
    due = [(random_numbers.expovariate(pace), number) for number, (_, _, pace) in enumerate(live)]
    heapq.heapify(due)
    for _ in range(requests):
        if random_numbers.random() < one_shot:
            start = random_numbers.choices(prompts, popularity)[0]
            yield start + [block_key(3, next(fresh)) for _ in range(random_numbers.randint(8, 64))]
            continue
        time, number = heapq.heappop(due)
        keys, turns, pace = live[number]
        keys.extend(block_key(4, next(fresh)) for _ in range(random_numbers.randint(2, 16)))
        yield list(keys)
        live[number] = (keys, turns - 1, pace) if turns > 1 else session()
        heapq.heappush(due, (time + random_numbers.expovariate(live[number][2]), number))


def hit_rate(policy: Policy, requests: Iterator[Keys], warm: int) -> float:
    """Return the share of blocks found before a request's first miss. The first ``warm`` requests are not counted."""
    hits = asked = 0
    for number, keys in enumerate(requests):
        found = policy.get(keys)
        first = next((place for place, there in enumerate(found) if not there), len(keys))
        policy.put(keys[first:])
        if number >= warm:
            hits += first
            asked += len(keys)
    return hits / asked


def traces(requests: int) -> dict[str, tuple[int, Callable[[], Iterator[Keys]]]]:
    """Return the slots and the requests of each trace, by name."""
    found: dict[str, tuple[int, Callable[[], Iterator[Keys]]]] = {}
    keys = max(requests // 5, 100)
    for share in (0.02, 0.1):
        for exponent in (0.8, 1.0):
            found[f"Zipf {exponent}, {share:.0%} kept"] = (int(keys * share), lambda e=exponent: zipf(requests, keys, e))  # type: ignore[misc]
        found[f"Zipf 1.0 and scans, {share:.0%} kept"] = (
            int(keys * share),
            lambda s=int(keys * share): zipf(requests, keys, 1.0, 2 * s),  # type: ignore[misc]
        )
    sessions = max(requests // 500, 4)
    for slots in (sessions * 30, sessions * 100, sessions * 200):
        for one_shot in (0.0, 0.5):
            name = f"agents, {slots // sessions} blocks each" + (", half never again" if one_shot else "")
            found[name] = (slots, lambda share=one_shot: agents(requests // 20, sessions, share))  # type: ignore[misc]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on a drive")
    parser.add_argument("--requests", type=int, default=200_000, help="requests of a trace (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the hit rates")
    options = parser.parse_args(arguments)
    in_memory: dict[str, Callable[[int], Policy]] = {"LRU": LRU, "LFU": LFU, "ARC": ARC}
    print(f"{'hit rate, %':40}", *(f"{name:>11}" for name in ("BlockStore", *in_memory)), "  below the best")
    rates: dict[str, dict[str, float]] = {}
    options.dir.mkdir(parents=True, exist_ok=True)
    for name, (slots, requests) in traces(options.requests).items():
        warm = sum(1 for _ in requests()) // 5
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            store = Store(Path(folder), slots)
            rates[name] = {"BlockStore": 100 * hit_rate(store, requests(), warm)}
            store.store.close()
        rates[name].update({each: 100 * hit_rate(make(slots), requests(), warm) for each, make in in_memory.items()})
        below = max(rates[name].values()) - rates[name]["BlockStore"]
        print(f"{name:40}", *(f"{rate:11.1f}" for rate in rates[name].values()), f"{below:16.1f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
