"""verl on a machine without a GPU: a ``cpu`` platform, and what verl 0.9.1 needs changed there.

Importing this module registers the platform; ``VERL_PLATFORM=cpu`` selects it. The ``patch_*`` functions take the
module they change, so that each can run right after verl has imported that module. On another platform the changed
functions do what they did.
"""

from __future__ import annotations

import functools
import resource
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform


def _resident_bytes(*args: Any, **kwargs: Any) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(*args: Any, **kwargs: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_info(*args: Any, **kwargs: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


_DEVICE_FUNCTIONS = {
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "reset_peak_memory_stats": _nothing,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "memory_allocated": _resident_bytes,
    "memory_reserved": _resident_bytes,
    "max_memory_allocated": _peak_resident_bytes,
    "max_memory_reserved": _peak_resident_bytes,
    "mem_get_info": _memory_info,
    "get_device_name": lambda *args, **kwargs: "CPU",
}
"""What verl calls on a device module and ``torch.cpu`` lacks. Memory is the process's resident memory, in bytes."""


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Everything on the CPU. Ray's "GPU" is a logical resource then: ``ray.init(num_gpus=n)`` places n workers."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        """``torch.cpu`` itself and no wrapper, since verl 0.9.1 compares with it (utils/profiler/performance.py,
        utils/flops_counter.py). It is completed here and not at import, so that other platforms find it untouched."""
        for name, function in _DEVICE_FUNCTIONS.items():
            if not hasattr(torch.cpu, name):
                setattr(torch.cpu, name, function)
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Chosen unasked only where torch cannot drive an accelerator at all: a CPU-only Ray actor of a cluster with
        GPUs sees no device either, and must not take itself for a CPU machine."""
        return torch.version.cuda is None and torch.version.hip is None and find_spec("torch_npu") is None

    def current_device(self) -> str:
        return "cpu"  # verl hands it to tensor.to and to FSDP's device_id

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights go through shared memory

    def cudart(self) -> None:
        return None


def on_cpu() -> bool:
    return get_platform().device_name == "cpu"


def patch_process_group(module: ModuleType) -> None:
    """``verl.utils.distributed``: one gloo backend.

    verl 0.9.1 asks for the backends ``cpu:gloo,{device}:{communication backend}``; on the CPU platform that names the
    device cpu twice, which torch refuses.
    """
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second, backend or ("cpu:gloo" if on_cpu() else None))

    module.initialize_global_process_group_ray = initialize_global_process_group_ray


def patch_valuehead_loader(module: ModuleType) -> None:
    """``verl.utils.model``: a critic with SDPA attention.

    verl 0.9.1 loads the critic with ``attn_implementation="flash_attention_2"``, whatever the config says, and
    FlashAttention has no CPU kernels.
    """
    original = module.load_valuehead_model

    @functools.wraps(original)
    def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
        if not on_cpu():
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model


def patch_offload(module: ModuleType) -> None:
    """``verl.workers.engine.fsdp.transformer_impl``: no offload, since everything is in the CPU's memory already.

    verl 0.9.1 gives every FSDP2 reference policy ``CPUOffloadPolicy(pin_memory=True)``, and torch refuses to pin memory
    without an accelerator.
    """
    from torch.distributed.fsdp import OffloadPolicy

    original = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda **kwargs: OffloadPolicy() if on_cpu() else original(**kwargs)
