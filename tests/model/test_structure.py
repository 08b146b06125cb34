"""Which weights are needed together."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from deepnvme.model.structure import (
    UNBLOCKED_EXTENT,
    ModelBlock,
    Structure,
    find_ties,
    structure_of,
    structure_of_names,
    weights_by_name,
)

WIDE = 1024
"""A square of these is 4 MiB: worth reading again."""


class Layer(nn.Module):
    def __init__(self, size: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.attention = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)
        self.experts = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(experts))


class Model(nn.Module):
    """As most are: an embedding, layers, a norm, a head."""

    def __init__(self, tied: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDE, WIDE)
        self.layers = nn.ModuleList(Layer(experts=experts) for _ in range(3))
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, WIDE, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


def names(model: nn.Module, blocks: list[str] | None = None) -> list[str]:
    return [block.name for block in structure_of(model, blocks).blocks]


def layer(index: int) -> list[str]:
    return [f"layers.{index}.{name}" for name in ("attention.weight", "attention.bias", "norm.weight", "norm.bias")]


def test_layers_and_what_is_large_beside_them_are_blocks():
    structure = structure_of(Model())
    assert structure.blocks == (
        ModelBlock("embed", ("embed.weight",)),
        *(ModelBlock(f"layers.{index}", tuple(layer(index))) for index in range(3)),
        ModelBlock("head", ("head.weight",)),
    )
    assert structure.rest == ("norm.weight", "norm.bias")
    assert structure.ties == {}


def test_of_lists_in_lists_the_outer_one_has_the_blocks():
    assert names(Model(experts=2)) == ["embed", "layers.0", "layers.1", "layers.2", "head"]


def test_a_pattern_names_blocks_within_blocks():
    blocks = {block.name: block.weights for block in structure_of(Model(experts=2), ["layers.*.experts.*"]).blocks}
    assert blocks["layers.1"] == tuple(layer(1))
    assert blocks["layers.1.experts.1"] == ("layers.1.experts.1.weight",)
    assert list(blocks)[1:4] == ["layers.0", "layers.0.experts.0", "layers.0.experts.1"]


def test_a_star_stands_for_one_part_of_a_name():
    assert names(Model(), ["layers.*"]) == names(Model())
    assert names(Model(), ["layers.[01].attention"])[1:5] == ["layers.0", "layers.0.attention", "layers.1", "layers.1.attention"]


def test_what_is_named_is_a_block_however_small():
    assert "norm" in names(Model(), ["norm"])


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        ("layer.*", "'layer.*' is no module that has weights; there is 'layers\\.2', "),
        ("layers.7", "no module that has weights"),
        ("layers", re.escape("is a ModuleList, whose forward nobody calls: name what is in it, 'layers.*'")),
        ("nonesuch", "'nonesuch' is no module"),
    ],
)
def test_a_name_that_cannot_be_a_block(pattern, match):
    with pytest.raises(ValueError, match=match):
        structure_of(Model(), [pattern])


def test_a_weight_that_two_blocks_have_is_an_extent_of_its_own():
    structure = structure_of(Model(tied=True))
    assert structure.ties == {"head.weight": "embed.weight"}
    assert [block.weights for block in structure.blocks if block.name in ("embed", "head")] == [("embed.weight",)] * 2
    assert [extent.name for extent in structure.extents()] == [
        UNBLOCKED_EXTENT,
        "embed.weight",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    assert structure.needs()["embed"] == structure.needs()["head"] == ("embed.weight",)


def test_blocks_that_share_some_weights_need_two_extents():
    model = nn.ModuleList(Layer() for _ in range(3))
    model[2].attention.weight = model[0].attention.weight
    structure = structure_of(model)
    assert {extent.name: len(extent.weights) for extent in structure.extents()} == {
        "0.attention.weight": 1, "0": 3, "1": 4, "2": 3,
    }  # fmt: skip
    assert structure.needs() == {"0": ("0.attention.weight", "0"), "1": ("1",), "2": ("0.attention.weight", "2")}


def test_a_module_in_several_places_is_one_block():
    shared = Layer()
    structure = structure_of(nn.ModuleList([shared, Layer(), shared]))
    assert [block.name for block in structure.blocks] == ["0", "1"]
    assert structure.ties == {f"2.{name}": f"0.{name}" for name, _ in shared.named_parameters()}


def test_a_module_shared_by_blocks_is_needed_by_both():
    model = nn.ModuleList(Layer() for _ in range(2))
    model[1].norm = model[0].norm
    assert structure_of(model).needs() == {"0": ("0", "0.norm.weight"), "1": ("1", "0.norm.weight")}


def test_a_weight_that_the_rest_has_too_is_there_only():
    model = Model()
    model.again = model.layers[1].attention.weight
    structure = structure_of(model)
    assert structure.extents()[0].weights[0] == "again"
    assert "again" not in structure.extents()[3].weights
    assert structure.ties["layers.1.attention.weight"] == "again"
    model.layers[1] = model.layers[1].attention  # with nothing left but what the rest has, and its bias
    assert structure_of(model).needs()["layers.1"] == ("layers.1",)


def test_a_block_with_nothing_of_its_own_needs_no_extent():
    model = Model()
    model.first, model.second = model.layers[0].norm.weight, model.layers[0].norm.bias
    model.layers[0] = model.layers[0].norm
    assert "layers.0" not in structure_of(model).needs()


def test_parameters_beside_a_list_do_not_make_the_whole_a_block():
    model = Model()
    model.token = nn.Parameter(torch.empty(1, 8))
    assert names(model) == names(Model())
    assert "token" in structure_of(model).rest
    model.large = nn.Parameter(torch.empty(WIDE, WIDE))
    assert structure_of(model).blocks[0] == ModelBlock("", ("token", "large"))


def test_parameter_lists_belong_to_the_module_around_them():
    model = Model()
    model.prompts = nn.ParameterDict({"a": nn.Parameter(torch.empty(WIDE, WIDE))})
    model.layers[1].scales = nn.ParameterList([nn.Parameter(torch.empty(2))])
    blocks = dict(structure_of(model).blocks)
    assert blocks[""] == ("prompts.a",)
    assert "layers.1.scales.0" in blocks["layers.1"]


def test_a_module_with_weights_of_its_own_is_a_block_with_all_in_it():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDE, 4)  # which uses the weight of its out_proj itself
            self.unlike = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.LayerNorm(4))

    assert names(Around()) == ["attention", "unlike.0"]
    assert names(nn.Linear(WIDE, WIDE)) == [""]


def test_a_sequential_of_one_kind_is_a_list():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))) == ["0", "2", "3"]


def test_lists_without_a_forward_are_looked_into():
    model = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer()]), nn.ModuleList([nn.Linear(WIDE, WIDE)])])
    assert names(model) == ["0.0", "0.1", "2.0"]


def test_buffers_stay_in_memory_and_those_that_are_not_saved_are_nobody_s():
    model = Model()
    model.layers[0].register_buffer("kept", torch.empty(3))
    model.layers[0].register_buffer("made", torch.empty(3), persistent=False)
    assert structure_of(model).rest == ("norm.weight", "norm.bias", "layers.0.kept")
    assert list(weights_by_name(model)) == list(model.state_dict())


def test_ties_are_found_by_identity():
    weight = torch.empty(3)
    assert find_ties({"a": weight, "b": weight.clone(), "c": weight, "d": weight}) == {"c": "a", "d": "a"}


def test_a_model_without_weights_has_no_extents():
    assert structure_of(nn.ReLU()).extents() == []
    assert Structure((), (), {}).needs() == {}


@pytest.mark.parametrize("experts", [0, 2])
def test_names_alone_say_the_same(experts):
    model = Model(tied=True, experts=experts)
    sizes = {name: weight.nbytes for name, weight in weights_by_name(model).items()}
    assert structure_of_names(sizes, {"head.weight": "embed.weight"}) == structure_of(model)


def test_blocks_of_names_can_be_named():
    sizes = dict.fromkeys(["layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight", "other.weight"], 8)
    found = structure_of_names(sizes, {}, ["layers.*.b"])
    assert [block.name for block in found.blocks] == ["layers.0", "layers.0.b", "layers.1"]
    with pytest.raises(ValueError, match=r"'layers\.2' is no module"):
        structure_of_names(sizes, {}, ["layers.2"])


def test_one_number_is_no_list():
    assert structure_of_names({"net.0.weight": 8, "top": 8}, {}).blocks == ()
