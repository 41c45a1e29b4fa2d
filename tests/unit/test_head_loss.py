"""Projection and loss by chunks, against the plain computation."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from draftsmith.data.traces import TraceRow
from draftsmith.distill.head_loss import (
    LEAST_TOKENS,
    HeadLoss,
    LiveTarget,
    LossHead,
    Projection,
    chunk_tokens,
)
from draftsmith.distill.losses import LOSSES, Loss, Signal, TargetLogits, Traces, make_loss
from draftsmith.errors import RequestError

TOKENS, WIDTH, TARGET_WIDTH, VOCABULARY = 23, 16, 24, 96
# Four tokens a chunk, with a last one that is not full.
SMALL = 4 * 4 * 8 * VOCABULARY


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def hidden_and_weight() -> tuple[torch.Tensor, nn.Parameter]:
    hidden = normal(TOKENS, WIDTH, seed=0).requires_grad_()
    return hidden, nn.Parameter(0.5 * normal(VOCABULARY, WIDTH, seed=1))


def live(vocabulary: int = VOCABULARY, **options: Any) -> LiveTarget:
    weight = 0.5 * normal(vocabulary, TARGET_WIDTH, seed=2)
    return LiveTarget(normal(TOKENS, TARGET_WIDTH, seed=3), Projection(weight, **options))


def traces(n: int = 6) -> Traces:
    target = live()
    top = target.head(target.hidden).log_softmax(-1).topk(n)
    return Traces(top.indices, top.values)


def plain(
    loss: Loss, hidden: torch.Tensor, head: Projection, signal: Signal, tokens: int = TOKENS
) -> torch.Tensor:
    """All logits at once, mean over tokens."""
    if isinstance(signal, LiveTarget):
        signal = TargetLogits(signal.head(signal.hidden))
    return loss(signal.against(head(hidden)))[0] / tokens


def slopes(value: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Gradients as training gets them; they are cleared for the next."""
    value.backward()
    found = []
    for leaf in leaves:
        assert leaf.grad is not None
        found.append(leaf.grad)
        leaf.grad = None
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("signal", [live(), traces()], ids=["live", "traces"])
def test_equals_the_plain_computation(name: str, signal: Signal) -> None:
    """Values, and gradients of hidden states and head weight, to 1e-5 in float32."""
    hidden, weight = hidden_and_weight()
    loss = make_loss(name, cross_entropy_share=0.3, temperature=1.3)
    expected = plain(loss, hidden, Projection(weight), signal)
    chunked = HeadLoss(loss, chunk_bytes=SMALL)(hidden, weight, signal) / TOKENS
    assert float(chunked.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    for a, b in zip(slopes(chunked, hidden, weight), slopes(expected, hidden, weight), strict=True):
        assert a.abs().max() > 1e-3
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def test_bias_scale_and_softcap() -> None:
    hidden, weight = hidden_and_weight()
    bias = nn.Parameter(normal(VOCABULARY, seed=4))
    options = {"scale": 0.7, "softcap": 3.0}
    signal = live(bias=normal(VOCABULARY, seed=5), scale=1.5, softcap=4.0)
    loss = make_loss("jensen_shannon")
    raw = hidden @ weight.T + bias
    assert torch.allclose(
        Projection(weight, bias, **options)(hidden), 3.0 * (0.7 * raw / 3.0).tanh()
    )
    expected = plain(loss, hidden, Projection(weight, bias, **options), signal)
    head = LossHead(HeadLoss(loss, chunk_bytes=SMALL), weight, bias, **options)
    chunked = head(hidden, signal) / TOKENS
    assert float(chunked.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    leaves = hidden, weight, bias
    for a, b in zip(slopes(chunked, *leaves), slopes(expected, *leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_positions_count_what_their_weights_say(name: str) -> None:
    """Chunked and whole: the sum over positions, each times its weight."""
    hidden, weight = hidden_and_weight()
    signal, loss, weights = live(), make_loss(name), normal(TOKENS, seed=6).abs()
    chunked = HeadLoss(loss, chunk_bytes=SMALL)(hidden, weight, signal, weights)
    apart = [
        HeadLoss(loss)(hidden[i : i + 1], weight, signal[i : i + 1]) * weights[i]
        for i in range(TOKENS)
    ]
    total = torch.stack(apart).sum()
    (expected,) = slopes(total, hidden)
    assert float(chunked.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    (found,) = slopes(chunked, hidden)
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("learns", [True, False])
def test_the_likeliest_ids_are_those_of_all_logits(learns: bool) -> None:
    """Without a signal, chunk by chunk; over some columns they are ids all the same."""
    hidden, weight = hidden_and_weight()
    weight.requires_grad_(learns)
    columns = torch.arange(1, VOCABULARY, 3)
    logits = hidden @ weight.T
    for chosen, expected in (
        (None, logits.argmax(-1)),
        (50, logits[:, :50].argmax(-1)),
        (columns, columns[logits[:, columns].argmax(-1)]),
    ):
        head_loss = HeadLoss(make_loss("forward_kl"), chosen, chunk_bytes=SMALL)
        assert torch.equal(LossHead(head_loss, weight)(hidden, None), expected)


def test_float64_stays_float64() -> None:
    """To the last digits of the plain computation, whose gradients are checked numerically."""
    hidden = normal(5, 3, seed=6, dtype=torch.float64).requires_grad_()
    weight = normal(7, 3, seed=7, dtype=torch.float64).requires_grad_()
    bias = normal(7, seed=8, dtype=torch.float64).requires_grad_()
    signal = TargetLogits(normal(5, 7, seed=9, dtype=torch.float64))
    loss, leaves = make_loss("skew_reverse_kl"), (hidden, weight, bias)
    head_loss = HeadLoss(loss, chunk_bytes=4 * 8 * 7 * 2)
    assert chunk_tokens(5, 7, head_loss.chunk_bytes) == 2
    expected = slopes(plain(loss, hidden, Projection(weight, bias), signal, 1), *leaves)
    chunked = slopes(head_loss(hidden, Projection(weight, bias), signal), *leaves)
    for a, b in zip(chunked, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-13)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("columns", [80, torch.arange(1, VOCABULARY, 2)], ids=["first", "some"])
@pytest.mark.parametrize("signal", [live(104), traces()], ids=["live", "traces"])
def test_over_some_columns(signal: Signal, columns: torch.Tensor | int, frozen: bool) -> None:
    """Both are normalised over these alone; other rows of the head get no gradient."""
    hidden, weight = hidden_and_weight()
    ids = torch.arange(columns) if isinstance(columns, int) else columns
    loss = make_loss("forward_kl", cross_entropy_share=0.5)
    expected = plain(loss, hidden, Projection(weight[ids]), signal.over(columns))
    (hidden_slope, weight_slope) = slopes(expected, hidden, weight)
    weight.requires_grad_(not frozen)
    head = LossHead(HeadLoss(loss, columns, chunk_bytes=SMALL), weight)
    assert head.weight.shape[0] == (len(ids) if frozen else VOCABULARY)
    chunked = head(hidden, signal) / TOKENS
    assert float(chunked.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    chunked.backward()
    assert torch.allclose(hidden.grad, hidden_slope, atol=1e-5)
    if frozen:
        assert weight.grad is None
        return
    assert torch.allclose(weight.grad, weight_slope, atol=1e-5)
    others = [i for i in range(VOCABULARY) if i not in ids]
    assert float(weight.grad[others].abs().max()) == 0.0


def test_the_commonest_columns() -> None:
    """Ids 3 and 7 twice, 5 once; 104 is not an id of the drafter."""
    ids = np.array([[7, 3], [3, 104], [5, 7]], np.uint16)
    nothing = np.zeros(3, np.float32)
    row = TraceRow(np.zeros(4, np.int32), 1, False, nothing, ids, np.zeros((3, 2), np.float16))
    loss = make_loss("forward_kl")
    columns = HeadLoss.over_commonest(loss, [row], VOCABULARY, 2).columns
    assert isinstance(columns, torch.Tensor)
    assert columns.tolist() == [3, 7]
    assert HeadLoss.over_commonest(loss, [row], VOCABULARY, None).columns is None


def test_A26_padding_of_either_vocabulary_has_no_say() -> None:
    """104 against 96 columns of 90 ids, with padding logits of +50 and −50."""
    values = []
    for padding in (50.0, -50.0):
        hidden, weight = hidden_and_weight()
        bias = torch.zeros(VOCABULARY).index_fill(0, torch.arange(90, VOCABULARY), padding)
        target_bias = torch.zeros(104).index_fill(0, torch.arange(90, 104), -padding)
        head = LossHead(HeadLoss(make_loss("forward_kl"), 90), weight, nn.Parameter(bias))
        values.append(float(head(hidden, live(104, bias=target_bias)).detach()))
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    hidden, weight = hidden_and_weight()
    with pytest.raises(RequestError, match="drafter has 96 logits and the target 104"):
        HeadLoss(make_loss("forward_kl"))(hidden, weight, live(104))


def test_nothing_is_computed_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen head has no gradient, nor has anything without grad mode."""
    hidden, weight = hidden_and_weight()
    weight.requires_grad_(False)
    head_loss = HeadLoss(make_loss("forward_kl"))
    head_loss(hidden, weight, traces()).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    target = live()
    target.hidden.requires_grad_()
    head_loss(hidden, weight, target).backward()
    assert target.hidden.grad is None
    monkeypatch.setattr(torch.autograd, "grad", None)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not head_loss(hidden, weight, traces()).requires_grad


def test_only_the_head_may_learn() -> None:
    hidden, weight = hidden_and_weight()
    HeadLoss(make_loss("forward_kl"))(hidden.detach(), weight, traces()).backward()
    assert weight.grad is not None


@pytest.mark.parametrize("signal", [live(), traces()], ids=["live", "traces"])
def test_bfloat16_autocast(signal: Signal) -> None:
    """Products in bfloat16, sums and the gradients of float32 weights in float32."""
    hidden, weight = hidden_and_weight()
    loss = make_loss("forward_kl")
    exact = slopes(plain(loss, hidden, Projection(weight), signal), hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(loss, hidden, Projection(weight), signal)
        chunked = HeadLoss(loss, chunk_bytes=SMALL)(hidden, weight, signal) / TOKENS
    assert chunked.dtype == torch.float32
    assert float(chunked.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    for a, b in zip(slopes(chunked, hidden, weight), exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 2e-2


def test_many_chunks_in_bfloat16_add_up_in_float32() -> None:
    """Thousands of equal chunks: a sum in bfloat16 would stop to grow at 256 of them."""
    tokens = 1024
    hidden = normal(1, 4, seed=0, dtype=torch.bfloat16).repeat(tokens, 1)
    weight = nn.Parameter(normal(8, 4, seed=1, dtype=torch.bfloat16))
    signal = Traces.of_labels(torch.zeros(tokens, dtype=torch.long))
    loss = make_loss("cross_entropy")
    (once,) = slopes(HeadLoss(loss)(hidden[:1], weight, signal[:1]), weight)
    (many,) = slopes(HeadLoss(loss, chunk_bytes=1)(hidden, weight, signal), weight)
    assert many.dtype == torch.bfloat16
    assert torch.allclose(many.float() / tokens, once.float(), rtol=1e-2)


def test_no_tokens() -> None:
    hidden, weight = hidden_and_weight()
    total = HeadLoss(make_loss("forward_kl"))(hidden[:0], weight, traces()[:0])
    assert float(total.detach()) == 0.0
    (hidden_slope, weight_slope) = slopes(total, hidden, weight)
    assert float(hidden_slope.abs().max()) == float(weight_slope.abs().max()) == 0.0


def test_one_backward_pass_only() -> None:
    """The gradients are handed out, not copied; asking for them again must not give wrong ones."""
    hidden, weight = hidden_and_weight()
    total = HeadLoss(make_loss("forward_kl"))(hidden, weight, traces())
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        total.backward()


def test_gradients_accumulate_over_micro_batches() -> None:
    hidden, weight = hidden_and_weight()
    head, signal = HeadLoss(make_loss("forward_kl"), chunk_bytes=SMALL), traces()
    (whole,) = slopes(head(hidden, weight, signal), weight)
    for rows in (slice(0, 10), slice(10, TOKENS)):
        head(hidden[rows], weight, signal[rows]).backward()
    assert torch.allclose(weight.grad, whole, atol=1e-4)


def test_the_module_owns_the_weight() -> None:
    """The same parameter as the model's head, so that both learn as one."""
    lm_head = nn.Linear(WIDTH, VOCABULARY)
    head = LossHead(HeadLoss(make_loss("forward_kl")), lm_head.weight, lm_head.bias)
    owned = dict(head.named_parameters())
    assert owned["weight"] is lm_head.weight
    assert owned["bias"] is lm_head.bias


def test_no_tensor_of_all_logits_exists() -> None:
    """The largest tensor made on the way, as torch sees it, is a chunk's or the weight's."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            result = function(*arguments, **(options or {}))
            leaves = tree_leaves(result)
            sizes.extend(x.numel() for x in leaves if isinstance(x, torch.Tensor))
            return result

    hidden, weight = hidden_and_weight()
    with Watch():
        HeadLoss(make_loss("hybrid"), chunk_bytes=SMALL)(hidden, weight, live()).backward()
    assert max(sizes) == VOCABULARY * TARGET_WIDTH
    with Watch():
        plain(make_loss("hybrid"), hidden, Projection(weight), live()).backward()
    assert max(sizes) == VOCABULARY * max(TARGET_WIDTH, TOKENS)


@pytest.mark.parametrize(
    ("tokens", "chunk_bytes", "expected"),
    [(100, 4 * 8 * 10 * 60, 50), (100, 10**9, 100), (100, 1, 1), (0, 10**9, 1)],
)
def test_chunks_fit_the_memory_and_are_even(tokens: int, chunk_bytes: int, expected: int) -> None:
    """Of 60 tokens that fit, 50: two equal chunks instead of 60 and 40."""
    assert chunk_tokens(tokens, 10, chunk_bytes) == expected


def test_a_large_vocabulary_does_not_shrink_chunks_to_nothing() -> None:
    """Else every few tokens would read the whole head again; unless memory is given."""
    assert chunk_tokens(2048, 10**6) == pytest.approx(LEAST_TOKENS, abs=1)
    assert chunk_tokens(2048, 10**6, 2**20) == 1
