"""Distillation losses against hand-computed values, their limits and their gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.distill.losses import (
    LOSSES,
    Labels,
    Pair,
    Signal,
    TargetLogits,
    Traces,
    cross_entropy,
    forward_kl,
    hybrid,
    jensen_shannon,
    make_loss,
    places,
    reverse_kl,
    sequence,
    skew_kl,
    skew_reverse_kl,
    total_variation,
)
from draftsmith.errors import RequestError

P = torch.tensor([[0.5, 0.3, 0.2]])
Q = torch.tensor([[0.2, 0.3, 0.5]])
ALL = torch.tensor([[0, 1, 2]])
# Of labels, at temperature 1.
OF_LABELS = {"cross_entropy", "sequence"}
DISTANCES = sorted(set(LOSSES) - OF_LABELS)


def random_logits(seed: int, rows: int = 5, ids: int = 20, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, ids, generator=generator, dtype=torch.float64)


def traces_of(logits_AV: torch.Tensor, n: int) -> Traces:
    top = logits_AV.log_softmax(-1).topk(n)
    return Traces(top.indices, top.values)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def value(name: str, signal: Signal, logits_AV: torch.Tensor, **options: float) -> float:
    return float(LOSSES[name](signal.against(logits_AV), **options)[0].detach())


P_LIST, Q_LIST = P[0].tolist(), Q[0].tolist()
MIDDLE = [0.25 * a + 0.75 * b for a, b in zip(P_LIST, Q_LIST, strict=True)]
ACCEPTED = 0.7
LAMBDA = math.exp(-3 * ACCEPTED)
HAND_COMPUTED = {
    "forward_kl": (forward_kl, {}, 0.3 * math.log(2.5)),
    "reverse_kl": (reverse_kl, {}, 0.3 * math.log(2.5)),
    "jensen_shannon": (
        jensen_shannon,
        {"beta": 0.25},
        0.25 * kl(P_LIST, MIDDLE) + 0.75 * kl(Q_LIST, MIDDLE),
    ),
    "skew_kl": (skew_kl, {"alpha": 0.25}, kl(P_LIST, MIDDLE)),
    "skew_reverse_kl": (skew_reverse_kl, {"alpha": 0.75}, kl(Q_LIST, MIDDLE)),
    "total_variation": (total_variation, {}, 1 - ACCEPTED),
    "hybrid": (hybrid, {}, LAMBDA * 0.3 * math.log(2.5) + (1 - LAMBDA) * 0.3),
    "cross_entropy": (cross_entropy, {}, -math.log(0.2)),
}


def test_every_loss_is_computed_by_hand() -> None:
    # Labels alone are compared with torch's own cross-entropy, below.
    assert HAND_COMPUTED.keys() | {"sequence"} == LOSSES.keys()


@pytest.mark.parametrize("name", HAND_COMPUTED)
@pytest.mark.parametrize("signal", [TargetLogits(P.log()), Traces(ALL, P.log())])
def test_hand_computed(name: str, signal: Signal) -> None:
    """P = [.5, .3, .2], q = [.2, .3, .5], all three known; sums and counts add up over tokens."""
    loss, options, expected = HAND_COMPUTED[name]
    total, tokens = loss(signal.against(Q.log()), **options)
    assert (float(total), tokens) == (pytest.approx(expected, abs=1e-5), 1)
    pair = signal.against(Q.log())
    twice = Pair(
        pair.p.repeat(2, 1),
        pair.q.repeat(2, 1),
        None if pair.likeliest is None else pair.likeliest.repeat(2),
    )
    total, tokens = loss(twice, **options)
    assert (float(total), tokens) == (pytest.approx(2 * expected, abs=1e-5), 2)


def test_the_tail_is_one_outcome() -> None:
    """Only the first token is known: p = (.5, tail .5), q = (.2, tail .8)."""
    signal = Traces(ALL[:, :1], P[:, :1].log())
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert value("forward_kl", signal, Q.log()) == pytest.approx(expected, abs=1e-5)
    assert value("total_variation", signal, Q.log()) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("lacking", [-1, 2])
def test_ids_that_the_head_lacks_fall_into_the_tail(lacking: int) -> None:
    signal = Traces(torch.tensor([[0, lacking, 1]]), P.log())
    logits = torch.tensor([[0.2, 0.8]]).log()
    expected = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.8)
    expected += 0.3 * math.log(0.3 / 1e-6)
    assert value("forward_kl", signal, logits) == pytest.approx(expected, rel=1e-3)


def test_a_likeliest_token_that_the_head_lacks_has_no_cross_entropy() -> None:
    signal = Traces(torch.tensor([[-1, 0], [1, 0]]), torch.tensor([[0.6, 0.3], [0.5, 0.4]]).log())
    logits = torch.tensor([[0.2, 0.8], [0.2, 0.8]]).log()
    total, tokens = cross_entropy(signal.against(logits))
    assert (float(total), tokens) == (pytest.approx(-math.log(0.8)), 2)


def test_cross_entropy_on_given_labels() -> None:
    logits, labels = random_logits(0), torch.tensor([3, 0, 19, 7, 7])
    total, _ = cross_entropy(Traces.of_labels(labels).against(logits))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert float(total) == pytest.approx(float(expected))


@settings(max_examples=20, deadline=None)
@given(smoothing=st.floats(0, 0.9), seed=st.integers(0, 9))
def test_sequence_is_torchs_cross_entropy(smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 11, generator=generator) * 3
    labels = torch.randint(11, (5,), generator=generator)
    loss, tokens = sequence(Labels(labels, smoothing).against(logits))
    expected = torch.nn.functional.cross_entropy(
        logits, labels, label_smoothing=smoothing, reduction="sum"
    )
    assert tokens == 5
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    # Over some columns only, a label that is not among them counts as nothing.
    columns = torch.arange(0, 11, 2)
    some, _ = sequence(Labels(labels).over(columns).against(logits[:, columns]))
    known = labels % 2 == 0
    expected = torch.nn.functional.cross_entropy(
        logits[known][:, columns], labels[known] // 2, reduction="sum"
    )
    assert float(some) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", DISTANCES)
def test_zero_where_equal_and_positive_elsewhere(name: str, temperature: float) -> None:
    logits = random_logits(0)
    for signal in (TargetLogits(logits), traces_of(logits, 6)):
        equal = value(name, signal, logits, temperature=temperature)
        assert equal == pytest.approx(0, abs=1e-9)
        assert value(name, signal, -logits, temperature=temperature) > 0.01


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_extreme_logits_give_finite_values_and_gradients(name: str, temperature: float) -> None:
    """±60, and columns of −inf as padding leaves them, on either side or on both."""
    rows = [[60.0, -60.0, 0.0, -torch.inf, 1.0], [-60.0, 60.0, 60.0, -torch.inf, -torch.inf]]
    other = [[-60.0, 60.0, 0.0, -torch.inf, -torch.inf], [60.0, -60.0, 1.0, -torch.inf, 60.0]]
    top = torch.tensor([[0, 1, 3], [0, 2, 4]]), torch.tensor([[-60.0, -1e-3, -torch.inf]] * 2)
    options = {} if name in OF_LABELS else {"temperature": temperature}
    for signal in (TargetLogits(torch.tensor(other)), Traces(*top)):
        logits = torch.tensor(rows, requires_grad=True)
        total, _ = LOSSES[name](signal.against(logits), **options)
        total.backward()
        assert torch.isfinite(total)
        assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"hybrid"}))
def test_gradients_are_those_of_the_function(name: str, temperature: float) -> None:
    """In float64; the hybrid is left out, since its λ is meant to have none."""
    logits, target = random_logits(1, 3, 7).requires_grad_(), random_logits(2, 3, 7)
    loss = make_loss(name, temperature=temperature, beta=0.3, alpha=0.2)
    for signal in (TargetLogits(target), traces_of(target, 3)):
        assert torch.autograd.gradcheck(lambda x, s=signal: loss(s.against(x))[0], (logits,))


def test_the_hybrids_share_has_no_gradient() -> None:
    """Its slope is the mixture of the two slopes, with λ of each position held fixed."""
    logits, signal = random_logits(3).requires_grad_(), TargetLogits(random_logits(4))
    (slope,) = torch.autograd.grad(hybrid(signal.against(logits))[0], logits)
    slopes = [
        torch.autograd.grad(loss(signal.against(logits))[0], logits)[0]
        for loss in (forward_kl, total_variation)
    ]
    distances = [
        float(total_variation(signal[i : i + 1].against(logits[i : i + 1]))[0].detach())
        for i in range(5)
    ]
    share = torch.tensor([[math.exp(-3 * (1 - d))] for d in distances])
    assert torch.allclose(slope, share * slopes[0] + (1 - share) * slopes[1])


def test_jensen_shannon_has_the_two_kl_as_limits() -> None:
    signal, logits = TargetLogits(random_logits(5)), random_logits(6, scale=0.5)
    near = 1e-7
    left = value("jensen_shannon", signal, logits, beta=near) / near
    right = value("jensen_shannon", signal, logits, beta=1 - near) / near
    assert left == pytest.approx(value("forward_kl", signal, logits), rel=1e-3)
    assert right == pytest.approx(value("reverse_kl", signal, logits), rel=1e-3)
    assert left != pytest.approx(value("reverse_kl", signal, logits), rel=0.05)


def test_skews_go_over_into_kl() -> None:
    signal, logits = TargetLogits(random_logits(5)), random_logits(6)
    for skew, plain in (("skew_kl", "forward_kl"), ("skew_reverse_kl", "reverse_kl")):
        near = value(skew, signal, logits, alpha=1e-7)
        assert near == pytest.approx(value(plain, signal, logits), rel=1e-3)


@pytest.mark.parametrize("name", DISTANCES)
def test_temperature_softens_both(name: str) -> None:
    """As if both had their logits divided by it."""
    logits, target = random_logits(7), random_logits(8)
    softened = value(name, TargetLogits(target), logits, temperature=2.0)
    divided = value(name, TargetLogits(target / 2), logits / 2)
    assert softened == pytest.approx(divided, rel=1e-9)
    # Traces know p at temperature 1 and the tail as a whole: exact where they name everything.
    everything = value(name, traces_of(target, 20), logits, temperature=2.0)
    assert everything == pytest.approx(divided, rel=1e-2)


@pytest.mark.parametrize("name", LOSSES)
def test_A26_padding_has_no_say(name: str) -> None:
    """104 against 96 columns of 90 ids: the same for any padding logits, and as without padding."""
    target, logits = random_logits(9, ids=104), random_logits(10, ids=96)
    expected = value(name, TargetLogits(target[:, :90]), logits[:, :90])
    shuffled = torch.randperm(90, generator=torch.Generator().manual_seed(0)).sort().values
    for padding in (-50.0, 50.0):
        target[:, 90:], logits[:, 90:] = padding, padding
        for columns in (90, shuffled):
            signal = TargetLogits(target).over(columns)
            assert value(name, signal, logits[:, :90]) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(RequestError, match="drafter has 96 logits and the target 104"):
        TargetLogits(target).against(logits)


def test_places_in_columns() -> None:
    ids = torch.tensor([[0, 7, 9], [5, -1, 104]])
    assert places(ids, torch.tensor([5, 7])).tolist() == [[-1, 1, -1], [0, -1, -1]]
    assert places(ids, 8).tolist() == [[0, 7, -1], [5, -1, -1]]


def test_a_part_of_the_positions() -> None:
    logits = random_logits(11)
    for signal in (TargetLogits(random_logits(12)), traces_of(random_logits(12), 4)):
        whole = value("forward_kl", signal, logits)
        parts = [value("forward_kl", signal[i : i + 2], logits[i : i + 2]) for i in (0, 2, 4)]
        assert sum(parts) == pytest.approx(whole)


LOGITS = st.lists(st.floats(-60, 60), min_size=8, max_size=8)


@settings(deadline=None)
@given(target=LOGITS, drafter=LOGITS, beta=st.floats(0.01, 0.99))
def test_properties(target: list[float], drafter: list[float], beta: float) -> None:
    p, q = (torch.tensor([x], dtype=torch.float64) for x in (target, drafter))
    for name in DISTANCES:
        assert value(name, TargetLogits(p), q) >= -1e-9, name
    assert value("total_variation", TargetLogits(p), q) <= 1 + 1e-9
    there = value("jensen_shannon", TargetLogits(p), q, beta=beta)
    back = value("jensen_shannon", TargetLogits(q), p, beta=1 - beta)
    assert there == pytest.approx(back, abs=1e-9)
    half = value("jensen_shannon", TargetLogits(p), q)
    assert half == pytest.approx(value("jensen_shannon", TargetLogits(q), p), abs=1e-9)
    assert half <= math.log(2) + 1e-9
    # Pinsker: little KL means much acceptance.
    distance = value("total_variation", TargetLogits(p), q)
    assert distance <= math.sqrt(value("forward_kl", TargetLogits(p), q) / 2 + 1e-12) + 1e-6


@settings(deadline=None)
@given(target=LOGITS, drafter=LOGITS)
def test_traces_of_everything_equal_the_logits(target: list[float], drafter: list[float]) -> None:
    p, q = (torch.tensor([x], dtype=torch.float64) for x in (target, drafter))
    for name in DISTANCES:
        known = value(name, traces_of(p, 8), q)
        assert known == pytest.approx(value(name, TargetLogits(p), q), rel=1e-3, abs=1e-3), name


@settings(deadline=None)
@given(target=LOGITS, drafter=LOGITS, n=st.integers(1, 7))
def test_traces_are_a_lower_bound(target: list[float], drafter: list[float], n: int) -> None:
    p, q = (torch.tensor([x], dtype=torch.float64) for x in (target, drafter))
    for name in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"):
        known = value(name, traces_of(p, n), q)
        assert known <= value(name, TargetLogits(p), q) + 1e-3, name


def test_make_loss_mixes_in_cross_entropy() -> None:
    """Softened gradients shrink as 1/T², so the soft part counts T² times."""
    pair = TargetLogits(random_logits(13)).against(random_logits(14))
    soft, hard = (float(loss[0]) for loss in (skew_kl(pair, 2.0, 0.3), cross_entropy(pair)))
    alone = make_loss("skew_kl", temperature=2.0, alpha=0.3)
    assert float(alone(pair)[0]) == pytest.approx(soft)
    mixed = make_loss("skew_kl", temperature=2.0, alpha=0.3, cross_entropy_share=0.25)
    assert float(mixed(pair)[0]) == pytest.approx(0.75 * 4 * soft + 0.25 * hard)
    assert mixed(pair)[1] == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kl", {}, "loss 'kl': must be one of forward_kl"),
        ("jensen_shannon", {"beta": 0.0}, r"beta 0\.0: it must lie between"),
        ("jensen_shannon", {"beta": 1.0}, r"beta 1\.0: it must lie between"),
        ("skew_kl", {"alpha": 1.0}, r"alpha 1\.0: it must lie between"),
        ("skew_reverse_kl", {"alpha": -0.1}, r"alpha -0\.1: it must lie between"),
        ("forward_kl", {"temperature": 0.0}, r"temperature 0\.0: it must be positive"),
        ("hybrid", {"temperature": float("nan")}, "temperature nan: it must be positive"),
    ],
)
def test_impossible_losses_are_refused_at_once(
    name: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make_loss(name, **options)
