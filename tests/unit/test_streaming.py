"""A checkpoint cut tensor by tensor is what its loaded model would be cut to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.checkpoints.streaming import compact_checkpoint
from draftsmith.errors import RequestError
from tests.conftest import make_model
from tests.matrix import case_names, logits, selection_for, variants

Save = Callable[..., Path]
VARIANTS = list(variants())


def assert_same(a: Any, b: Any) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=case_names(VARIANTS))
def test_streamed_equals_loaded_and_cut(
    name: str, variant: dict[str, Any], sharded: bool, save: Save, tmp_path: Path
) -> None:
    """From files that transformers wrote itself, with all axes cut; also saved and reloaded."""
    model, family = make_model(name, **variant), families()[name]
    folder = save(model)
    if sharded:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="30KB")
    selection = selection_for(model, family, "all")
    streamed = compact_checkpoint(resolve(str(folder)), selection)
    assert_same(streamed, compact_model(model, family, selection))
    out = tmp_path / "cut"
    out.mkdir()
    save_model(streamed, resolve(str(folder)), out)
    assert torch.equal(logits(load_model(resolve(str(out))), family), logits(streamed, family))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_files_is_kept(dtype: torch.dtype, save: Save) -> None:
    model = make_model().to(dtype)
    ref = resolve(str(save(model)))
    selection = selection_for(model, families()["llama"], "hidden")
    streamed = compact_checkpoint(ref, selection)
    assert {p.dtype for p in streamed.parameters()} == {dtype}
    assert_same(streamed, compact_model(model, families()["llama"], selection))


def test_a_scale_is_taken_up_in_full_precision(save: Save) -> None:
    """Half precision would round every embedding; what comes out computes what the source does."""
    family = families()["gemma3_text"]
    model = make_model("gemma3_text", tie_word_embeddings=True).bfloat16()
    ref = resolve(str(save(model)))
    selection = selection_for(model, family, "hidden")
    streamed = compact_checkpoint(ref, selection)
    assert streamed.dtype == torch.float32
    exact = compact_model(load_model(ref, dtype=torch.float32), family, selection)
    assert_same(streamed, exact)


def test_names_without_the_prefix_are_read(save: Save, tmp_path: Path) -> None:
    """Old checkpoints hold the model without its head."""
    model, family = make_model("bart", tie_word_embeddings=True), families()["bart"]
    folder = save(model)
    file = folder / "model.safetensors"
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
        if name != "final_logits_bias"
    }
    save_file(bare, file, metadata={"format": "pt"})
    selection = selection_for(model, family, "all")
    with torch.no_grad():
        model.final_logits_bias.zero_()
    assert_same(
        compact_checkpoint(resolve(str(folder)), selection), compact_model(model, family, selection)
    )


def test_positions_that_files_leave_out_are_cut_at_the_old_width(save: Save) -> None:
    """Marian's sinusoids depend on the width; rebuilt for the new one they would be others."""
    model, family = make_model("marian", tie_word_embeddings=True), families()["marian"]
    folder = save(model)
    name = "model.encoder.embed_positions.weight"
    assert name not in load_file(folder / "model.safetensors")
    selection = selection_for(model, family, "hidden")
    streamed = compact_checkpoint(resolve(str(folder)), selection)
    kept = torch.tensor(selection.hidden)
    whole = make_model("marian").state_dict()[name]
    assert torch.equal(streamed.state_dict()[name], whole[:, kept])


def test_special_ids_of_generation_follow_a_cut_vocabulary(save: Save) -> None:
    model = make_model()
    model.generation_config.eos_token_id = [2, 70]
    ref = resolve(str(save(model)))
    whole = Selection.of_layers(shape_of(model.config, families()["llama"]), range(4))
    streamed = compact_checkpoint(ref, replace(whole, vocab=(0, 1, 2, 50, 70)))
    assert streamed.generation_config.eos_token_id == [2, 4]


def test_values_that_are_no_numbers_are_named(save: Save) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] = float("nan")
    ref = resolve(str(save(model)))
    selection = selection_for(model, families()["llama"], "hidden")
    with pytest.raises(RequestError, match=r"layers\.2\.mlp\.up_proj\.weight holds values that"):
        compact_checkpoint(ref, selection)
    with pytest.raises(RequestError, match=r"layers\.2\.mlp\.up_proj\.weight holds values that"):
        load_model(ref)


def test_left_overs_of_old_checkpoints_are_passed_over(family_name: str, save: Save) -> None:
    """Buffers and tables that files of old releases hold, and no model reads."""
    family = families()[family_name]
    model = make_model(family_name, tie_word_embeddings=True)
    folder = save(model)
    file = folder / "model.safetensors"
    extra = {template.format(layer=0): torch.ones(3) for template in family.ignored}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    ref = resolve(str(folder))
    assert_same(load_model(ref), model)
    selection = selection_for(model, family, "layers")
    assert_same(compact_checkpoint(ref, selection), compact_model(model, family, selection))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rebuilt_positions_are_exact_whatever_the_files_precision(
    dtype: torch.dtype, save: Save
) -> None:
    model, family = make_model("marian", tie_word_embeddings=True).to(dtype), families()["marian"]
    ref = resolve(str(save(model)))
    selection = selection_for(model, family, "hidden")
    exact = compact_model(load_model(ref, dtype=torch.float32), family, selection)
    assert_same(compact_checkpoint(ref, selection), exact)


def test_one_tensor_under_two_names_is_refused(save: Save) -> None:
    folder = save(make_model())
    file = folder / "model.safetensors"
    state = load_file(file)
    state["norm.weight"] = state["model.norm.weight"] + 1
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"norm\.weight are the same tensor under two names"):
        load_model(resolve(str(folder)))


def test_a_damaged_generation_config_is_one_error(save: Save) -> None:
    model = make_model()
    folder = save(model)
    (folder / "generation_config.json").write_text("{")
    selection = selection_for(model, families()["llama"], "layers")
    with pytest.raises(RequestError, match="can't be loaded: "):
        compact_checkpoint(resolve(str(folder)), selection)
