"""What several files have in common."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A ``Model`` of the test's file, with the same values each time."""
    torch.manual_seed(0)
    made: nn.Module = request.module.Model()
    return made
