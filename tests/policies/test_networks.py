from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from policies.interface import initial_state, restarted
from policies.networks import FeedForwardActor, Mirror, RecurrentActor, SymmetricMLP, SymmetricModel
from robots.errors import UserError

IN, OUT = 9, 5


def random_mirror(size: int, seed: int) -> Mirror:
    """A random involution: some elements swap places, some keep them, with signs that undo themselves."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=draw)
    permutation, signs = torch.arange(size), torch.ones(size)
    for i, j in zip(order[: size // 3], order[size // 3 : 2 * (size // 3)], strict=True):
        permutation[i], permutation[j] = j, i
        signs[i] = signs[j] = 1.0 if torch.rand(1, generator=draw) < 0.5 else -1.0
    signs[order[-1]] = -1
    return permutation, signs


IN_MIRROR, OUT_MIRROR = random_mirror(IN, 0), random_mirror(OUT, 1)


def show(values: Tensor, mirror: Mirror) -> Tensor:
    return values[..., mirror[0]] * mirror[1]


def randomized(network: nn.Module) -> nn.Module:
    """All parameters random, biases too: symmetry must not hang on how a network starts."""
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape) * 0.5)
    return network


def make(out_mirror: Mirror | None = OUT_MIRROR, widths: tuple[int, ...] = (16, 8), **options: object) -> SymmetricMLP:
    torch.manual_seed(2)
    return randomized(SymmetricMLP(IN_MIRROR, OUT, out_mirror, widths, **options))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(20, IN, generator=torch.Generator().manual_seed(3))


# ---- symmetry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(16,), (16, 8), (8, 32, 4)])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("ensemble", [1, 2, 3])
def test_a_mirrored_input_gives_the_mirrored_output(
    x: Tensor, widths: tuple[int, ...], layer_norm: bool, ensemble: int
) -> None:
    network = make(widths=widths, layer_norm=layer_norm, ensemble=ensemble)
    y = network(x)
    torch.testing.assert_close(network(show(x, IN_MIRROR)), show(y, OUT_MIRROR), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(y, show(y, OUT_MIRROR), atol=1e-2)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("ensemble", [1, 2])
def test_a_value_does_not_tell_a_state_from_its_mirror_image(x: Tensor, layer_norm: bool, ensemble: int) -> None:
    network = make(out_mirror=None, layer_norm=layer_norm, ensemble=ensemble)
    y = network(x)
    torch.testing.assert_close(network(show(x, IN_MIRROR)), y, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(network(x + 0.5), y, atol=1e-2)


def test_it_is_the_plain_network_it_stands_for(x: Tensor) -> None:
    """Even and odd halves are a bookkeeping trick: the same function by way of full-width linear layers.

    With h(x) the activations of x and h(Mx) those of its mirror image, a layer is h'(x) = elu(W+ h+ + b + W- h-) with
    h+- = (h(x) +- h(Mx)) / 2.
    """
    network = make()
    here, there = x, show(x, IN_MIRROR)
    for weight, bias in zip(network.weights, network.biases, strict=True):
        plus, minus = 0.5 * (here + there) @ weight[0] + bias[0], 0.5 * (here - there) @ weight[1]
        here, there = nn.functional.elu(plus + minus), nn.functional.elu(plus - minus)
    plus, minus = 0.5 * (here + there) @ network.head[0] + network.head_bias[0], 0.5 * (here - there) @ network.head[1]
    expected = 0.5 * (plus + minus + show(plus - minus, OUT_MIRROR))
    torch.testing.assert_close(network(x), expected, atol=1e-5, rtol=1e-5)


def test_layer_norm_takes_mean_and_scale_over_both_halves(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes into the activation, both halves together, has mean 0 and variance 1."""
    network = make(out_mirror=None, widths=(64,), layer_norm=True)
    seen: list[Tensor] = []
    monkeypatch.setattr(nn.functional, "elu", lambda a: seen.append(a) or a)
    network(x)
    both = torch.cat(seen, dim=-1)
    torch.testing.assert_close(both.mean(-1), torch.zeros(1, 20), atol=1e-5, rtol=0)
    torch.testing.assert_close(both.var(-1, correction=0), torch.ones(1, 20), atol=1e-3, rtol=0)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_members_of_an_ensemble_are_networks_of_their_own(x: Tensor) -> None:
    both = make(ensemble=2, layer_norm=True)
    y = both(x)
    assert y.shape == (2, 20, OUT)
    assert not torch.allclose(y[0], y[1], atol=1e-2)
    for member in range(2):
        alone = make(layer_norm=True)
        with torch.no_grad():
            for mine, theirs in zip(
                [*alone.weights, alone.head], [*both.weights, both.head], strict=True
            ):  # even parts of all, then odd parts of all
                mine.copy_(theirs[[member, 2 + member]])
            for mine, theirs in zip([*alone.biases, alone.head_bias], [*both.biases, both.head_bias], strict=True):
                mine.copy_(theirs[[member]])
        torch.testing.assert_close(alone(x), y[member], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ensemble", [1, 2])
@pytest.mark.parametrize("out_mirror", [OUT_MIRROR, None], ids=["odd", "even"])
def test_a_batch_is_computed_as_its_rows_are(x: Tensor, ensemble: int, out_mirror: Mirror | None) -> None:
    network = make(out_mirror=out_mirror, ensemble=ensemble, layer_norm=True)
    rows = torch.cat([network(row[None]) for row in x], dim=-2)
    torch.testing.assert_close(network(x), rows, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ensemble", [1, 2])
def test_leading_axes_are_kept(x: Tensor, ensemble: int) -> None:
    network = make(ensemble=ensemble)
    y = network(x.view(4, 5, IN))
    assert y.shape == (*([2] if ensemble == 2 else []), 4, 5, OUT)
    torch.testing.assert_close(y.flatten(-3, -2), network(x), atol=0, rtol=0)


@pytest.mark.parametrize(("out_mirror", "heads"), [(OUT_MIRROR, 2), (None, 1)])
def test_it_has_half_the_weights_of_a_plain_network(out_mirror: Mirror | None, heads: int) -> None:
    widths = (16, 8)
    network = make(out_mirror=out_mirror, widths=widths)
    halves = [IN, *(w // 2 for w in widths)]
    layers = sum(2 * a * b + b for a, b in pairwise(halves))
    assert sum(p.numel() for p in network.parameters()) == layers + heads * halves[-1] * OUT + OUT


def test_every_weight_learns(x: Tensor) -> None:
    for network in (make(layer_norm=True, ensemble=2), make(out_mirror=None)):
        network(x).square().sum().backward()
        for name, p in network.named_parameters():
            assert p.grad is not None, name
            assert (p.grad != 0).any(), name
            assert torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize("width", [15, 1, 0, -2])
def test_a_layer_that_has_no_two_halves_is_refused(width: int) -> None:
    with pytest.raises(UserError, match=f"even number of units, found {width}"):
        make(widths=(16, width))


def test_it_stands_in_rsl_rls_model_with_small_first_actions(x: Tensor) -> None:
    obs = TensorDict({"actor": x}, batch_size=[20])
    groups = {"actor": ["actor"]}
    full, small = (
        SymmetricModel(obs, groups, "actor", OUT, (16, 8), IN_MIRROR, OUT_MIRROR, head_gain=g) for g in (1.0, 0.01)
    )
    small.mlp.load_state_dict({**full.mlp.state_dict(), "head": 0.01 * full.mlp.head})
    torch.testing.assert_close(small(obs), 0.01 * full(obs), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(small(obs), small.mlp(x))
    fresh = SymmetricModel(obs, groups, "actor", OUT, (16, 8), IN_MIRROR, OUT_MIRROR, head_gain=0.01)
    assert 0 < fresh(obs).abs().max() < 0.2


# ---- actors ----------------------------------------------------------------------------------------------------------


def make_recurrent(kind: type[nn.LSTM | nn.GRU], layers: int = 1) -> tuple[nn.LSTM | nn.GRU, nn.Module]:
    torch.manual_seed(4)
    return kind(IN, 6, layers), nn.Linear(6, OUT)


def test_an_actor_without_memory_has_no_state(x: Tensor) -> None:
    network = make()
    actor = FeedForwardActor(network)
    action, state = actor(x, {})
    assert actor.states == state == {}
    assert torch.equal(action, network(x))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kind", "names"), [(nn.LSTM, ["hidden", "cell"]), (nn.GRU, ["hidden"])])
def test_an_actor_with_explicit_memory_is_the_network_run_over_time(
    kind: type[nn.LSTM | nn.GRU], names: list[str], layers: int
) -> None:
    memory, network = make_recurrent(kind, layers)
    actor, sequence = RecurrentActor(memory, network), torch.randn(10, 3, IN)
    expected, _ = memory(sequence)
    state = initial_state(actor.states, 3)
    assert list(state) == names
    assert all(v.shape == (3, layers, 6) for v in state.values())
    for obs, latent in zip(sequence, expected, strict=True):
        action, state = actor(obs, state)
        torch.testing.assert_close(action, network(latent), atol=1e-6, rtol=1e-5)
        assert {k: v.shape for k, v in state.items()} == dict.fromkeys(names, (3, layers, 6))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_robot_that_starts_anew_forgets_and_the_others_do_not(kind: type[nn.LSTM | nn.GRU]) -> None:
    actor, obs = RecurrentActor(*make_recurrent(kind)), torch.randn(3, IN)
    fresh = initial_state(actor.states, 3)
    first, state = actor(obs, fresh)
    later, _ = actor(obs, state)
    mixed, _ = actor(obs, restarted(state, actor.states, torch.tensor([1])))
    torch.testing.assert_close(mixed[1], first[1])
    torch.testing.assert_close(mixed[[0, 2]], later[[0, 2]])
    assert not torch.allclose(first, later, atol=1e-4)


@pytest.mark.parametrize("recurrent", [False, True])
def test_an_actor_is_a_snapshot_that_learning_does_not_reach(x: Tensor, recurrent: bool) -> None:
    memory, network = make_recurrent(nn.LSTM)
    plain = make()
    actor = RecurrentActor(memory, network) if recurrent else FeedForwardActor(plain)
    state = initial_state(actor.states, 20)
    before = actor(x, state)[0]
    randomized(memory)
    randomized(network)
    randomized(plain)
    assert torch.equal(actor(x, state)[0], before)
    assert not any(p.requires_grad for p in actor.parameters())
    assert plain.training
    assert memory.training
    assert not any(m.training for m in actor.children())
