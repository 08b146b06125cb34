"""OffloadedTraining in several processes takes over a training by FSDP2, and gives it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.interpreters import Interpreters
from ...support.torch_versions import fsdp_on_cpu
from ...support.training_ranks import run

pytestmark = [pytest.mark.slow, fsdp_on_cpu]

FSDP = """
import functools
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))


class Uneven(Model):
    # With rows that the ranks cannot share evenly, and a parameter that only the first rank has.
    def __init__(self, seed=0):
        super().__init__(seed, layers=2)
        for layer in self.layers:
            layer.wide, layer.narrow = torch.nn.Linear(WIDTH, 41), torch.nn.Linear(41, WIDTH)
            layer.gate = torch.nn.Linear(WIDTH, 1)
            layer.register_forward_hook(lambda layer, inputs, output: output * layer.gate(inputs[0]).sigmoid())


def sharded(model):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(seed=0):
    model = sharded(Uneven(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_fsdp(model, optimizer, steps):
    for step in steps:
        loss = model(batches(step)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def on_meta():
    with torch.device("meta"):
        model = Uneven()
    for layer in model.layers:
        layer.calls = torch.zeros(())  # which no module resets
    return model


def assert_same_shards(found, expected, compare=torch.equal):
    # compare: torch.equal, or what raises
    for name, value in expected.items():
        if name.endswith("calls"):
            continue
        assert hasattr(value, "to_local") and found[name].placements == value.placements, name
        assert compare(found[name].to_local(), value.to_local()) in (True, None), name


def assert_same_optimizers(found, expected, compare=torch.equal):
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys()
        assert_same_shards(found[name], {key: value for key, value in state.items() if key != "step"}, compare)
        assert found[name]["step"] == state["step"]


# The gradients of more than 2 ranks may be summed in another order by FSDP2.
within = {"rtol": 0, "atol": 0} if ranks == 2 else {"rtol": 1e-3, "atol": 1e-5}
alike = functools.partial(torch.testing.assert_close, **within)


def refused(said, function):
    try:
        function()
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError("taken")
"""


@pytest.mark.parametrize("count", [2, 4])
def test_a_training_goes_from_fsdp2_to_the_drive_and_back(count: int, drive: Path, interpreters: Interpreters) -> None:
    run(
        count,
        FSDP
        + """
model, optimizer = fsdp()
list(train_fsdp(model, optimizer, range(2)))

training = trained(on_meta())
state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "steps": 2}
training.load_state_dict(state)
assert training.steps == 2
assert_same_optimizers(training.state_dict()["optimizer"]["state"], state["optimizer"]["state"])
assert_same_shards(training.state_dict()["model"], state["model"])
losses, expected = list(train(training, range(2, 4))), list(train_fsdp(model, optimizer, range(2, 4)))
alike(torch.tensor(losses), torch.tensor(expected))
assert_same_shards(training.state_dict()["model"], model.state_dict(), alike)
assert_same_optimizers(
    training.state_dict()["optimizer"]["state"], get_optimizer_state_dict(model, optimizer)["state"], alike
)

# And back.
state = training.state_dict()
model, optimizer = fsdp(seed=1)
set_model_state_dict(model, state["model"])
set_optimizer_state_dict(model, optimizer, state["optimizer"])
assert_same_shards(model.state_dict(), state["model"])
assert_same_optimizers(get_optimizer_state_dict(model, optimizer)["state"], state["optimizer"]["state"])
expected, losses = list(train_fsdp(model, optimizer, [4, 5])), list(train(training, [4, 5]))
alike(torch.tensor(losses), torch.tensor(expected))
assert_same_shards(training.state_dict()["model"], model.state_dict(), alike)

# What torch.distributed.checkpoint saves is loaded by half as many ranks.
state = training.state_dict()
dcp.save({"training": state}, checkpoint_id=drive / "saved")
half = dist.new_group(range(ranks // 2))
if rank < ranks // 2:
    training.close()
    with trained(Uneven(seed=2), process_group=half) as fewer:
        list(train(fewer, [0]))  # so that there are states to be loaded into
        target = fewer.state_dict()
        dcp.load({"training": target}, checkpoint_id=drive / "saved", process_group=half)
        fewer.load_state_dict({**target, "steps": 6})
        fewer.save(drive / "fewer.pt")
dist.barrier()
loaded = torch.load(drive / "fewer.pt", mmap=True)
for found in state, loaded:
    for name in [name for name in found["model"] if name.endswith("calls")]:
        del found["model"][name]
assert_same_states(state, loaded)
""",
        drive=drive,
        interpreters=interpreters,
    )


def test_other_dtensors_are_refused_on_all_ranks(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        FSDP
        + """
model, optimizer = fsdp()
list(train_fsdp(model, optimizer, range(2)))
remedy = "give its load_state_dict() the states of the model and its optimizer"
refused(remedy, lambda: trained(model))
fits = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "steps": 2}

def placed(state, *placements, name="layers.1.wide.weight"):
    return {**state, name: state[name].redistribute(placements=placements)}

training = trained(on_meta())
for placement in Replicate(), Shard(1):
    for name in "layers.1.wide.weight", "embedding.weight":
        other = placed(fits["model"], placement, name=name)
        said = f"{name} is a DTensor with the placement ({placement}) over the processes [0, 1]: it has to be Shard(0)"
        refused(said, lambda: training.load_state_dict({**fits, "model": other}))

# over other processes
alone = dist.device_mesh.DeviceMesh.from_group([dist.new_group([each]) for each in range(ranks)][rank], "cpu")
other = {**fits["model"], "layers.1.wide.weight": distribute_tensor(torch.zeros(41, WIDTH), alone, [Shard(0)])}
refused(f"over the processes [{rank}]", lambda: training.load_state_dict({**fits, "model": other}))

# on one rank
whole = {name: value.full_tensor() for name, value in fits["model"].items() if hasattr(value, "to_local")}
other = {**fits["model"], **whole} if rank else fits["model"]
refused("are not the same on all ranks", lambda: training.load_state_dict({**fits, "model": other}))

# nothing was changed by all that
training.load_state_dict(fits)
assert_same_shards(training.state_dict()["model"], model.state_dict())
training.close()
""",
        drive=drive,
        interpreters=interpreters,
    )
