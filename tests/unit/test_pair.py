"""Pairs of tokenizers, padding ids, and the tokenizer files of what is saved."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.checkpoints.pair import (
    SharedVocabulary,
    _notes,
    check_tokenizer_rows,
    context_of,
    own_vocabulary,
    shared_vocabulary,
)
from draftsmith.checkpoints.saving import TOKENIZER_FILES, save_model, save_tokenizer
from draftsmith.errors import RequestError
from tests.conftest import make_tokenizer


@pytest.fixture(scope="module")
def ninety() -> Any:
    """A tokenizer of exactly 90 tokens."""
    tokenizer = make_tokenizer(90)
    assert len(tokenizer) == 90
    return tokenizer


def changed(tokenizer: Any, edit: Any) -> Any:
    """The same tokenizer after `edit` of its vocabulary (string -> id)."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(state["model"]["vocab"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


def swap(a: int, b: int) -> Any:
    def edit(vocab: dict[str, int]) -> None:
        strings = {i: s for s, i in vocab.items()}
        vocab[strings[a]], vocab[strings[b]] = b, a

    return edit


# --- A1


def test_A1_padded_sizes_differ_and_only_tokens_are_shared(ninety: Any) -> None:
    assert shared_vocabulary(ninety, copy.deepcopy(ninety), 104, 96) == SharedVocabulary(90)
    assert shared_vocabulary(ninety, ninety, 96, 104) == SharedVocabulary(90)
    assert own_vocabulary(ninety, 104) == SharedVocabulary(90)


@pytest.mark.parametrize("columns", [104, 96])
def test_A1_padding_ids_never_win(ninety: Any, columns: int) -> None:
    """Neither by arg max nor by sampling, though their logits are the largest by far."""
    shared = shared_vocabulary(ninety, ninety, 104, 96)
    logits = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(0))
    logits[..., 90:] = 1e4
    restricted = shared.restrict(logits)
    assert restricted.shape == (2, 3, 90)
    assert torch.equal(restricted, logits[..., :90])
    drawn = torch.multinomial(restricted.softmax(-1).flatten(0, 1), 64, replacement=True)
    assert int(drawn.max()) < 90


def test_A1_holes_inside_the_vocabulary_are_masked(ninety: Any) -> None:
    """An id without a string may also lie between two tokens."""
    shared = shared_vocabulary(ninety, Gapped(ninety, {85, 87}), 104, 96)
    assert shared == SharedVocabulary(90, (85, 87))
    assert own_vocabulary(Gapped(ninety, {85, 87, 89}), 96) == SharedVocabulary(89, (85, 87))
    logits = torch.zeros(4, 96)
    logits[:, [85, 87, 95]] = 1e4
    before = logits.clone()
    probabilities = shared.restrict(logits).softmax(-1)
    assert torch.equal(probabilities[:, [85, 87]], torch.zeros(4, 2))
    assert torch.isfinite(probabilities).all()
    assert torch.equal(logits, before)


class Gapped:
    """A tokenizer in which some ids stand for nothing."""

    def __init__(self, tokenizer: Any, gaps: set[int]) -> None:
        self.vocab = {s: i for s, i in tokenizer.get_vocab().items() if i not in gaps}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_A1_a_model_of_fewer_rows_than_tokens_shares_its_rows(ninety: Any) -> None:
    assert shared_vocabulary(ninety, ninety, 104, 64) == SharedVocabulary(64)


def test_A1_tokens_that_only_one_side_has_are_not_shared(ninety: Any) -> None:
    longer = copy.deepcopy(ninety)
    longer.add_tokens(["<extra>"])
    assert len(longer) == 91
    assert shared_vocabulary(longer, ninety, 96, 96) == SharedVocabulary(90)
    assert shared_vocabulary(ninety, longer, 96, 96) == SharedVocabulary(90)


def test_no_token_in_common_is_refused(ninety: Any) -> None:
    with pytest.raises(RequestError, match="share no token"):
        shared_vocabulary(ninety, Gapped(ninety, set(range(90))), 96, 96)


# --- A2


def test_A2_swapped_ids_are_named_with_both_strings(ninety: Any) -> None:
    strings = {i: s for s, i in ninety.get_vocab().items()}
    with pytest.raises(RequestError) as raised:
        shared_vocabulary(ninety, changed(ninety, swap(7, 8)), 96, 96)
    assert f"id 7 is {strings[7]!r} for the target and {strings[8]!r} for the drafter" in str(
        raised.value
    )


