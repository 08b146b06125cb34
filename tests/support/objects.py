"""What people save: an example of each kind, and what makes a loaded one the same."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from deepnvme.memory.tensor_bytes import flat_bytes


@dataclasses.dataclass
class Settings:
    width: int
    rate: float
    weight: torch.Tensor


class Named(torch.Tensor):
    """A subclass without state of its own."""


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 7, bias=False))
    model.register_buffer("steps", torch.tensor(3))
    return model


def _tied() -> dict[str, torch.Tensor]:
    model = torch.nn.Module()
    model.encoder = torch.nn.Embedding(11, 4)
    model.decoder = torch.nn.Linear(4, 11, bias=False)
    model.decoder.weight = model.encoder.weight
    return model.state_dict()


def _optimizer() -> dict[str, Any]:
    """As AdamW's state_dict is made."""
    weights = _model().state_dict()
    state = {
        index: {"step": torch.tensor(1.0), "exp_avg": weight * 0.1, "exp_avg_sq": weight * weight}
        for index, weight in enumerate(weights.values())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": list(state)}
    return {"model": weights, "optimizer": {"state": state, "param_groups": [group]}, "epoch": 3}


def _with_attributes() -> torch.Tensor:
    tensor = torch.arange(5.0)
    tensor.origin = "here"  # type: ignore[attr-defined]
    return tensor


def _quantized(per_channel: bool) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        if per_channel:
            return torch.quantize_per_channel(torch.randn(3, 4), torch.ones(3) / 9, torch.zeros(3), 0, torch.qint8)
        return torch.quantize_per_tensor(torch.linspace(0, 1, 9), 0.1, 3, torch.quint8)


def _views() -> list[torch.Tensor]:
    whole = torch.arange(1000.0)
    return [whole[10:20], whole[::7], whole.view(10, 100).t(), whole[500], whole[3:3]]


def _shared_storages() -> dict[str, Any]:
    tensor = torch.arange(12.0)
    return {"a": tensor, "again": tensor, "matrix": tensor.view(3, 4)}


def _typed_storage() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.arange(6.0).storage()


def _parameters() -> list[torch.Tensor]:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    return [torch.nn.Parameter(torch.ones(2, 2)), frozen, torch.ones(2, requires_grad=True), torch.nn.Buffer(torch.ones(2))]


def _ordered() -> OrderedDict[str, Any]:
    ordered: OrderedDict[str, Any] = OrderedDict(b=torch.ones(2), a=OrderedDict())
    ordered.note = "kept"  # type: ignore[attr-defined]
    return ordered


def _sparse() -> list[torch.Tensor]:
    dense = torch.eye(4) * torch.arange(4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that CSR is in beta
        return [dense.to_sparse(), dense.to_sparse_csr()]


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        return torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)])


_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex128,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip

OBJECTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no tensors": lambda: {"epoch": 3, "name": "né", "loss": [1.5, None, (True, b"bytes")], "huge": 1 << 100},
    "a tensor": lambda: torch.arange(10.0),
    "0-d and empty tensors": lambda: [torch.tensor(1.5), torch.empty(0), torch.empty(3, 0, 2), torch.tensor(7)],
    "every dtype": lambda: {str(dtype): torch.arange(9).to(dtype) for dtype in _DTYPES},
    "views": _views,
    "an expanded tensor": lambda: torch.ones(1, 3).expand(1000, 3),
    "shared storages": _shared_storages,
    "tied weights": _tied,
    "parameters": _parameters,
    "a state_dict": lambda: _model().state_dict(),
    "a module": _model,
    "an optimizer": _optimizer,
    "large among small": lambda: [torch.arange(size) for size in (1, 70_000, 3, 600_000, 0, 65_536, 9)],
    "a slice of a large storage": lambda: torch.arange(300_000)[5:7],
    "quantised": lambda: _quantized(False),
    "quantised per channel": lambda: _quantized(True),
    "sparse": _sparse,
    "conjugate and negative views": lambda: [torch.randn(4, dtype=torch.complex64).conj(),
                                             torch.randn(4, dtype=torch.complex64).conj().imag],
    "nested": _nested,
    "with attributes": _with_attributes,
    "a subclass": lambda: torch.arange(5.0).as_subclass(Named),
    "an untyped storage": lambda: torch.arange(5).untyped_storage(),
    "a typed storage": _typed_storage,
    "on the meta device": lambda: torch.empty(5, device="meta"),
    "ordered dicts": _ordered,
    "a dataclass": lambda: Settings(3, 0.5, torch.ones(3)),
    "the same again and again": lambda: [[1, 2]] * 3 + [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
}  # fmt: skip
"""By kind; each call makes a new one."""

SAFE = set(OBJECTS) - {"a module", "a subclass", "a dataclass", "a typed storage", "an untyped storage"}
"""Those that torch.load takes with weights_only."""


def tensors_of(obj: Any) -> list[torch.Tensor]:
    """Those within, in order."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, torch.nn.Module):
        return [*obj.parameters(), *obj.buffers()]
    if isinstance(obj, Settings):
        return [obj.weight]
    if isinstance(obj, dict):
        obj = list(obj.values())
    return [tensor for each in obj for tensor in tensors_of(each)] if isinstance(obj, (list, tuple)) else []


def assert_same(found: Any, expected: Any) -> None:
    """Type, values and all that a tensor is made of."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected)
    elif isinstance(expected, torch.nn.Module):
        assert_same(found.state_dict(), expected.state_dict())
    elif isinstance(expected, Settings):
        assert_same(dataclasses.asdict(found), dataclasses.asdict(expected))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert vars(found) == vars(expected) if isinstance(expected, OrderedDict) else True
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, (torch.UntypedStorage, torch.TypedStorage)):
        assert found.tolist() == expected.tolist()
    else:
        assert found == expected


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    for fact in ("dtype", "shape", "layout", "device", "requires_grad", "is_nested", "is_quantized", "__dict__"):
        if fact == "shape" and expected.is_nested:
            continue
        assert getattr(found, fact) == getattr(expected, fact), fact
    if expected.is_nested:
        assert_same(list(found.unbind()), list(expected.unbind()))
    elif expected.layout is torch.sparse_coo:
        assert_same([found._indices(), found._values()], [expected._indices(), expected._values()])
    elif expected.layout is torch.sparse_csr:
        assert_same([found.crow_indices(), found.col_indices(), found.values()],
                    [expected.crow_indices(), expected.col_indices(), expected.values()])  # fmt: skip
    else:
        assert found.stride() == expected.stride()
        assert found.storage_offset() == expected.storage_offset()
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
        if expected.is_quantized:
            assert found.qscheme() == expected.qscheme()
            assert_same(found.dequantize(), expected.dequantize())
        elif not expected.is_meta:
            assert torch.equal(flat_bytes(found.untyped_storage()), flat_bytes(expected.untyped_storage()))
