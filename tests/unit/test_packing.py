"""Packed sequences: nothing lost, documents apart, and the same numbers as documents alone."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from draftsmith.data.packing import PackedRow, Packer, pack
from draftsmith.distill.batches import Batch, collate_packed
from draftsmith.distill.head_loss import HeadLoss
from draftsmith.distill.losses import cross_entropy
from draftsmith.distill.states import hidden_at_answers, states_at_answers
from draftsmith.distill.train import mean_over_step
from tests.conftest import TINY_VOCAB, make_model

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def documents(lengths: list[int]) -> list[NDArray[np.int64]]:
    """Each token of each document is another."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]


class Endless:
    """Some documents again and again."""

    def __init__(self, lengths: list[int]) -> None:
        self.all, self.number = documents(lengths), 0

    def next_document(self) -> NDArray[np.int64]:
        self.number += 1
        return self.all[(self.number - 1) % len(self.all)]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def same(a: PackedRow, b: PackedRow) -> bool:
    return np.array_equal(a.tokens, b.tokens) and a.starts == b.starts and a.domain == b.domain


@settings(deadline=None)
@given(lengths=LENGTHS, sequence=st.integers(2, 9))
def test_no_token_is_lost_and_documents_begin_where_they_do(
    lengths: list[int], sequence: int
) -> None:
    rows = pack(documents(lengths), sequence, "d")
    tokens = np.concatenate([np.zeros(0, np.int64), *(row.tokens for row in rows)])
    assert tokens.tolist() == list(range(sum(lengths) // sequence * sequence))
    begins = {int(d[0]) for d in documents(lengths)}
    for row in rows:
        assert all(len(row.tokens) == sequence for row in rows)
        assert row.starts[0] == 0
        found = {int(row.tokens[s]) for s in row.starts[1:]}
        assert found == begins & set(row.tokens[1:].tolist())


@settings(deadline=None)
@given(lengths=LENGTHS, sequence=st.integers(2, 9))
def test_packer_gives_what_pack_gives(lengths: list[int], sequence: int) -> None:
    expected = pack(documents(lengths), sequence, "d")
    packer = Packer(Endless(lengths), sequence, "d")
    assert all(same(packer.next_row(), row) for row in expected)


@settings(deadline=None)
@given(lengths=LENGTHS, sequence=st.integers(2, 9), done=st.integers(0, 8))
def test_packer_goes_on_from_any_row(lengths: list[int], sequence: int, done: int) -> None:
    packer, other = (Packer(Endless(lengths), sequence, "d") for _ in range(2))
    other.next_row()
    for _ in range(done):
        packer.next_row()
    other.load_state_dict(packer.state_dict())
    assert all(same(packer.next_row(), other.next_row()) for _ in range(6))


def test_positions_count_within_documents() -> None:
    (row,) = pack(documents([3, 1, 4]), 7, "d")
    assert row.starts == (0, 3, 4)
    assert row.positions.tolist() == [0, 1, 2, 0, 0, 1, 2]


def test_what_follows_in_its_own_document_is_learned() -> None:
    rows = pack(documents([3, 1, 6, 4]), 7, "d")
    for separate in (True, False):
        batch = collate_packed(rows, separate)
        # Rows are 0 1 2 | 3 | 4 5 6 and 7 8 9 | 10 11 12 13.
        assert batch.positions.tolist() == [0, 1, 4, 5, 7, 8, 10, 11, 12]
        assert batch.labels.tolist() == [1, 2, 5, 6, 8, 9, 11, 12, 13]
        assert batch.mask is None
        assert (batch.position_ids is None) != separate
        assert batch.tokens == 9
    assert torch.equal(batch.traces.top_ids[:, 0], batch.labels)


def test_a_packed_batch_moves_to_another_device() -> None:
    batch = collate_packed(pack(documents([3, 5]), 4, "d")).to(torch.device("cpu"))
    assert batch.mask is None
    assert batch.position_ids is not None


# --- the model sees what it would see of each document alone


def some_rows(seed: int = 0) -> list[PackedRow]:
    """Two rows of six documents of random tokens."""
    rng = np.random.default_rng(seed)
    return pack([rng.integers(3, TINY_VOCAB, n) for n in (11, 3, 1, 9, 13, 11)], 24, "d")


def alone(model: Any, rows: list[PackedRow]) -> torch.Tensor:
    """Final hidden states of each document run by itself, where something is learned, [A, H]."""
    states = []
    for row in rows:
        for part in np.split(row.tokens, row.starts[1:]):
            with torch.no_grad():
                output = model.base_model(input_ids=torch.from_numpy(part)[None])
            states.append(output.last_hidden_state[0, :-1])
    return torch.cat(states)


def model_of(family: str, attention: str, window: int | None) -> Any:
    changes: dict[str, Any] = {} if window is None else {"sliding_window": window}
    if window is not None and family.startswith("qwen"):
        changes |= {"use_sliding_window": True, "max_window_layers": 2}
    model = make_model(family, **changes)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents_are_as_if_alone(
    causal_family: str, attention: str, window: int | None
) -> None:
    model, rows = model_of(causal_family, attention, window), some_rows()
    with torch.no_grad():
        packed = hidden_at_answers(model, collate_packed(rows))
    torch.testing.assert_close(packed, alone(model, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "qwen2", "qwen3"])
def test_windows_are_narrower_than_documents(family: str) -> None:
    """Else the test of sliding windows would show nothing."""
    rows = some_rows()
    narrow, wide = (alone(model_of(family, "sdpa", w), rows) for w in (4, None))
    assert float((narrow - wide).abs().max()) > 1e-3


@pytest.mark.parametrize("training", [False, True])
def test_documents_see_one_another_when_asked_to(tiny: Any, training: bool) -> None:
    rows = some_rows()
    batch = collate_packed(rows, separate_documents=False)
    tiny.train(training)
    with torch.no_grad():
        states = hidden_at_answers(tiny, batch)
        output = tiny.base_model(input_ids=batch.ids).last_hidden_state
    tiny.eval()
    assert torch.equal(states, output.flatten(0, 1)[batch.positions])
    assert float((states - alone(tiny, rows)).abs().max()) > 1e-3


class Recorder(nn.Module):
    """A body that keeps what it is asked."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": attention})()

    def forward(self, **inputs: Any) -> Any:
        self.inputs = inputs
        states = inputs["input_ids"][..., None].float()
        return type("Output", (), {"last_hidden_state": states, "hidden_states": (states,)})()


@pytest.mark.parametrize(("attention", "rows"), [("sdpa", 2), ("flash_attention_2", 1)])
def test_flash_attention_gets_one_row(attention: str, rows: int) -> None:
    """Its kernels look for documents in a single row alone."""
    batch, body = collate_packed(some_rows()), Recorder(attention)
    states, (reads,) = states_at_answers(body, batch, layers=(0,))
    assert body.inputs["input_ids"].shape == body.inputs["position_ids"].shape
    assert body.inputs["input_ids"].shape[0] == rows
    expected = batch.ids.flatten()[batch.positions].float()
    assert torch.equal(states[:, 0], expected)
    assert torch.equal(reads[:, 0], expected)


# --- A24: nothing to learn


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    head = HeadLoss(cross_entropy)
    return head(hidden_at_answers(model, batch), model.get_output_embeddings().weight, batch.traces)


def test_A24_packed_documents_of_one_token_have_loss_zero() -> None:
    model = make_model()
    batch = collate_packed(pack(documents([1] * 8), 4, "d"))
    assert batch.tokens == 0
    with pytest.warns(UserWarning, match="no answer token"):
        loss = mean_over_step(loss_of(model, batch), batch.tokens)
    loss.backward()
    assert loss.item() == 0.0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)


def test_the_loss_is_that_of_the_text(tiny: Any) -> None:
    batch = collate_packed(some_rows(), separate_documents=False)
    logits = tiny(input_ids=batch.ids).logits.flatten(0, 1)[batch.positions]
    expected = nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
    torch.testing.assert_close(loss_of(tiny, batch), expected)
