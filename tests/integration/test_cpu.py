"""The patches' reasons are tested too: a test here that fails on a newer verl says which patch can go."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_bpo.integration import cpu


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(platform_manager, "_current_platform", cpu.PlatformCPU())


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(platform_manager, "_current_platform", SimpleNamespace(device_name="cuda"))


def test_the_platform_is_registered_and_complete():
    platform = PlatformRegistry.get("cpu")()  # an abstract method left out would raise here
    assert isinstance(platform, cpu.PlatformCPU)
    assert platform.device_module is torch.cpu
    assert torch.ones(1, device=platform.current_device()).device.type == "cpu"


def test_verls_device_functions_work():
    code = """
import os
os.environ["VERL_PLATFORM"] = "cpu"
import verl, verl_bpo.integration.cpu
import torch
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.profiler.performance import log_gpu_memory_usage
assert (get_device_name(), get_nccl_backend()) == ("cpu", "gloo")
aggressive_empty_cache(force_sync=True)
log_gpu_memory_usage("here", logger=None)
state = get_torch_device().get_rng_state()
first = torch.rand(3)
get_torch_device().set_rng_state(state)
assert torch.equal(first, torch.rand(3))
assert get_torch_device().max_memory_allocated() >= get_torch_device().memory_allocated() // 2 > 2**24
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_the_module_leaves_torch_as_it_is():
    code = (
        "import torch; before = set(vars(torch.cpu)); import verl_bpo.integration.cpu; "
        "assert set(vars(torch.cpu)) == before"
    )
    environment = {"VERL_USE_EXTERNAL_PLUGINS": "none", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_the_platform_is_chosen_unasked_only_where_torch_has_no_accelerator(monkeypatch):
    platform = cpu.PlatformCPU()
    for cuda, hip, chosen in ((None, None, True), ("12.8", None, False), (None, "6.2", False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert platform.is_platform_available(use_smi_check=True) is chosen


# --- process group ---------------------------------------------------------------------------------------------------


def test_verl_still_names_the_cpu_backend_twice():
    from verl.utils.distributed import initialize_global_process_group_ray

    original = inspect.unwrap(initialize_global_process_group_ray)
    assert 'backend or f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in inspect.getsource(original)


def test_torch_still_refuses_a_backend_named_twice():
    with pytest.raises(ValueError, match="[Dd]uplicate"):
        torch.distributed.BackendConfig(torch.distributed.Backend("cpu:gloo,cpu:gloo"))


def backend_asked_for(backend=None):
    asked = []
    module = SimpleNamespace(initialize_global_process_group_ray=lambda timeout, backend: asked.append(backend))
    cpu.patch_process_group(module)
    module.initialize_global_process_group_ray(timeout_second=None, backend=backend)
    return asked


def test_the_process_group_is_gloo_on_cpu(on_cpu):
    assert backend_asked_for() == ["cpu:gloo"]
    assert backend_asked_for("mpi") == ["mpi"]


def test_the_process_group_is_verls_own_elsewhere(elsewhere):
    assert backend_asked_for() == [None]


# --- critic ----------------------------------------------------------------------------------------------------------


def test_verl_still_loads_the_critic_with_flash_attention():
    from verl.utils.model import load_valuehead_model

    source = inspect.getsource(inspect.unwrap(load_valuehead_model))
    assert 'attn_implementation="flash_attention_2"' in source


def critic_loader(original=None):
    module = SimpleNamespace(load_valuehead_model=original)
    cpu.patch_valuehead_loader(module)
    return module.load_valuehead_model


def test_a_critic_loads_on_cpu(on_cpu, tmp_path):
    from tiny import tiny_model

    model = tiny_model()
    model.config.num_labels = 1
    model.save_pretrained(tmp_path)

    def never(*args):
        raise AssertionError("verl's own loader was called")

    critic = critic_loader(never)(str(tmp_path), torch.float32, model.config, False)
    with torch.no_grad():
        assert critic(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 1)
    assert critic.config._attn_implementation == "sdpa"
    torch.testing.assert_close(critic.model.norm.weight, model.model.norm.weight)


def test_the_critic_loader_is_verls_own_elsewhere(elsewhere):
    assert critic_loader(lambda *args: args)("path", torch.float32, None, False) == ("path", torch.float32, None, False)


# --- reference policy -------------------------------------------------------------------------------------------------


def test_verl_still_offloads_every_reference_policy_to_pinned_memory():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine._build_fsdp_module)
    assert "offload_policy or self.engine_config.forward_only" in source
    assert "CPUOffloadPolicy(pin_memory=True)" in source


def offload_policy():
    module = SimpleNamespace(CPUOffloadPolicy=lambda pin_memory: ("verl's own", pin_memory))
    cpu.patch_offload(module)
    return module.CPUOffloadPolicy(pin_memory=True)


def test_nothing_is_offloaded_from_the_cpu(on_cpu):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    assert isinstance(offload_policy(), OffloadPolicy) and not isinstance(offload_policy(), CPUOffloadPolicy)


def test_the_reference_policy_is_offloaded_as_verl_wants_elsewhere(elsewhere):
    assert offload_policy() == ("verl's own", True)
