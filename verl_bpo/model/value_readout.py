"""The value readout of SAPO (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842).

Two linear heads on the final hidden states of a causal language model: the value of a state, read at the last position
before an action, and the value of an action, read at its last position. Actor and critic are one forward of one model.
(Not "Soft Adaptive Policy Optimization", verl's loss mode of the same four letters.)

Needs torch and transformers only::

    readout = attach_value_readout(model)
    turns = turn_boundaries(response_mask)
    with readout.reading(boundary_positions(turns, row_start, tokens=input_ids.numel())) as values:
        logits = model(input_ids=input_ids).logits
    values.state, values.action  # float32 [M] each

The heads stay out of ``model.state_dict()``, so that no checkpoint export and no weight sync to an inference engine meets
parameters it doesn't know; :func:`save_value_readout` writes them to a file of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from verl_bpo.advantages.sapo import TurnBoundaries
from verl_bpo.model.gather import gather
from verl_bpo.model.support import READOUT, UnsupportedModel, check_config

NAME = "value_readout"
"""Name of the readout inside the causal language model, and stem of its file."""
FILE = f"{NAME}.safetensors"
IN_ROLLOUT = "VERL_BPO_VALUES_IN_ROLLOUT"
"""Environment variable, 1 where the rollout engine takes the heads with its weights and gives values of states."""


@dataclass(frozen=True)
class ReadPositions:
    """Where to read, as positions in the hidden states ``[B, T, H]`` flattened to ``[B * T, H]``."""

    state: Tensor
    """int64 [M]: one before the action's first token."""
    action: Tensor
    """int64 [K]: the action's last token."""
    tokens: int
    """B * T of the forward."""


@dataclass
class ReadValues:
    """What one forward read: float32, with gradient where the forward had one. None before the forward ran."""

    state: Tensor | None = None
    """[M]: V of the states."""
    action: Tensor | None = None
    """[K]: Q of the actions."""
    hidden: tuple[Tensor, Tensor] | None = None
    """[M, H] and [K, H]: the hidden states that these were read from, without gradient, where the readout keeps them."""


def boundary_positions(
    turns: TurnBoundaries, row_start: Tensor, *, tokens: int, prompt_length: Tensor | int = 0
) -> ReadPositions:
    """Positions of all turns of a batch.

    Args:
        turns: boundaries within each row's mask.
        row_start: int64 [B], flat position of each row's first real token: ``arange(B) * T`` plus the left padding for
            padded rows, ``offsets[:-1]`` for packed ones.
        tokens: B * T of the forward, counting padding.
        prompt_length: int64 [B], tokens of each row before the mask's first position; 0 for a mask of whole rows.

    Raises:
        ValueError: an action stands at the very start of its row, where no state precedes it.
    """
    first = row_start + prompt_length
    state = first[turns.row] + turns.start - 1
    if (state < row_start[turns.row]).any():
        raise ValueError("an action starts at the first token of its row: no position before it holds its state")
    return ReadPositions(state=state, action=first[turns.row] + turns.last, tokens=tokens)


