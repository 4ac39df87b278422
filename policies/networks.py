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
    """A perceptron f with f(mirror(x)) = mirror(f(x)) by construction.

    Each hidden layer holds the activations of x and of its mirror image side by side. Their sum (even) and difference
    (odd) do not mix in a linear layer that treats both alike, so a layer of `width` units costs two products of half
    the width: half of a plain layer, a quarter of averaging f(x) with mirror(f(mirror(x))). Without `out_mirror`
    outputs are invariant (value functions).
    """

    def __init__(self, in_mirror: Mirror, out_dim: int, out_mirror: Mirror | None, widths: tuple[int, ...]) -> None:
        """`widths` counts both halves and must be even."""
        super().__init__()
        self.register_buffer("in_permutation", in_mirror[0])
        self.register_buffer("in_signs", in_mirror[1])
        self.has_odd_output = out_mirror is not None
        if out_mirror is not None:
            self.register_buffer("out_permutation", out_mirror[0])
            self.register_buffer("out_signs", out_mirror[1])
        sizes = [len(in_mirror[0]), *(w // 2 for w in widths)]
        self.weights = nn.ParameterList(_init(2, a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.biases = nn.ParameterList(torch.zeros(b) for b in sizes[1:])
        self.head = nn.Parameter(_init(2 if self.has_odd_output else 1, sizes[-1], out_dim))
        self.head_bias = nn.Parameter(torch.zeros(out_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, out_dim) for inputs (N, in_dim)."""
        mirrored = x.index_select(-1, self.in_permutation) * self.in_signs
        pair = torch.stack([x + mirrored, x - mirrored]) * 0.5
        for weight, bias in zip(self.weights, self.biases, strict=True):
            even, odd = torch.bmm(pair, weight).unbind(0)
            even = even + bias
            a, b = functional.elu(even + odd), functional.elu(even - odd)
            pair = torch.stack([a + b, a - b]) * 0.5
        if not self.has_odd_output:
            return pair[0] @ self.head[0] + self.head_bias
        even, odd = torch.bmm(pair, self.head).unbind(0)
        even = even + self.head_bias
        total, difference = even + odd, even - odd
        return 0.5 * (total + difference.index_select(-1, self.out_permutation) * self.out_signs)


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


def _init(copies: int, rows: int, columns: int) -> Tensor:
    weights = torch.empty(copies, rows, columns)
    for w in weights:
        nn.init.orthogonal_(w, gain=math.sqrt(2))
    return weights
