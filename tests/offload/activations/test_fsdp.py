"""FSDP2 in two processes that both save activations on a drive: losses, gradients and weights are the same bits as in memory."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ...support.interpreters import Interpreters
from ...support.torch_versions import fsdp_on_cpu
from ...support.two_ranks import run_two

pytestmark = pytest.mark.slow

SETUP = """
import torch.nn.functional as F
from pathlib import Path
from torch.utils.checkpoint import checkpoint

from deepnvme.offload import save_on_disk

KIB = 1 << 10
WIDTH = 62
path = Path(drive, "activations")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH + 1)  # rows that two ranks cannot share evenly
        self.narrow = torch.nn.Linear(4 * WIDTH + 1, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norms[1](x)))))


class GPT(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.embedding = torch.nn.Embedding(101, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, 101, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def gpt(checkpointed=False, **options):
    torch.manual_seed(0)
    model = GPT(checkpointed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model, batch):
    tokens = torch.randint(101, (2, 65), generator=torch.Generator().manual_seed(2 * batch + rank))
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def trained(model, context, batches=1):
    # The losses of this rank, and its gradients and weights after each step, which takes so many batches.
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    torch.manual_seed(3 + rank)
    found = []
    for step in range(3):
        for batch in range(batches):
            model.set_requires_gradient_sync(batch == batches - 1)
            with context:
                loss = loss_of(model, step * batches + batch)
            loss.backward()
            found.append(loss.detach())
        found += [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [param.to_local().detach().clone() for param in model.parameters()]
    return found


def assert_same_bits(ours, theirs):
    different = [index for index, (one, other) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(one, other)]
    assert not different, f"rank {rank}: {different} of {len(ours)} differ"


def on_disk(memory_budget=256 * KIB):
    # With memory for an eighth of what a step saves.
    return contextlib.closing(save_on_disk(path, memory_budget=memory_budget, min_bytes=KIB))


def assert_was_on_disk(activations):
    report = activations.report()
    assert report.bytes_written > 0 and report.bytes_read > 0, report.line()
"""
"""A GPT, its blocks sharded, and its training."""


def run_ranks(program: str, drive: Path, interpreters: Interpreters) -> None:
    """Run ``program`` as both ranks, with what ``SETUP`` and the prelude of two ranks define."""
    run_two(SETUP + textwrap.dedent(program), drive, interpreters)


@fsdp_on_cpu
def test_losses_gradients_and_weights_are_the_same_bits(drive: Path, interpreters: Interpreters) -> None:
    run_ranks(
        """
        half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        for options, batches in (({}, 1), (half, 1), ({"reshard_after_forward": False, **half}, 1), ({}, 2)):
            with on_disk() as activations:
                ours, theirs = (trained(gpt(**options), each, batches) for each in (activations, contextlib.nullcontext()))
                assert_same_bits(ours, theirs)
                assert_was_on_disk(activations)
        """,
        drive,
        interpreters,
    )


@fsdp_on_cpu
def test_checkpointed_blocks_are_the_same_bits(drive: Path, interpreters: Interpreters) -> None:
    run_ranks(
        """
        for options in ({"reshard_after_forward": True}, {"reshard_after_forward": False}):
            theirs = trained(gpt(**options), contextlib.nullcontext())
            with on_disk(memory_budget=0) as activations:
                assert_same_bits(trained(gpt(checkpointed=True, **options), activations), theirs)
                assert_was_on_disk(activations)
        """,
        drive,
        interpreters,
    )


@fsdp_on_cpu
def test_gathered_weights_are_not_saved(drive: Path, interpreters: Interpreters) -> None:
    run_ranks(
        """
        with on_disk() as activations:
            saved = []
            for model in (GPT(False), gpt(reshard_after_forward=True), gpt(reshard_after_forward=False)):
                with activations:
                    loss = loss_of(model, 0)
                saved.append(activations.report().saved_bytes)
                loss.backward()
            assert saved[0] > 0 and saved == 3 * saved[:1], saved
        """,
        drive,
        interpreters,
    )
