"""Networks: left-right symmetric perceptrons, their place in rsl_rl, and actors with or without memory for export."""

import copy
import math
from itertools import pairwise
from typing import Any

import torch
from rsl_rl.models import MLPModel
from torch import Tensor, nn
from torch.nn import functional

from policies.interface import StateSpec, Tensors
from robots.errors import UserError

Mirror = tuple[Tensor, Tensor]
"""Permutation and signs that show a vector in a mirror: `signs * v[permutation]`."""


class SymmetricMLP(nn.Module):
    """Perceptrons f with f(mirror(x)) = mirror(f(x)) by construction.

    Each hidden layer holds the activations of x and of its mirror image side by side. Their sum (even) and difference
    (odd) do not mix in a linear layer that treats both alike, so a layer of `width` units costs two products of half
    the width: half of a plain layer, a quarter of averaging f(x) with mirror(f(mirror(x))). Without `out_mirror`
    outputs are invariant (value functions). `ensemble` networks of equal shape run in one batched product.
    """

    in_permutation: Tensor
    in_signs: Tensor
    out_permutation: Tensor
    out_signs: Tensor

    def __init__(
        self,
        in_mirror: Mirror,
        out_dim: int,
        out_mirror: Mirror | None,
        widths: tuple[int, ...],
        ensemble: int = 1,
        layer_norm: bool = False,
    ) -> None:
        """`widths` counts both halves; `layer_norm` normalises each layer's activations.

        Raises UserError for a width that is odd or not positive.
        """
        super().__init__()
        for width in widths:
            if width < 2 or width % 2:
                raise UserError(f"a symmetric layer has two halves: expected an even number of units, found {width}")
        self.register_buffer("in_permutation", in_mirror[0])
        self.register_buffer("in_signs", in_mirror[1])
        self.has_odd_output, self.layer_norm, self.ensemble = out_mirror is not None, layer_norm, ensemble
        if out_mirror is not None:
            self.register_buffer("out_permutation", out_mirror[0])
            self.register_buffer("out_signs", out_mirror[1])
        sizes = [len(in_mirror[0]), *(w // 2 for w in widths)]
        shapes = list(pairwise(sizes))
        self.weights = nn.ParameterList(_init(2 * ensemble, a, b) for a, b in shapes)
        self.biases = nn.ParameterList(torch.zeros(ensemble, 1, b) for _, b in shapes)
        self.head = nn.Parameter(_init((2 if self.has_odd_output else 1) * ensemble, sizes[-1], out_dim))
        self.head_bias = nn.Parameter(torch.zeros(ensemble, 1, out_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (..., out_dim), or (ensemble, ..., out_dim) for more than one network, for inputs (..., in_dim)."""
        rows = x.flatten(0, -2)
        mirrored = rows.index_select(-1, self.in_permutation) * self.in_signs
        even = ((rows + mirrored) * 0.5).expand(self.ensemble, -1, -1)
        odd = ((rows - mirrored) * 0.5).expand(self.ensemble, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            total, difference = torch.bmm(torch.cat([even, odd]), weight).chunk(2)
            total = total + bias
            a, b = total + difference, total - difference
            if self.layer_norm:
                a, b = _normalise(a, b)
            a, b = functional.elu(a), functional.elu(b)
            even, odd = 0.5 * (a + b), 0.5 * (a - b)
        y = self._odd_head(even, odd) if self.has_odd_output else torch.baddbmm(self.head_bias, even, self.head)
        if x.dim() > 2:
            y = y.view(self.ensemble, *x.shape[:-1], -1)
        return y if self.ensemble > 1 else y[0]

    def _odd_head(self, even: Tensor, odd: Tensor) -> Tensor:
        total, difference = torch.bmm(torch.cat([even, odd]), self.head).chunk(2)
        total = total + self.head_bias
        mirrored = (total - difference).index_select(-1, self.out_permutation) * self.out_signs
        y: Tensor = 0.5 * (total + difference + mirrored)
        return y


class SymmetricModel(MLPModel):  # type: ignore[misc]
    """rsl_rl's model with a SymmetricMLP inside."""

    def __init__(
        self,
        obs: Any,
        obs_groups: dict[str, list[str]],
        obs_set: str,
        output_dim: int,
        hidden_dims: tuple[int, ...],
        in_mirror: Mirror,
        out_mirror: Mirror | None,
        distribution_cfg: dict[str, Any] | None = None,
        head_gain: float = 1.0,
    ) -> None:
        """As MLPModel, plus the mirrors of input and output; `head_gain` scales the output layer's first weights."""
        super().__init__(obs, obs_groups, obs_set, output_dim, hidden_dims, distribution_cfg=distribution_cfg)
        self.mlp = SymmetricMLP(in_mirror, output_dim, out_mirror, tuple(hidden_dims))
        with torch.no_grad():
            self.mlp.head.mul_(head_gain)


class Actor(nn.Module):
    """A deterministic network from observations to actions whose memory, if it has any, is handed in and out.

    A snapshot: it shares no tensor with the learner it came from.
    """

    @property
    def states(self) -> dict[str, StateSpec]:
        """Recurrent state by name; none for a network without memory."""
        return {}

    def forward(self, obs: Tensor, state: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Actions (N, A) for observations (N, O) and the state before them, and the state after."""
        raise NotImplementedError


class FeedForwardActor(Actor):
    """A network without memory."""

    def __init__(self, network: nn.Module) -> None:
        """Copy `network`, which takes observations (N, O) to actions (N, A)."""
        super().__init__()
        self.network = _frozen(network)

    def forward(self, obs: Tensor, state: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Actions (N, A) for observations (N, O)."""
        return self.network(obs), {}


class RecurrentActor(Actor):
    """An LSTM or GRU of K layers of H units, then a network. State "hidden" (K, H), for an LSTM "cell" (K, H) too."""

    def __init__(self, memory: nn.LSTM | nn.GRU, network: nn.Module) -> None:
        """Copy both; `network` takes the memory's output (N, H) to actions (N, A)."""
        super().__init__()
        self.memory, self.network = _frozen(memory), _frozen(network)
        names = ("hidden", "cell") if isinstance(memory, nn.LSTM) else ("hidden",)
        self._states = {name: StateSpec(shape=(memory.num_layers, memory.hidden_size)) for name in names}

    @property
    def states(self) -> dict[str, StateSpec]:
        """Recurrent state by name."""
        return self._states

    def forward(self, obs: Tensor, state: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Actions (N, A) for observations (N, O) and the state before them, and the state after."""
        before = tuple(state[name].transpose(0, 1).contiguous() for name in self._states)
        latent, after = self.memory(obs.unsqueeze(0), before if len(before) > 1 else before[0])
        layers = after if isinstance(after, tuple) else (after,)
        return self.network(latent[0]), {k: v.transpose(0, 1) for k, v in zip(self._states, layers, strict=True)}


def _frozen(network: nn.Module) -> nn.Module:
    return copy.deepcopy(network).eval().requires_grad_(False)


def _normalise(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm over both halves together, which a swap of the halves leaves alone."""
    mean = 0.5 * (a.mean(-1, keepdim=True) + b.mean(-1, keepdim=True))
    a, b = a - mean, b - mean
    scale = torch.rsqrt(0.5 * (a.square().mean(-1, keepdim=True) + b.square().mean(-1, keepdim=True)) + 1e-5)
    return a * scale, b * scale


def _init(copies: int, rows: int, columns: int) -> Tensor:
    weights = torch.empty(copies, rows, columns)
    for w in weights:
        nn.init.orthogonal_(w, gain=math.sqrt(2))
    return weights
