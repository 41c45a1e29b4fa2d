"""A drafter with a cut vocabulary speaks the target's ids."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.export import export_drafter
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.loading import describe, load_config, load_model
from draftsmith.checkpoints.pair import check_pair
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection
from draftsmith.checkpoints.token_map import FILE, TokenMap
from draftsmith.errors import RequestError
from draftsmith.prune.compact import compact_from_file
from draftsmith.recipes.schema import ExportSettings, ScoreSettings
from tests.conftest import TINY_VOCAB, make_model

Save = Callable[..., Path]
# Every second ordinary token, and the special ones.
KEPT = (0, 1, 2, *range(3, TINY_VOCAB, 2))


# For models whose special ids are high.
SPECIAL_KEPT = (*range(12), 70, 75)


def cut_vocabulary(source: Any, save: Save, tmp_path: Path) -> Path:
    """A source with all its layers and the tokens of `SPECIAL_KEPT`."""
    folder = save(source, name="whole")
    shape = shape_of(source.config, families()[source.config.model_type])
    selection = replace(Selection.of_layers(shape, range(shape.layers)), vocab=SPECIAL_KEPT)
    masks = tmp_path / "cut.json"
    masks.write_text(json.dumps({"selection": selection.to_plain(), "source_shape": vars(shape)}))
    out = tmp_path / "cut"
    out.mkdir()
    compact_from_file(resolve(str(folder)), masks, out)
    return out


@pytest.fixture
def pair(tiny: Any, save: Save, tmp_path: Path) -> tuple[Path, Path]:
    """A target, and the same model with a cut vocabulary, made by a masks file."""
    target = save(tiny)
    shape = shape_of(tiny.config, families()["llama"])
    selection = replace(Selection.of_layers(shape, range(4)), vocab=KEPT)
    masks = tmp_path / "masks.json"
    masks.write_text(json.dumps({"selection": selection.to_plain(), "source_shape": vars(shape)}))
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    compact_from_file(resolve(str(target)), masks, drafter)
    return target, drafter


def test_it_takes_and_gives_the_targets_ids(pair: tuple[Path, Path], tiny: Any) -> None:
    """On kept tokens its logits are the target's; the others can't be drafted."""
    drafter = load_model(resolve(str(pair[1])))
    assert drafter.config.vocab_size == len(KEPT)
    ids = torch.tensor([KEPT[5:25]])
    with torch.inference_mode():
        ours, theirs = drafter(input_ids=ids).logits, tiny(input_ids=ids).logits
    assert ours.shape == theirs.shape
    kept = torch.tensor(KEPT)
    assert (ours[..., kept] - theirs[..., kept]).abs().max() < 1e-5
    cut = torch.tensor(sorted(set(range(TINY_VOCAB)) - set(KEPT)))
    assert bool((ours[..., cut] == -torch.inf).all())


def test_a_cut_token_in_the_text_is_read_as_the_unknown_one(pair: tuple[Path, Path]) -> None:
    drafter = load_model(resolve(str(pair[1])))
    unknown = 0
    with torch.inference_mode():
        a = drafter(input_ids=torch.tensor([[1, 4, 7]])).logits
        b = drafter(input_ids=torch.tensor([[1, unknown, 7]])).logits
    assert 4 not in KEPT
    assert torch.equal(a, b)


def test_the_pair_shares_the_kept_tokens_only(pair: tuple[Path, Path]) -> None:
    check = check_pair(*(resolve(str(path)) for path in pair))
    assert check.tokens == len(KEPT)
    assert set(check.shared.holes).isdisjoint(KEPT)
    assert any("expands it for other runtimes" in note for note in check.notes)


def test_it_drafts_exactly(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Real decoding gives the target's own tokens, and kept tokens are accepted."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("how many?", "she has")))
    score = score_drafter(
        resolve(str(pair[0])),
        resolve(str(pair[1])),
        ScoreSettings(prompts=str(prompts), max_new_tokens=12, lookahead=(2,), replay_lookahead=2),
    )
    assert score.lossless
    real, replayed = score.decode[0], score.replay[1]
    assert real.accepted == pytest.approx(replayed.accepted)
    assert real.rounds == pytest.approx(replayed.rounds)


def test_the_map_is_exported_to_hf(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = (resolve(str(path)) for path in pair)
    export_drafter(drafter, target, tmp_path / "out", ExportSettings(to=("hf",)))
    assert (tmp_path / "out" / "hf" / FILE).read_text() == (pair[1] / FILE).read_text()


def test_each_id_has_a_row() -> None:
    """That of the fallback where its token was cut."""
    assert TokenMap(6, (1, 3, 4), fallback=2).rows().tolist() == [2, 0, 2, 1, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_ids": [3, 2, 1]}, "not ascending ids"),
        ({"target_ids": [1, 2, 999]}, "not ascending ids"),
        ({"target_ids": []}, "not ascending ids"),
        ({"fallback": 9}, "fallback 9 is no row"),
        ({"target_ids": "x"}, "damaged"),
        ({"target_ids": [1, 2]}, "maps 2 tokens, but the head has 3 rows"),
    ],
    ids=str,
)
def test_damaged_maps_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = {"target_vocab": 96, "target_ids": [1, 2, 3], "fallback": 0} | change
    (tmp_path / FILE).write_text(json.dumps(plain))
    with pytest.raises(RequestError, match=message):
        TokenMap.read(tmp_path, rows=3)


def test_without_a_file_there_is_no_map(tmp_path: Path) -> None:
    assert TokenMap.read(tmp_path, rows=3) is None
    (tmp_path / FILE).write_text("{")
    with pytest.raises(RequestError, match="damaged"):
        TokenMap.read(tmp_path, rows=3)


def test_its_special_ids_are_the_targets(save: Save, tmp_path: Path) -> None:
    """An encoder–decoder that starts and ends with tokens which have other rows."""
    source = make_model(
        "t5",
        num_layers=4,
        tie_word_embeddings=True,
        eos_token_id=75,
        pad_token_id=70,
        decoder_start_token_id=70,
    )
    drafter = load_model(resolve(str(cut_vocabulary(source, save, tmp_path))))
    assert stop_ids(drafter) == {75}
    assert drafter.config.decoder_start_token_id == 70
    text = torch.tensor([[3, 5, 9, 75]])
    ours = drafter.generate(input_ids=text, max_new_tokens=6, do_sample=False)
    with torch.inference_mode():
        logits = source(input_ids=text, decoder_input_ids=ours[:, :-1]).logits.clone()
        logits[..., [i for i in range(TINY_VOCAB) if i not in SPECIAL_KEPT]] = -torch.inf
    assert ours[0, 0] == 70
    assert torch.equal(ours[0, 1:], logits[0].argmax(-1))


def test_positions_and_tuples_are_understood(pair: tuple[Path, Path]) -> None:
    drafter = load_model(resolve(str(pair[1])))
    ids = torch.tensor([KEPT[3:9]])
    with torch.inference_mode():
        named = drafter(input_ids=ids).logits
        assert torch.equal(drafter(ids).logits, named)
        assert torch.equal(drafter(input_ids=ids, return_dict=False)[0], named)


def test_an_encoder_with_a_vocabulary_of_its_own_keeps_its_ids(save: Save, tmp_path: Path) -> None:
    source = make_model(
        "marian",
        tie_word_embeddings=True,
        share_encoder_decoder_embeddings=False,
        vocab_size=110,
    )
    drafter = load_model(resolve(str(cut_vocabulary(source, save, tmp_path))))
    inputs = {"input_ids": torch.tensor([[65, 104]]), "decoder_input_ids": torch.tensor([[1, 70]])}
    with torch.inference_mode():
        ours, theirs = drafter(**inputs).logits, source(**inputs).logits
    kept = torch.tensor(SPECIAL_KEPT)
    assert (ours[..., kept] - theirs[..., kept]).abs().max() < 1e-5


def test_cut_once_more_it_keeps_a_map(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Fewer layers keep the map; fewer tokens shorten it. Both end in the target's ids."""
    drafter = resolve(str(pair[1]))
    _, shape = describe(load_config(drafter), drafter)
    fewer_layers = Selection.of_layers(shape, (0, 2))
    fewer_tokens = replace(fewer_layers, vocab=(0, 1, 2, 10, 20))
    for number, selection in enumerate((fewer_layers, fewer_tokens)):
        masks = tmp_path / f"{number}.json"
        plain = {"selection": selection.to_plain(), "source_shape": vars(shape)}
        masks.write_text(json.dumps(plain))
        out = tmp_path / str(number)
        out.mkdir()
        compact_from_file(drafter, masks, out)
        found = TokenMap.read(out, rows=shape.vocab if number == 0 else 5)
        assert found is not None
        assert found.target_vocab == TINY_VOCAB
    assert found.target_ids == (0, 1, 2, KEPT[10], KEPT[20])