class ValueReadout(nn.Module):
    """Heads V and Q, linear, float32, zero at the start: an untrained readout says 0 everywhere."""

    def __init__(self, hidden_size: int, grad_scale: float = 1.0) -> None:
        """
        Args:
            hidden_size: H.
            grad_scale: factor on the gradient that the value losses send into the backbone. 1 trains it with them, as the
                paper does; 0 makes the readout a probe.
        """
        super().__init__()
        if grad_scale < 0:
            raise ValueError(f"grad_scale={grad_scale} must be at least 0")
        self.weight = nn.Parameter(torch.zeros(2, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float32))
        self.grad_scale = grad_scale
        self.measure_gradients = False
        """Whether :meth:`pop_gradient_squares` has something to tell: costs one pass over the gradient at the top."""
        self.keeps_hidden = False
        """Whether what is read comes with its hidden states."""
        self.positions: ReadPositions | None = None
        """Where the next forward reads; None: nowhere."""
        self.values: ReadValues | None = None
        """What it read there."""
        self._squares: dict[str, Tensor | float] = {"policy": 0.0, "value": 0.0}

    def reset(self) -> None:
        """Back to zero, in place (also where the parameters are sharded)."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """V [M] and Q [K] of hidden states [M, H] and [K, H]."""
        if self.weight.dtype != torch.float32:
            raise UnsupportedModel(
                f"the value readout's parameters are {self.weight.dtype}: attach it after the model was cast, and give it "
                f"float32 parameters under mixed precision"
            )
        with torch.autocast(state.device.type, enabled=False):
            (v_weight, q_weight), (v_bias, q_bias) = self.weight.unbind(), self.bias.unbind()
            return state.float() @ v_weight + v_bias, action.float() @ q_weight + q_bias

    # --- reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, positions: ReadPositions) -> Iterator[ReadValues]:
        """Read V and Q in the one forward of the model that happens inside. See :meth:`begin` and :meth:`end`."""
        values = self.begin(positions)
        try:
            yield values
        except BaseException:
            self.positions = self.values = None
            raise
        self.end()

    def begin(self, positions: ReadPositions) -> ReadValues:
        """Ask the next forward for values at ``positions``; they arrive in the object that this returns."""
        self.positions, self.values = positions, ReadValues()
        return self.values

    def end(self) -> ReadValues:
        """The values read since :meth:`begin`.

        Raises:
            UnsupportedModel: the model's forward never came to its output embedding, as with fused loss kernels.
        """
        values, self.positions, self.values = self.values, None, None
        if values is None or values.state is None:
            raise UnsupportedModel(
                "the model's forward did not run its output embedding as a module, so the value readout saw no hidden "
                "states: turn fused kernels off (actor_rollout_ref.model.use_fused_kernels=False)"
            )
        return values

    def _before_logits(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook on the output embedding, whose input is the final hidden states [B, T, H]."""
        if self.positions is None:
            return None
        if self.values.state is not None:
            raise UnsupportedModel("the model ran its output embedding twice while the value readout was reading once")
        hidden = args[0]
        flat, at = hidden.flatten(0, -2), self.positions
        if flat.shape[0] != at.tokens:
            raise UnsupportedModel(
                f"the output embedding got {flat.shape[0]} of the forward's {at.tokens} tokens, so positions would be off: "
                f"don't set logits_to_keep, and no sequence parallelism"
            )
        state, action = gather(flat, 0, at.state), gather(flat, 0, at.action)
        if self.grad_scale == 0:
            state, action = state.detach(), action.detach()
        elif hidden.requires_grad:
            for read in (state, action):
                self._scale_and_measure(read)
        self.values.state, self.values.action = self(state, action)
        if self.keeps_hidden:
            self.values.hidden = state.detach(), action.detach()
        if not (self.measure_gradients and hidden.requires_grad):
            return None
        policy = hidden.view_as(hidden)  # a name of its own for the gradient that comes from the logits alone
        policy.register_hook(lambda grad: self._add_square("policy", grad))
        return (policy, *args[1:])

    def _scale_and_measure(self, read: Tensor) -> None:
        def hook(grad: Tensor) -> Tensor:
            grad = grad * self.grad_scale if self.grad_scale != 1 else grad
            if self.measure_gradients:
                self._add_square("value", grad)
            return grad

        read.register_hook(hook)

    # --- gradients --------------------------------------------------------------------------------------------------

    def _add_square(self, part: str, grad: Tensor) -> None:
        self._squares[part] = self._squares[part] + torch.linalg.vector_norm(grad, dtype=torch.float32).square()

    def pop_gradient_squares(self) -> Tensor:
        """float32 [2]: squared norm of the gradient at the final hidden states, where both parts enter the backbone, of
        the policy's part and of the values' part; summed since the last call."""
        squares, self._squares = self._squares, {"policy": 0.0, "value": 0.0}
        return torch.stack([torch.as_tensor(squares[k], dtype=torch.float32).cpu() for k in ("policy", "value")])

    # --- apart from the model's own state ---------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the heads are no part of the language model's weights."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing, and nothing is missing."""

    def own_state(self) -> dict[str, Tensor]:
        """A copy of the heads' parameters, whole and on the CPU. Where they are sharded every rank must call it."""
        return {n: _whole(p.detach()).to("cpu", torch.float32, copy=True) for n, p in self.named_parameters()}

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`own_state` gave.

        Raises:
            ValueError: other names or shapes.
        """
        own = dict(self.named_parameters())
        shapes = {k: tuple(v.shape) for k, v in state.items()}
        if shapes != {k: tuple(p.shape) for k, p in own.items()}:
            raise ValueError(
                f"these are not the heads of a model with hidden size {self.weight.shape[1]}: they hold {shapes}"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                if isinstance(parameter, DTensor):
                    mesh = parameter.device_mesh
                    whole = state[name].to(mesh.device_type, parameter.dtype)
                    parameter.to_local().copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
                else:
                    parameter.copy_(state[name])


def _whole(parameter: Tensor) -> Tensor:
    """Gathered on the device type that its ranks talk on, wherever the shards are. An offload to the CPU that still runs is
    waited for: the copy back is behind it on the same stream, where the host would read what isn't there yet."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to(parameter.device_mesh.device_type).full_tensor()


def attach_value_readout(model: nn.Module, grad_scale: float = 1.0) -> ValueReadout:
    """Give a Hugging Face causal LM (also inside a PEFT model) a readout; call it after dtype casts and after LoRA.

    Raises:
        UnsupportedModel: no decoder-only language model, no output embedding to read before, or a readout is there already.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "config", None) is not None:
        check_config(base.config, READOUT)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None or getattr(head, "weight", None) is None or head.weight.dim() != 2:
        raise UnsupportedModel(
            f"{type(base).__name__} has no output embedding (get_output_embeddings), before which the value readout of SAPO "
            f"reads the final hidden states: use a Hugging Face causal language model"
        )
    if hasattr(base, NAME):
        raise UnsupportedModel(f"{type(base).__name__} has a value readout already")
    readout = ValueReadout(head.weight.shape[1], grad_scale)
    if head.weight.device.type != "meta":
        readout.to(head.weight.device)
    base.add_module(NAME, readout)
    head.register_forward_pre_hook(readout._before_logits)
    return readout


def save_value_readout(readout: ValueReadout, folder: str | Path, write: bool = True) -> Path:
    """Write the heads to ``folder/value_readout.safetensors``, beside an exported model's own files.

    Where the heads are sharded all ranks call it, and one of them with ``write``.
    """
    path, state = Path(folder) / FILE, readout.own_state()
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, str(path))
    return path


def load_value_readout(readout: ValueReadout, folder: str | Path) -> None:
    """Read the heads back. With a model exported by training::

        readout = attach_value_readout(model)
        load_value_readout(readout, folder)

    Raises:
        FileNotFoundError: the folder holds no readout.
        ValueError: the heads of another model.
    """
    readout.load_own_state(read_value_readout(folder))


def read_value_readout(folder: str | Path) -> dict[str, Tensor]:
    """What :func:`save_value_readout` wrote, for :meth:`ValueReadout.load_own_state`.

    Raises:
        FileNotFoundError: the folder holds no readout.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: this model was saved by a run without SAPO's value readout")
    return load_file(str(path))
