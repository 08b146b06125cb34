"""The ``aio`` block as DeepSpeed's swappers take it."""

from __future__ import annotations

import pytest

from deepnvme.integrations.deepspeed.swap_tensor import AIO_DEFAULT_DICT, get_aio_config


def test_what_the_block_leaves_out_is_the_default() -> None:
    assert AIO_DEFAULT_DICT == {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    assert get_aio_config({}) == get_aio_config({"aio": None}) == AIO_DEFAULT_DICT
    assert get_aio_config({"aio": {"queue_depth": 32}}) == {**AIO_DEFAULT_DICT, "queue_depth": 32}


def test_a_misspelt_key_is_named() -> None:
    with pytest.raises(ValueError, match="queue_dept"):
        get_aio_config({"aio": {"queue_dept": 32}})