@pytest.mark.parametrize(("a", "b"), [(0, 89), (88, 89), (3, 40)])
def test_A2_the_first_difference_is_named_wherever_it_is(ninety: Any, a: int, b: int) -> None:
    plain = Gapped(ninety, set())
    swapped = Gapped(ninety, set())
    swap(a, b)(swapped.vocab)
    for target, drafter in ((plain, swapped), (swapped, plain)):
        with pytest.raises(RequestError, match=rf"different tokenizers: id {a} is "):
            shared_vocabulary(target, drafter, 96, 96)


# --- A32


def test_A32_a_token_without_a_row_is_refused(tokenizer: Any) -> None:
    check_tokenizer_rows(tokenizer, 96, "here")
    longer = copy.deepcopy(tokenizer)
    longer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(RequestError, match=r"here: .* 97 tokens.* 96 rows; id 96 \('\[PAD\]'\)"):
        check_tokenizer_rows(longer, 96, "here")
    check_tokenizer_rows(longer, 104, "here")


def test_A32_an_id_beyond_the_rows_is_refused_though_the_count_fits() -> None:
    tokenizer = Gapped(make_tokenizer(96), set(range(10, 20)))
    tokenizer.vocab["<far>"] = 200
    with pytest.raises(RequestError, match=r"id 200 \('<far>'\)"):
        check_tokenizer_rows(tokenizer, 96, "here")


@pytest.fixture
def reordered(save: Any, tiny: Any) -> Path:
    """A target whose tokenizer.json was written by others: its order and spaces are its own."""
    folder: Path = save(tiny, name="target")
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(dict(reversed(state.items())), indent=7), encoding="utf-8")
    (folder / "special_tokens_map.json").write_bytes(b'{ "eos_token":"</s>" }\r\n')
    return folder


def test_A32_tokenizer_files_are_copied_byte_for_byte(reordered: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_tokenizer(resolve(str(reordered)), out)
    names = {p.name for p in out.iterdir()}
    assert names == {p.name for p in reordered.iterdir()} & set(TOKENIZER_FILES)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    for name in names:
        assert (out / name).read_bytes() == (reordered / name).read_bytes()


def test_A32_a_saved_drafter_has_the_targets_own_tokenizer(
    reordered: Path, tmp_path: Path, tiny_drafter: Any
) -> None:
    out = tmp_path / "drafter"
    out.mkdir()
    save_model(tiny_drafter, resolve(str(reordered)), out)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (out / name).read_bytes() == (reordered / name).read_bytes()
    target = load_tokenizer(resolve(str(reordered)))
    drafter = load_tokenizer(resolve(str(out)))
    assert shared_vocabulary(target, drafter, 96, 96) == SharedVocabulary(96)


@pytest.mark.parametrize(
    ("target", "drafter", "told"),
    [(64, 32, True), (None, 32, True), (64, 64, False), (64, 128, False), (64, None, False)],
    ids=str,
)
def test_only_a_shorter_context_is_told(
    target: int | None, drafter: int | None, told: bool
) -> None:
    notes = list(_notes(target, drafter, 96, 96, None))
    assert len(notes) == told
    assert not told or notes[0].startswith("the drafter knows 32 positions, the target ")


@pytest.mark.parametrize(("target", "drafter"), [(104, 96), (96, 104)])
def test_heads_of_other_sizes_are_told(target: int, drafter: int) -> None:
    (note,) = _notes(64, 64, target, drafter, None)
    assert f"padded to {target} rows, the drafter's to {drafter}" in note


@pytest.mark.parametrize("positions", [0, -1, None, "many"])
def test_a_config_without_positions_is_refused(positions: Any) -> None:
    config = SimpleNamespace(max_position_embeddings=positions)
    with pytest.raises(RequestError, match="but a model needs positions"):
        context_of(config, families()["llama"])


def test_A1_a_target_of_fewer_rows_than_tokens_bounds_what_is_shared(ninety: Any) -> None:
    assert shared_vocabulary(ninety, ninety, 64, 104) == SharedVocabulary(64)


def test_A2_the_lowest_differing_id_is_named(ninety: Any) -> None:
    """Sets of large ids are in no order."""
    target, drafter = Gapped(ninety, set()), Gapped(ninety, set())
    target.vocab, drafter.vocab = {"a": 5, "b": 1000}, {"x": 5, "y": 1000}
    with pytest.raises(RequestError, match=r"different tokenizers: id 5 is 'a'"):
        shared_vocabulary(target, drafter, 2000, 2000)
