"""Lightning saves and resumes through NVMeCheckpointIO: whole files, the same rotation, the same bits."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.checkpoint import background, publication
from deepnvme.checkpoint.background import wait_for_saves
from deepnvme.integrations.lightning import NVMeCheckpointIO

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

from ..support.interpreters import REPOSITORY
from ..support.patience import PATIENCE

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


class Regression(lightning.LightningModule):
    """A layer and dropout, so that a resumed training needs the optimizer's states; its losses are kept."""

    def __init__(self, offloaded: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(16, 1)
        self.offloaded = offloaded
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), wanted)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.offloaded is None:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return deepnvme.OffloadedOptimizer(self.parameters(), torch.optim.AdamW, path=self.offloaded, lr=1e-2)


def loader() -> Any:
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)


def trainer_of(drive: Path, epochs: int, io: NVMeCheckpointIO | None = None, **rotation: Any) -> lightning.Trainer:
    kept = ModelCheckpoint(drive / "checkpoints", filename="{epoch}", **{"save_top_k": -1, **rotation})
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, callbacks=[kept], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=drive, plugins=[] if io is None else [io],
    )  # fmt: skip


def names(drive: Path) -> list[str]:
    return sorted(each.name for each in (drive / "checkpoints").iterdir())


def test_the_error_of_a_background_save_is_raised_at_the_end(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise OSError(5, "Input/output error", "drive")

    monkeypatch.setattr(publication.Publication, "publish", fail)
    with pytest.raises(OSError, match="Input/output error"):
        trainer_of(drive, 1, NVMeCheckpointIO()).fit(Regression(), loader())
    assert names(drive) == []
    background.raise_unseen()  # it was raised once


def test_the_error_of_a_background_save_is_raised_by_the_next_one(drive: Path) -> None:
    io = NVMeCheckpointIO()
    (drive / "a.ckpt").mkdir()
    io.save_checkpoint({}, drive / "a.ckpt")
    wait_for_saves(drive / "a.ckpt")
    with pytest.raises(IsADirectoryError):
        io.save_checkpoint({}, drive / "b.ckpt")
    io.save_checkpoint({}, drive / "b.ckpt")
    io.teardown()
    assert deepnvme.load(drive / "b.ckpt") == {}


def test_a_failed_save_keeps_the_checkpoint_that_it_would_have_replaced(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = NVMeCheckpointIO()
    io.save_checkpoint({"epoch": 0}, drive / "old.ckpt")
    io.teardown()

    def fail(self: Any) -> None:
        raise OSError(28, "No space left on device", "drive")

    with monkeypatch.context() as patch:
        patch.setattr(publication.Publication, "publish", fail)
        io.save_checkpoint({"epoch": 1}, drive / "new.ckpt")
        io.remove_checkpoint(drive / "old.ckpt")
        with pytest.raises(OSError, match="No space left"):
            io.teardown()
    assert [each.name for each in drive.iterdir()] == ["old.ckpt"]


def test_a_checkpoint_is_not_removed_before_the_next_one_is_whole(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, seen = NVMeCheckpointIO(), []
    io.save_checkpoint({"epoch": 0}, drive / "old.ckpt")
    publish = publication.Publication.publish

    def look(self: Any) -> None:
        while io._removals is None or not io._removals._paths:  # until remove_checkpoint was called
            time.sleep(0.001)
        seen.append((drive / "old.ckpt").exists())
        publish(self)

    io.teardown()
    monkeypatch.setattr(publication.Publication, "publish", look)
    io._removals = None
    io.save_checkpoint({"epoch": 1}, drive / "new.ckpt")
    io.remove_checkpoint(drive / "old.ckpt")
    io.teardown()
    assert seen == [True]
    assert [each.name for each in drive.iterdir()] == ["new.ckpt"]


def test_paths_and_options_that_it_cannot_serve_are_refused(drive: Path) -> None:
    io = NVMeCheckpointIO()
    with pytest.raises(TypeError, match="takes no storage_options"):
        io.save_checkpoint({}, drive / "a.ckpt", storage_options={})
    with pytest.raises(ValueError, match="local file systems"):
        io.save_checkpoint({}, "s3://bucket/a.ckpt")
    (drive / "last.ckpt").symlink_to("a.ckpt")
    with pytest.raises(ValueError, match="symbolic link"):
        io.save_checkpoint({}, drive / "last.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(drive / "a.ckpt")
    assert pickle.loads(pickle.dumps(io))._removals is None


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "rotation",
    [{"save_top_k": 1}, {"save_top_k": 2, "monitor": "loss", "save_last": True}, {"save_top_k": 1, "save_last": "link"}],
)
def test_the_same_checkpoints_are_left_as_with_lightnings_own(drive: Path, asynchronous: bool, rotation: dict[str, Any]) -> None:
    trainer_of(drive / "known", 4, **rotation).fit(Regression(), loader())
    trainer_of(drive / "ours", 4, NVMeCheckpointIO(asynchronous), **rotation).fit(Regression(), loader())
    assert names(drive / "ours") == names(drive / "known")
    for name in names(drive / "ours"):
        theirs, ours = (torch.load(drive / each / "checkpoints" / name) for each in ("known", "ours"))
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=0, atol=0)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(drive: Path, offloaded: bool) -> None:
    whole = Regression()
    trainer_of(drive / "known", 4).fit(whole, loader())
    begun = Regression(drive / "states" if offloaded else None)
    trainer_of(drive, 2, NVMeCheckpointIO()).fit(begun, loader())
    resumed = Regression(drive / "more states" if offloaded else None)
    checkpoint = drive / "checkpoints" / "epoch=1.ckpt"
    trainer_of(drive, 4, NVMeCheckpointIO()).fit(resumed, loader(), ckpt_path=checkpoint)
    assert begun.losses + resumed.losses == whole.losses


PROGRAM = """
import sys, torch
from pathlib import Path
from deepnvme.integrations.lightning import NVMeCheckpointIO
io, directory, step = NVMeCheckpointIO(fsync=False), Path(sys.argv[1]), int(sys.argv[2])
print("begun", flush=True)
while True:
    step += 1
    io.save_checkpoint({"step": step, "values": torch.full((1 << 20,), float(step))}, directory / f"{step}.ckpt")
    io.remove_checkpoint(directory / f"{step - 1}.ckpt")
"""


@pytest.mark.slow
def test_checkpoints_are_whole_and_there_is_one_after_each_kill(drive: Path) -> None:
    step, generator = 0, random.Random(4)
    for _ in range(3):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(drive), str(step)], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        process.stdout.readline()
        before = step
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not any(drive.glob("*.ckpt")):
            time.sleep(0.01)
        time.sleep(generator.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = sorted(int(each.stem) for each in drive.glob("*.ckpt"))
        assert found, f"nothing is left after step {before}"
        for each in found:
            state = deepnvme.load(drive / f"{each}.ckpt", checksum=True)
            assert state["step"] == each
            assert bool((state["values"] == each).all())
        step = found[-1]
