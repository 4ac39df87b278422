"""Networks: left-right symmetric perceptrons, and their place in rsl_rl."""

import math
from typing import Any

import torch
from rsl_rl.models import MLPModel
from torch import Tensor, nn
from torch.nn import functional

Mirror = tuple[Tensor, Tensor]
"""Permutation and signs that show a vector in a mirror: `signs * v[permutation]`."""


class SymmetricMLP(nn.Module):
    """Perceptrons f with f(mirror(x)) = mirror(f(x)) by construction.

    Each hidden layer holds the activations of x and of its mirror image side by side. Their sum (even) and difference
    (odd) do not mix in a linear layer that treats both alike, so a layer of `width` units costs two products of half
    the width: half of a plain layer, a quarter of averaging f(x) with mirror(f(mirror(x))). Without `out_mirror`
    outputs are invariant (value functions). `ensemble` networks of equal shape run in one batched product.
    """

    def __init__(
        self,
        in_mirror: Mirror,
        out_dim: int,
        out_mirror: Mirror | None,
        widths: tuple[int, ...],
        ensemble: int = 1,
        layer_norm: bool = False,
    ) -> None:
        """`widths` counts both halves and must be even; `layer_norm` normalises each layer's activations."""
        super().__init__()
        self.register_buffer("in_permutation", in_mirror[0])
        self.register_buffer("in_signs", in_mirror[1])
        self.has_odd_output, self.layer_norm, self.ensemble = out_mirror is not None, layer_norm, ensemble
        if out_mirror is not None:
            self.register_buffer("out_permutation", out_mirror[0])
            self.register_buffer("out_signs", out_mirror[1])
        sizes = [len(in_mirror[0]), *(w // 2 for w in widths)]
        shapes = list(zip(sizes, sizes[1:], strict=False))
        self.weights = nn.ParameterList(_init(2 * ensemble, a, b) for a, b in shapes)
        self.biases = nn.ParameterList(torch.zeros(ensemble, 1, b) for _, b in shapes)
        self.head = nn.Parameter(_init((2 if self.has_odd_output else 1) * ensemble, sizes[-1], out_dim))
        self.head_bias = nn.Parameter(torch.zeros(ensemble, 1, out_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, out_dim), or (ensemble, N, out_dim) for more than one network, for inputs (N, in_dim)."""
        mirrored = x.index_select(-1, self.in_permutation) * self.in_signs
        even, odd = ((x + mirrored) * 0.5).expand(self.ensemble, -1, -1), ((x - mirrored) * 0.5).expand(self.ensemble, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            total, difference = torch.bmm(torch.cat([even, odd]), weight).split(self.ensemble)
            total = total + bias
            a, b = total + difference, total - difference
            if self.layer_norm:
                a, b = _normalise(a, b)
            a, b = functional.elu(a), functional.elu(b)
            even, odd = 0.5 * (a + b), 0.5 * (a - b)
        y = self._odd_head(even, odd) if self.has_odd_output else torch.baddbmm(self.head_bias, even, self.head)
        return y if self.ensemble > 1 else y[0]

    def _odd_head(self, even: Tensor, odd: Tensor) -> Tensor:
        total, difference = torch.bmm(torch.cat([even, odd]), self.head).split(self.ensemble)
        total = total + self.head_bias
        mirrored = (total - difference).index_select(-1, self.out_permutation) * self.out_signs
        return 0.5 * (total + difference + mirrored)


class SymmetricModel(MLPModel):
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
