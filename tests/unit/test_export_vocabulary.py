"""A cut vocabulary is expanded for runtimes that know no map, without a cut token ever proposed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import export_drafter, preflight
from draftsmith.checkpoints.export import vocabulary as expanding
from draftsmith.checkpoints.export.vocabulary import cost_of, expanded_job, expanded_model
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.loading import load_config, load_model
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.checkpoints.token_map import FILE, TokenMap
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model

Save = Callable[..., Path]
KEPT = (0, 1, 2, *range(3, TINY_VOCAB, 2))
CUT = tuple(sorted(set(range(TINY_VOCAB)) - set(KEPT)))
MAP = TokenMap(TINY_VOCAB, KEPT, fallback=4)
# The text holds cut tokens too.
IDS = torch.randint(TINY_VOCAB, (1, 40), generator=torch.Generator().manual_seed(3))


def cut_model(family: str, **changes: Any) -> Any:
    """A tiny model that has the tokens of `KEPT` alone."""
    source, table = make_model(family, **changes), families()[family]
    shape = shape_of(source.config, table)
    selection = Selection.of_layers(shape, range(shape.layers))
    return compact_model(source, table, replace(selection, vocab=KEPT))


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    """Ids of the target for a family."""
    if not families()[family].has_encoder:
        return {"input_ids": IDS}
    if families()[family].config.mel_bins:
        sound = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(4))
        return {"input_features": sound, "decoder_input_ids": IDS}
    return {"input_ids": IDS.flip(1), "decoder_input_ids": IDS}


@torch.inference_mode()
def check_expanded(model: Any, family: str) -> None:
    """Kept ids have the logits that the map gives them; cut ones their mean, never the largest."""
    wide = expanded_model(model, families()[family], MAP)
    ours = wide(**inputs_of(family)).logits
    MAP.attach(model, families()[family])
    theirs = model(**inputs_of(family)).logits
    assert ours.shape == theirs.shape == (1, 40, TINY_VOCAB)
    kept, cut = torch.tensor(KEPT), torch.tensor(CUT)
    assert (ours[..., kept] - theirs[..., kept]).abs().max() < 1e-5
    mean = theirs[..., kept].mean(-1, keepdim=True)
    assert (ours[..., cut] - mean).abs().max() < 1e-5
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_map(family_name: str, tied: bool) -> None:
    check_expanded(cut_model(family_name, tie_word_embeddings=tied), family_name)


def test_an_encoder_with_ids_of_its_own_keeps_them() -> None:
    own = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": True}
    model = cut_model("marian", **own)
    before = model.model.encoder.embed_tokens.weight.clone()
    wide = expanded_model(model, families()["marian"], MAP)
    assert torch.equal(wide.model.encoder.embed_tokens.weight, before)
    check_expanded(model, "marian")


def test_the_cut_drafter_stays_as_it_is_and_special_ids_are_the_targets() -> None:
    model = cut_model("llama", eos_token_id=KEPT[9], tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wide = expanded_model(model, families()["llama"], MAP)
    assert stop_ids(model) == {9}
    assert stop_ids(wide) == {KEPT[9]}
    assert wide.config.eos_token_id == KEPT[9]
    assert not wide.config.tie_word_embeddings
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.fixture
def pair(tiny: Any, save: Save, tmp_path: Path) -> tuple[Path, Path]:
    """A target, and a drafter with half of its tokens."""
    target = save(tiny, name="target")
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    save_model(cut_model("llama"), resolve(str(target)), drafter, MAP)
    return target, drafter


def test_gguf_has_all_tokens_and_hf_the_map(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """And reads back with the logits of the drafter with its map."""
    target, drafter = (resolve(str(path)) for path in pair)
    out = tmp_path / "out"
    report = export_drafter(drafter, target, out, ExportSettings())
    assert TokenMap.read(out / "hf", len(KEPT)) == MAP
    assert load_config(resolve(str(out / "hf"))).vocab_size == len(KEPT)
    written = load_model(resolve(str(out / report["gguf"]["files"][0])))
    meant = load_model(drafter)
    with torch.inference_mode():
        ours, theirs = written(input_ids=IDS).logits, meant(input_ids=IDS).logits
    kept = torch.tensor(KEPT)
    assert (ours[..., kept] - theirs[..., kept]).abs().max() < 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    more = 2 * (TINY_VOCAB - len(KEPT)) * 32
    assert f"from {len(KEPT)} to 96 rows: +{more:,} parameters" in report["gguf"]["notes"][0]
    assert not report["hf"]["notes"]


def test_hf_is_expanded_where_another_runtime_is_launched_with_it(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = (resolve(str(path)) for path in pair)
    report = export_drafter(drafter, target, tmp_path / "out", ExportSettings(to=("vllm",)))
    folder = tmp_path / "out" / "hf"
    assert not (folder / FILE).exists()
    assert load_config(resolve(str(folder))).vocab_size == TINY_VOCAB
    assert "rows: +" in report["hf"]["notes"][0]
    assert "rows: +" in report["vllm"]["notes"][0]


def test_what_it_costs_is_known_before_weights_are_loaded(pair: tuple[Path, Path]) -> None:
    model = cut_model("llama", tie_word_embeddings=True)
    job = replace(job_of(model, pair[0]), token_map=MAP)
    before, after = (sum(p.numel() for p in j.model.parameters()) for j in (job, expanded_job(job)))
    note = f"from {len(KEPT)} to 96 rows: +{after - before:,} parameters ({before:,} before)"
    assert note in cost_of(job)
    notes = preflight(job, ExportSettings(to=("hf", "gguf")))
    assert [n for n in notes if "vocabulary" in n] == [f"export gguf: {cost_of(job)}"]


def test_an_expanded_job_has_one_vocabulary_everywhere(pair: tuple[Path, Path]) -> None:
    job = replace(job_of(cut_model("llama"), pair[0]), token_map=MAP)
    whole = expanded_job(job)
    assert whole.token_map is None
    assert whole.shape.vocab == whole.config.vocab_size == whole.pair.drafter_rows == TINY_VOCAB
    assert whole.config is whole.model.config
    assert expanded_job(whole) is whole
    assert expanding.expanded_candidate(whole) is whole
