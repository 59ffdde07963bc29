"""influence(): against torch's Jacobian, and models whose reach is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import masks
from clearhead.models import RNN
from tests.test_cutting import gpt, tokens


class Mixer(nn.Module):
    """Position i is a known mixture of earlier positions."""

    def __init__(self, mixture: torch.Tensor):
        super().__init__()
        self.mixture = mixture

    def forward(self, x):
        return self.mixture @ x


def test_a_linear_mixture_has_its_own_factors():
    mixture = torch.tensor([[1.0, 0, 0], [2, -3, 0], [0, 4, 5]])
    x = torch.randn(2, 3, 7)
    for position in range(3):
        got = ch.influence(Mixer(mixture), x, position=position)
        want = mixture[position].abs() * 7**0.5
        torch.testing.assert_close(got, want.expand(2, 3))


def test_float_inputs_against_the_jacobian():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = ~masks.causal().dense(5)

    def model(x):
        return layer(x, src_mask=mask)

    got = ch.influence(model, x, position=3)
    for sample in range(2):
        jacobian = torch.autograd.functional.jacobian(lambda one: model(one[None])[0, 3], x[sample])
        want = jacobian.square().sum((0, 2)).sqrt()
        torch.testing.assert_close(got[sample], want, rtol=1e-10, atol=1e-12)
    assert (got[:, 4] == 0).all()


def test_token_inputs_against_the_jacobian():
    model, ids = gpt().double(), tokens()
    vectors = model.embedding(ids).detach()
    got = ch.influence(model, ids, position=7)

    def of(vectors):
        handle = model.embedding.register_forward_hook(lambda *_: vectors)
        try:
            return model(ids)[:, 7]
        finally:
            handle.remove()

    jacobian = torch.autograd.functional.jacobian(of, vectors)
    for sample in range(2):
        want = torch.as_tensor(jacobian)[sample, :, sample].square().sum((0, 2)).sqrt()
        torch.testing.assert_close(got[sample], want, rtol=1e-10, atol=1e-12)
    assert (got[:, 8:] == 0).all()


def test_probes_come_near_the_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 200)).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    got = ch.influence(model, x, position=1, probes=512)
    jacobian = torch.autograd.functional.jacobian(model, x[0, 1])
    assert got[0, 1].item() == pytest.approx(jacobian.norm().item(), rel=0.1)
    assert got[0, 0] == got[0, 2] == 0


def test_swap_against_the_change_itself():
    mixture = torch.tensor([[1.0, 0, 0], [2, -3, 0], [0, 4, 5]])
    x = torch.randn(2, 3, 7)
    got = ch.influence(Mixer(mixture), x, position=2, how="swap", swaps=1, seed=3)
    steps = int(torch.randint(1, 3, (), generator=torch.Generator().manual_seed(3)))
    change = (x.roll(steps, 1) - x).norm(dim=-1) * torch.tensor([0.0, 4, 5])
    torch.testing.assert_close(got, change)


@pytest.mark.parametrize("how", ["jacobian", "swap"])
def test_reach_of_known_models(how):
    model, ids = gpt(), tokens()
    reach = ch.influence(model, ids, position=5, how=how)
    assert (reach[:, :6] > 0).all()
    assert (reach[:, 6:] == 0).all()
    window = ch.influence(lambda ids: model(ids, mask=masks.window(2)), ids, position=8, how="swap")
    # two layers, each of which reads its own position and the one before
    assert (window[:, 6:9] > 0).all()
    assert (window[:, :6] == 0).all()
    torch.manual_seed(0)
    rnn = RNN(31, layers=1, width=16).eval()
    assert (ch.influence(rnn, ids, position=5, how=how)[:, 6:] == 0).all()


def test_dict_inputs_encoder_decoder_and_nothing_left_behind():
    from tests.architectures import ALL

    (one,) = [architecture for architecture in ALL if architecture.name == "T5"]
    model, inputs = one.make("sdpa"), one.read()
    state, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in model.modules()]
    for how in ("jacobian", "swap"):
        reach = ch.influence(model, inputs, position=3, how=how)
        assert reach.shape == (2, 7)
        assert (reach[:, :4] > 0).all()
        assert reach[:, 4:].max() == 0
    assert torch.equal(state, torch.get_rng_state())
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "look"}, "how: is one of jacobian, swap"),
        ({"position": 11}, "position: is within the 11 positions"),
        ({"position": 1.0}, "position: is a number"),
        ({"probes": 0}, "probes: is 1 or more"),
        ({"swaps": 0}, "swaps: is 1 or more"),
        ({"output": lambda x: x.sum()}, "model: must give an output"),
    ],
)
def test_refusals(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ch.influence(gpt(), tokens(), **options)


def test_one_token_and_one_position():
    model = gpt()
    assert ch.influence(model, torch.tensor([[3]])).shape == (1, 1)
    with pytest.raises(ValueError, match="one token"):
        ch.influence(RNN(1, width=8).eval(), torch.zeros(1, 4, dtype=torch.int64), how="swap")
    with pytest.raises(ValueError, match="have one position"):
        ch.influence(nn.Linear(3, 3), torch.ones(1, 1, 3), how="swap")
    with pytest.raises(ValueError, match="no embedding"):
        ch.influence(lambda ids: nn.functional.one_hot(ids).float(), torch.tensor([[1, 2]]))
