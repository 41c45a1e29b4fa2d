"""Trace rows as batches: what is kept, what is masked, and in which order."""

from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import BatchStream, collate
from draftsmith.distill.head_loss import HeadLoss
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.train import mean_over_step
from draftsmith.errors import DraftsmithError
from tests.conftest import TINY_VOCAB, make_model


def trace_rows(
    count: int, model: Any = None, lengths: tuple[int, int] = (8, 20), seed: int = 0
) -> list[TraceRow]:
    """Random rows; with a model, its own top tokens are the teacher's."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(*lengths))
        prompt = int(rng.integers(2, 5))
        tokens = rng.integers(3, TINY_VOCAB, length).astype(np.int32)
        if model is None:
            logits = torch.from_numpy(rng.normal(size=(length - prompt, TINY_VOCAB)))
        else:
            with torch.inference_mode():
                output = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None])
            logits = output.logits[0, prompt - 1 : -1]
        top = logits.log_softmax(-1).topk(8)
        rows.append(
            TraceRow(
                tokens=tokens,
                prompt_length=prompt,
                sampled=i % 2 == 1,
                logprobs=np.zeros(length - prompt, np.float32),
                top_ids=top.indices.numpy().astype(np.uint16),
                top_logprobs=top.values.numpy().astype(np.float16),
            )
        )
    return rows


def row(prompt: int, answer: int) -> TraceRow:
    """A row that ends in EOS (2)."""
    whole = trace_rows(1, lengths=(prompt + answer, prompt + answer + 1))[0]
    tokens = whole.tokens.copy()
    tokens[-1] = 2
    generator = np.random.default_rng(prompt)
    logprobs = np.log(generator.dirichlet(np.ones(9), answer)[:, :8]).astype(np.float16)
    ids = np.stack([generator.permutation(TINY_VOCAB)[:8] for _ in range(answer)])
    return TraceRow(
        tokens, prompt, False, np.zeros(answer, np.float32), ids.astype(np.uint16), logprobs
    )


def loss_sum(model: Any, batch: Any) -> torch.Tensor:
    head = HeadLoss(forward_kl)
    return head(hidden_at_answers(model, batch), model.get_output_embeddings().weight, batch.traces)


def test_A24_rows_without_an_answer_are_dropped_and_counted() -> None:
    """max_length 16, prompts of 20: one good row among seven."""
    rows = [row(20, 4) for _ in range(6)] + [row(5, 6)]
    with pytest.warns(UserWarning, match="6 of 7 trace rows"):
        stream = BatchStream(rows, batch=4, max_length=16, seed=0)
    assert stream.dropped == 6
    assert stream[0].tokens == 6
    with pytest.raises(DraftsmithError, match="none of 6 trace rows"):
        BatchStream(rows[:6], batch=4, max_length=16, seed=0)


def test_A24_a_batch_without_tokens_has_loss_zero() -> None:
    model = make_model()
    batch = collate([row(20, 4)], max_length=16)
    assert batch.tokens == 0
    with pytest.warns(UserWarning, match="no answer token"):
        loss = mean_over_step(loss_sum(model, batch), batch.tokens)
    loss.backward()
    assert float(loss) == 0.0


def gradients(model: Any, micro_batches: list[list[TraceRow]]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    batches = [collate(rows, max_length=32) for rows in micro_batches]
    tokens = sum(b.tokens for b in batches)
    for batch in batches:
        mean_over_step(loss_sum(model, batch), tokens).backward()
    return {k: p.grad.clone() for k, p in model.named_parameters()}


def test_A25_the_split_into_micro_batches_changes_nothing() -> None:
    """Rows of 1 and 3 answer tokens: a batch of two against two batches of one."""
    model = make_model()
    short, long = row(4, 1), row(6, 3)
    together = gradients(model, [[short, long]])
    apart = gradients(model, [[short], [long]])
    for name, gradient in together.items():
        assert torch.allclose(gradient, apart[name], atol=1e-6), name


def test_A27_a_real_eos_is_learned_where_eos_pads() -> None:
    """Rows of 5 and 9 that end in EOS: the label is kept, padding is not."""
    batch = collate([row(3, 2), row(3, 6)], max_length=32)
    assert batch.mask.sum(-1).tolist() == [5, 9]
    assert batch.labels.tolist().count(2) == 2
    assert batch.tokens == 8
    # A position predicts what stands after it in its own row.
    flat = batch.ids.flatten()
    assert torch.equal(flat[batch.positions + 1], batch.labels)


def test_padding_does_not_change_a_row() -> None:
    model = make_model()
    alone = collate([row(3, 2)], max_length=32)
    padded = collate([row(3, 2), row(3, 12)], max_length=32)
    with torch.inference_mode():
        a, b = hidden_at_answers(model, alone), hidden_at_answers(model, padded)
    assert torch.allclose(a, b[: len(a)], atol=1e-5)


def test_rows_are_cut_at_max_length() -> None:
    batch = collate([row(4, 12)], max_length=10)
    assert batch.ids.shape == (1, 10)
    assert batch.tokens == len(batch.traces.top_ids) == len(batch.traces.top_logprobs) == 6


def test_every_row_once_an_epoch_and_the_same_again() -> None:
    rows = trace_rows(50)
    stream = BatchStream(rows, batch=4, max_length=64, seed=5)
    again = BatchStream(rows, batch=4, max_length=64, seed=5)
    seen = [r for order in stream._order(0) for r in order]
    assert sorted(seen) == list(range(50))
    assert stream._order(0) != stream._order(1)
    number = stream.batches_per_epoch + 2
    # Asked for out of order, as a resumed run does.
    assert torch.equal(again[number].ids, stream[number].ids)
