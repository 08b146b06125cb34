"""What torch says of some of the kinds of objects that these tests save."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_SAID = (
    "TypedStorage is deprecated", ".*quantiz", "Sparse CSR tensor support is in beta", ".*nested tensors is in prototype",
    "DTensor random operators may not have",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/checkpoint/" in item.nodeid:
            for text in _SAID:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
