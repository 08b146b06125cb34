"""A pool of host memory as SGLang's own ones, whose modules need a GPU's kernels: keys and values of pages of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostPool:
    """The part of SGLang's ``MHATokenToKVPoolHost`` that storage backends use.

    Args:
        kv_buffer: Memory of keys and of values. Layout "page_first": (2, tokens, layers, width). Layout "layer_first":
            (2, layers, tokens, width).
        page_size: Tokens of a page.
        layout: One of these.
    """

    def __init__(self, kv_buffer: torch.Tensor, page_size: int, layout: str = "page_first") -> None:
        self.kv_buffer, self.page_size, self.layout, self.dtype = kv_buffer, page_size, layout, kv_buffer.dtype

    def _page(self, index: int) -> torch.Tensor:
        tokens = slice(index, index + self.page_size)
        return self.kv_buffer[:, tokens] if self.layout == "page_first" else self.kv_buffer[:, :, tokens]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page.copy_(data_page.view(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pieces = []
        for index in indices[:: self.page_size].tolist():
            page = self._page(index)
            halves = page if self.layout == "page_first" else page.flatten(0, 1)
            pieces += list(halves)
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def indices_of(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the indices of the tokens of pages, as SGLang gives them."""
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])
