"""Distillation losses against hand-computed and plain ones."""

import math

import pytest
import torch

from draftsmith.distill.losses import LOSSES, forward_kl, reverse_kl, total_variation

P = torch.tensor([[0.5, 0.3, 0.2]])
Q = torch.tensor([[0.2, 0.3, 0.5]])
ALL = torch.tensor([[0, 1, 2]])


def test_hand_computed() -> None:
    """P = [.5, .3, .2], q = [.2, .3, .5], all three known."""
    kl = 0.3 * math.log(2.5)
    args = (Q.log(), ALL, P.log())
    assert float(forward_kl(*args)[0]) == pytest.approx(kl, abs=1e-4)
    assert float(reverse_kl(*args)[0]) == pytest.approx(kl, abs=1e-4)
    assert float(total_variation(*args)[0]) == pytest.approx(0.3, abs=1e-5)
    assert forward_kl(*args)[1] == 1


def test_the_tail_is_one_outcome() -> None:
    """Only the first token is known: p = (.5, tail .5), q = (.2, tail .8)."""
    args = (Q.log(), ALL[:, :1], P[:, :1].log())
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert float(forward_kl(*args)[0]) == pytest.approx(expected, abs=1e-5)
    assert float(total_variation(*args)[0]) == pytest.approx(0.3, abs=1e-6)


def test_ids_that_the_head_lacks_fall_into_the_tail() -> None:
    columns = torch.tensor([[0, -1, 1]])
    logits = torch.tensor([[0.2, 0.8]]).log()
    expected = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.8)
    expected += 0.3 * math.log(0.3 / 1e-6)
    assert float(forward_kl(logits, columns, P.log())[0]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_zero_where_equal_and_positive_elsewhere(name: str) -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    top = logits.log_softmax(-1).topk(6)
    assert float(LOSSES[name](logits, top.indices, top.values)[0]) == pytest.approx(0, abs=1e-4)
    assert float(LOSSES[name](-logits, top.indices, top.values)[0]) > 0.1


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_extreme_logits_give_finite_gradients(name: str) -> None:
    """±60, and columns of −inf as padding leaves them."""
    logits = torch.tensor([[60.0, -60.0, 0.0, -torch.inf], [-60.0, 60.0, 60.0, -torch.inf]])
    logits.requires_grad_()
    top = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[-60.0, -1e-3], [-0.1, -3.0]])
    LOSSES[name](logits, *top)[0].backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_are_those_of_the_function(name: str) -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    teacher = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)).log_softmax(-1).topk(3)

    def value(x: torch.Tensor) -> float:
        return float(LOSSES[name](x, teacher.indices, teacher.values)[0])

    LOSSES[name](logits, teacher.indices, teacher.values)[0].backward()
    with torch.no_grad():
        for i, j in ((0, 0), (1, 3), (0, 5)):
            step = torch.zeros(2, 6)
            step[i, j] = 1e-2
            slope = (value(logits + step) - value(logits - step)) / 2e-2
            assert float(logits.grad[i, j]) == pytest.approx(slope, abs=3e-3)