def test_a_map_is_not_left_behind(pair: tuple[Path, Path], tiny: Any) -> None:
    save_model(tiny, resolve(str(pair[0])), pair[1])
    assert not (pair[1] / FILE).exists()
    load_model(resolve(str(pair[1])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_ids": [-1, 2, 3]}, "not ascending ids"),
        ({"target_ids": [1, 2, 96]}, "not ascending ids"),
        ({"target_ids": [1, 2, 2]}, "not ascending ids"),
        ({"fallback": 3}, "fallback 3 is no row"),
        ({"fallback": -1}, "fallback -1 is no row"),
    ],
    ids=str,
)
def test_maps_one_step_out_of_range_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plain = {"target_vocab": 96, "target_ids": [1, 2, 3], "fallback": 0} | change
    (tmp_path / FILE).write_text(json.dumps(plain))
    with pytest.raises(RequestError, match=message):
        TokenMap.read(tmp_path, rows=3)


def test_the_row_for_cut_tokens_follows_the_unknown_one() -> None:
    kept = (1, 4, 7, 9)
    for unknown, fallback in ((7, 2), (5, 0), (None, 0)):
        assert TokenMap.of(kept, 10, SimpleNamespace(unk_token_id=unknown)).fallback == fallback
    once = TokenMap(10, kept, 2)
    assert once.after((0, 2, 3)) == TokenMap(10, (1, 7, 9), 1)
    assert once.after((1, 3)) == TokenMap(10, (4, 9), 0)


def test_cut_tokens_are_read_as_the_row_of_the_map() -> None:
    """And a tuple keeps all that the model returns after its logits."""
    model = make_model(vocab_size=48)
    ids = torch.tensor([[1, 5, 2]])
    with torch.inference_mode():
        before = model(input_ids=ids, return_dict=False)
        TokenMap(TINY_VOCAB, tuple(range(0, TINY_VOCAB, 2)), fallback=5).attach(
            model, families()["llama"]
        )
        cut = model(input_ids=torch.tensor([[2, 7, 4]]), return_dict=False)
    assert len(cut) == len(before) > 1
    assert torch.equal(cut[0][..., ::2], before[0])
