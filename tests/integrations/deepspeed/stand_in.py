"""DeepSpeed as far as deepnvme.integrations.deepspeed looks at it: its modules, with the names and parameters of 0.19.8."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

VERSION = "0.19.8"


class OpBuilder:
    def load(self, verbose: bool = True) -> str:
        return f"DeepSpeed's {self.NAME}"

    def jit_load(self, verbose: bool = True) -> str:
        return self.load(verbose)

    def is_compatible(self, verbose: bool = False) -> bool:
        return False


def modules() -> dict[str, ModuleType]:
    """All of them, new ones each time, by name."""

    class AsyncIOBuilder(OpBuilder):
        NAME = "async_io"

        def load(self, verbose: bool = False) -> str:
            return super().load(verbose)

    class GDSBuilder(AsyncIOBuilder):
        NAME = "gds"

    class PinMemoryBuilder(OpBuilder):
        NAME = "pin_memory"

        def load(self, verbose: bool = False) -> str:
            return super().load(verbose)

    class Abstract:
        def is_pinned(self, tensor: Any) -> bool:
            return False

    class Accelerator(Abstract):
        pass

    class PartitionedOptimizerSwapper:
        def __init__(
            self,
            swap_config: Any,
            aio_config: Any,
            base_folder: Any,
            optimizer: Any,
            largest_numel: Any,
            device: Any,
            dtype: Any,
            timers: Any,
        ) -> None:
            raise NotImplementedError

    class PipelinedOptimizerSwapper(PartitionedOptimizerSwapper):
        pass

    class DeepSpeedZeroOptimizer_Stage3:
        def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None: ...
        def partition_grads(self, params_to_release: Any, grad_partitions: Any) -> None: ...

    class AsyncPartitionedParameterSwapper:
        def __init__(self, ds_config: Any, model_dtype: Any) -> None:
            raise NotImplementedError

    def create_checkpoint_engine(
        config_params: Any, groups: Any, zero_stage: Any, has_moe_layers: Any, optimize_dp_state: Any
    ) -> str:
        return "DeepSpeed's"

    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        "accelerator": {"get_accelerator": functools.cache(Accelerator)},
        "ops": {},
        "ops.op_builder": {each.__name__: each for each in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder)},
        "runtime": {},
        "runtime.zero": {},
        "runtime.zero.stage3": {
            each.__name__: each
            for each in (DeepSpeedZeroOptimizer_Stage3, PartitionedOptimizerSwapper, PipelinedOptimizerSwapper)
        },
        "runtime.zero.partition_parameters": {"AsyncPartitionedParameterSwapper": AsyncPartitionedParameterSwapper},
        "runtime.engine": {"create_checkpoint_engine": create_checkpoint_engine},
        "runtime.checkpoint_engine": {"create_checkpoint_engine": create_checkpoint_engine},
        "runtime.checkpoint_engine.utils": {"create_checkpoint_engine": create_checkpoint_engine},
    }
    made = {}
    for name, content in contents.items():
        path = f"deepspeed.{name}".rstrip(".")
        made[path] = ModuleType(path)
        vars(made[path]).update(content)
    return made


def contents(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """Of modules and their classes, everything."""
    found = {f"{path}.{name}": value for path, module in modules.items() for name, value in vars(module).items()}
    classes = {path: value for path, value in found.items() if isinstance(value, type)}
    classes["accelerator"] = type(modules["deepspeed.accelerator"].get_accelerator())
    return found | {f"{path}.{name}": value for path, kind in classes.items() for name, value in vars(kind).items()}
