"""Arguments are taken by their former names and as fields of advanced options; misspelt ones are named."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.memory import BufferPool
from deepnvme.offload import OptimizerOptions, TrainingOptions


def test_former_names_mean_the_present_ones(drive: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    given = {"nvme_path": drive, "dram_budget": "1MB", "config": deepnvme.AioConfig(queue_depth=3)}
    with deepnvme.OffloadedOptimizer([parameter], torch.optim.AdamW, **given) as optimizer:  # type: ignore[arg-type]
        parameter.sum().backward()
        optimizer.step()
        assert optimizer.report().resident_bytes > 0


def test_both_names_at_once_are_refused(drive: Path) -> None:
    config = deepnvme.AioConfig()
    with pytest.raises(TypeError, match="config is the former name of aio_config: give only aio_config"):
        deepnvme.save({}, drive / "file", config=config, aio_config=config)  # type: ignore[call-arg]


def test_signatures_show_the_present_names_only() -> None:
    assert "config" not in inspect.signature(deepnvme.save).parameters
    assert "aio_config" in inspect.signature(deepnvme.save).parameters
    for kind, options in ((deepnvme.OffloadedOptimizer, OptimizerOptions), (deepnvme.OffloadedTraining, TrainingOptions)):
        assert not inspect.signature(options).parameters.keys() & inspect.signature(kind).parameters.keys()


@pytest.mark.parametrize("given", [{"sub_group_size": 4096}, {"advanced": OptimizerOptions(sub_group_size=4096)}])
def test_rare_options_are_given_as_keyword_arguments_or_in_advanced(drive: Path, given: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3 * 4096))
    with deepnvme.OffloadedOptimizer([parameter], torch.optim.AdamW, path=drive, **given) as optimizer:
        parameter.sum().backward()
        optimizer.step()
        assert optimizer.report().sub_groups == 3


def test_a_keyword_argument_counts_more_than_the_field_and_leaves_the_others(drive: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3 * 4096))
    advanced = OptimizerOptions(sub_group_size=4096, pool=BufferPool("64MiB"))
    options = {"advanced": advanced, "sub_group_size": 1 << 20}
    with deepnvme.OffloadedOptimizer([parameter], torch.optim.AdamW, path=drive, **options) as optimizer:  # type: ignore[arg-type]
        parameter.sum().backward()
        optimizer.step()
        assert optimizer.report().sub_groups == 1
        assert advanced.pool is not None
        assert advanced.pool.in_use > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dram_buget": 1}, r"OffloadedOptimizer does not know dram_buget; did you mean 'memory_budget'\?"),
        ({"sub_groupsize": 1}, r"does not know sub_groupsize; did you mean 'sub_group_size'\?"),
        ({"wieght_decay": 1}, r"does not know wieght_decay; did you mean 'weight_decay'\?"),
        ({"qqq": 1, "betass": 1}, r"know betass, qqq: neither it nor AdamW has such an option; did you mean 'betas'\?"),
    ],
)
def test_a_misspelt_option_is_named_with_what_was_meant(drive: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        deepnvme.OffloadedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.AdamW, path=drive / "new", **options)
    assert not (drive / "new").exists()


@pytest.mark.parametrize("advanced", [{"checksum": True}, TrainingOptions(), OptimizerOptions])
def test_advanced_options_of_a_wrong_class_are_refused(drive: Path, advanced: Any) -> None:
    for more in ({}, {"sub_group_size": 1}):
        with pytest.raises(TypeError, match=r"advanced must be OptimizerOptions\(\.\.\.\), got"):
            deepnvme.OffloadedOptimizer(
                [torch.nn.Parameter(torch.ones(3))], torch.optim.AdamW, path=drive, advanced=advanced, **more
            )


def test_a_misspelt_option_of_a_training_or_an_embedding_is_named(drive: Path) -> None:
    with pytest.raises(TypeError, match=r"OffloadedTraining does not know memory_buget; did you mean 'memory_budget'\?"):
        deepnvme.OffloadedTraining(torch.nn.Linear(2, 2), torch.optim.AdamW, path=drive, memory_buget=1)
    with pytest.raises(TypeError, match=r"EmbeddingOnDisk does not know memory_buget; did you mean 'memory_budget'\?"):
        deepnvme.nn.EmbeddingOnDisk(3, 2, path=drive, memory_buget=1)  # type: ignore[call-arg]


def test_an_optimizer_that_takes_any_option_gets_it(drive: Path) -> None:
    class Permissive(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=options["my_rate"])

    parameter = torch.nn.Parameter(torch.ones(3))
    with deepnvme.OffloadedOptimizer([parameter], Permissive, path=drive, my_rate=0.5) as optimizer:
        parameter.sum().backward()
        optimizer.step()
    assert parameter.tolist() == [0.5] * 3
