"""The value heads as what they are, linear: solved by ridge regression of returns on the final hidden states, not stepped.

Each training step adds its turns' hidden states and returns to two Gram matrices, which forget older steps, and the heads
are their solution. How strong the ridge must be is read off what heads of several strengths, solved before a step, said of
that step's turns. Plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_bpo.model.support import UnsupportedModel

FIT_RETURNS = "fit_returns"
"""Name of a row's field that holds each turn's return, for the heads to fit, on all tokens of the turn."""
WIDEST = 4096
"""Largest hidden size: Gram matrices are hidden size squared in float64, four of them, 134 MB each at this size."""
STRENGTHS = tuple(10.0**k for k in range(-4, 3))
"""Ridges to choose from, in means of the hidden states' variances."""


def check_width(hidden_size: int) -> None:
    """See that the matrices stay small enough.

    Raises:
        UnsupportedModel: they don't.
    """
    if hidden_size > WIDEST:
        raise UnsupportedModel(
            f"bpo.sapo.head_fit=ridge keeps matrices of the hidden size squared, and {hidden_size} is above {WIDEST}: set "
            f"bpo.sapo.head_fit=adam"
        )


class HeadFit:
    """V's and Q's heads from all turns seen, where a step weighs ``1 - 1 / memory`` of the next one."""

    def __init__(self, hidden_size: int, memory: int = 8, ridge: float | None = None) -> None:
        """
        Args:
            hidden_size: H.
            memory: training steps.
            ridge: its strength; None: the best of ``STRENGTHS`` on the turns of steps that it wasn't fitted on.

        Raises:
            UnsupportedModel: H is too large.
        """
        check_width(hidden_size)
        self.keep = 1 - 1 / memory
        self.strengths = STRENGTHS if ridge is None else (ridge,)
        self.step: int | None = None
        self.past, self.present, self.part = (
            torch.zeros(2, hidden_size + 2, hidden_size + 2).double() for _ in range(3)
        )
        """[2, H + 2, H + 2]: for V and Q, sums of z z^T with z = (hidden state, 1, return) over earlier steps, this step, and
        what this rank has seen since :meth:`finish`."""
        self.errors = torch.zeros(2, len(self.strengths)).double()
        """Squared errors of each strength on turns of steps that it wasn't fitted on."""
        self.before = torch.zeros(2, len(self.strengths), hidden_size + 1).double()
        """Heads (weights, bias) by strength, solved before this step."""
        self.latest = self.before

    def begin(self, step: int) -> None:
        """Turns that follow belong to ``step``."""
        if step != self.step:
            self.past = self.keep * (self.past + self.present)
            self.errors = self.keep * self.errors
            self.present, self.before, self.step = torch.zeros_like(self.present), self.latest, step

    def add(self, state: Tensor, action: Tensor, returns: Tensor) -> None:
        """Hidden states [M, H] before and at the end of M turns' actions, and the turns' returns [M]."""
        self.part = self.part.to(state.device)
        for gram, hidden in zip(self.part, (state, action)):
            z = torch.cat([hidden.double(), torch.ones_like(returns.double())[:, None], returns.double()[:, None]], 1)
            gram.addmm_(z.T, z)

    def finish(self, reduce: Callable[[Tensor], None] = lambda x: None) -> dict[str, Tensor]:
        """The heads, as :meth:`~verl_bpo.model.value_readout.ValueReadout.load_own_state` takes them.

        Args:
            reduce: adds up a tensor over all ranks, in place; every rank then solves the same.
        """
        reduce(self.part)
        if self.part.isfinite().all():
            self.past, self.present, self.errors, self.before, self.latest = (
                x.to(self.part.device) for x in (self.past, self.present, self.errors, self.before, self.latest)
            )
            judged = torch.cat([self.before, -torch.ones_like(self.before[..., :1])], -1)
            self.errors = self.errors + torch.einsum("hsi,hij,hsj->hs", judged, self.part, judged)
            self.present = self.present + self.part
            self.latest = torch.stack([self._solved(gram) for gram in self.past + self.present])
        self.part = torch.zeros_like(self.part)
        chosen = torch.stack([heads[i] for heads, i in zip(self.latest, self._best())]).float().cpu()
        return {"weight": chosen[:, :-1].contiguous(), "bias": chosen[:, -1].contiguous()}

    @property
    def ridge(self) -> tuple[float, float]:
        """The strength that V's and Q's heads have."""
        v, q = self._best()
        return self.strengths[v], self.strengths[q]

    def _best(self) -> list[int]:
        """Before there is a step to judge by: the strongest."""
        return (len(self.strengths) - 1 - self.errors.flip(1).argmin(1)).tolist()

    def _solved(self, gram: Tensor) -> Tensor:
        """[strengths, H + 1]; the bias is not shrunk."""
        width = gram.shape[0] - 2
        count = gram[width, width]
        if count == 0:
            return gram.new_zeros(len(self.strengths), width + 1)
        mean = gram[width] / count
        centred = gram - count * torch.outer(mean, mean)
        x, xy = centred[:width, :width], centred[:width, -1:]
        scale = x.diagonal().mean().clamp(min=torch.finfo(x.dtype).tiny)
        one = torch.eye(width, dtype=x.dtype, device=x.device)
        weights = torch.stack([torch.linalg.solve(x + s * scale * one, xy)[:, 0] for s in self.strengths])
        bias = mean[-1] - weights @ mean[:width]
        return torch.cat([weights, bias[:, None]], 1)

    # --- apart from the model's own state ---------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that a resumed run needs."""
        held = {"past": self.past, "present": self.present, "errors": self.errors, "latest": self.latest}
        step = -1 if self.step is None else self.step
        return {**{k: v.cpu().contiguous() for k, v in held.items()}, "step": torch.tensor(step)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` gave."""
        self.past, self.present, self.errors, self.latest = (
            state[k].clone() for k in ("past", "present", "errors", "latest")
        )
        self.before, self.step = self.latest, int(state["step"])
