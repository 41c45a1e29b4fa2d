"""A drafter with a cut vocabulary speaks the target's ids."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.export import export_drafter
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.pair import check_pair
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection
from draftsmith.checkpoints.token_map import FILE, TokenMap
from draftsmith.errors import RequestError
from draftsmith.prune.compact import compact_from_file
from tests.conftest import TINY_VOCAB

Save = Callable[..., Path]
# Every second ordinary token, and the special ones.
KEPT = (0, 1, 2, *range(3, TINY_VOCAB, 2))


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
    assert any("other runtimes need the whole vocabulary" in note for note in check.notes)


def test_it_drafts_exactly(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Real decoding gives the target's own tokens, and kept tokens are accepted."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("how many?", "she has")))
    score = score_drafter(
        resolve(str(pair[0])),
        resolve(str(pair[1])),
        prompts=str(prompts),
        limit=None,
        decode_prompts=None,
        max_new_tokens=12,
        lookaheads=(2,),
        replay_lookahead=2,
    )
    assert score.lossless
    real, replayed = score.decode[0], score.replay[1]
    assert real.accepted == pytest.approx(replayed.accepted)
    assert real.rounds == pytest.approx(replayed.rounds)


def test_the_map_is_exported_to_hf_and_refused_for_gguf(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = (resolve(str(path)) for path in pair)
    export_drafter(drafter, target, tmp_path / "out", ("hf",), "F32")
    assert (tmp_path / "out" / "hf" / FILE).read_text() == (pair[1] / FILE).read_text()
    with pytest.raises(RequestError, match=r"has a cut vocabulary, and llama\.cpp needs"):
        export_drafter(drafter, target, tmp_path / "other", ("hf", "gguf"), "F32")
    assert not (tmp_path / "other").exists()


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
