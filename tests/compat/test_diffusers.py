"""diffusers' group offloading to the disk, with the CPU as the device: its files are read and written through the engine."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepnvme.checkpoint import safetensors_files
from deepnvme.integrations import safetensors as integration

from . import serving


@pytest.fixture(scope="module")
def diffusers(request: pytest.FixtureRequest) -> SimpleNamespace:
    return serving.diffusers(request.config)


def unet(diffusers: SimpleNamespace) -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("offloading", [{"num_blocks_per_group": 1}, {"offload_type": "leaf_level"}])
def test_a_model_offloaded_in_groups_reads_them_through_the_engine(
    diffusers: SimpleNamespace, drive: Path, offloading: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    load_elements = safetensors_files.load_elements

    def noting(path: str, *arguments: Any) -> Any:
        read.add(Path(path).name)
        return load_elements(path, *arguments)

    monkeypatch.setattr(integration, "load_elements", noting)
    sample, step = torch.randn(1, 3, 8, 8), torch.tensor(3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = unet(diffusers)(sample, step).sample
        model = unet(diffusers)
        diffusers.apply_group_offloading(model, onload_device="cpu", offload_to_disk_path=str(drive), **offloading)
        with integration.enabled():
            found = [model(sample, step).sample for _ in range(2)]
    assert all(torch.equal(each, wanted) for each in found)
    assert read == {each.name for each in drive.iterdir()}
    assert read
