"""Models with tiled layers in torch.compile: the graph breaks where it has to, and the results are those of the uncompiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepnvme.offload import tile_large_layers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch's own
]


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(400, 32), nn.Linear(32, 400, bias=False)
        self.wide, self.narrow = nn.Linear(32, 288), nn.Linear(288, 32)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.narrow(nn.functional.gelu(self.wide(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("tied", [False, True])
def test_a_compiled_model_with_tiled_layers_trains_as_uncompiled(tied: bool) -> None:
    torch.manual_seed(0)
    model = Model(tied)
    assert len(tile_large_layers(model, 96 * 32 * 4)) == 4
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        ids = torch.randint(0, 400, (4, 9), generator=torch.Generator().manual_seed(step))
        found, expected = compiled(ids), reference(ids)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
        for name, param in reference.named_parameters():
            ours = model.get_parameter(name)
            torch.testing.assert_close(ours.grad, param.grad)
            with torch.no_grad():
                for each in (ours, param):
                    assert each.grad is not None
                    each -= 0.1 * each.grad
                    each.grad = None
    torch._dynamo.reset()


def test_a_compiled_tiled_embedding_looks_up_any_number_of_rows() -> None:
    model = nn.Sequential(nn.Embedding(400, 8))
    tile_large_layers(model, 150 * 8 * 4)
    layer = model[0]
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for step in range(4):
        ids = torch.randint(0, 100 * (step + 1), (3, step + 2), generator=torch.Generator().manual_seed(step))
        assert torch.equal(compiled(ids), layer(ids))
    with pytest.raises(IndexError):
        compiled(torch.tensor([400]))
    torch._dynamo.reset()
