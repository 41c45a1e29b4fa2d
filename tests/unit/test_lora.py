"""Adapters learn instead of the weights, and end up in them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.data.traces import TraceRow
from draftsmith.distill import train
from draftsmith.distill.lora import add_adapters, merge_adapters
from draftsmith.distill.train import distill, trainable_parameters
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import DistillSettings
from tests.conftest import TINY_VOCAB, make_model

SHORT = DistillSettings(
    steps=4, warmup=1, batch=2, lr=1e-2, evaluate_every=2, save_every=2, lora_rank=2
)


def rows(count: int = 6) -> list[TraceRow]:
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        tokens = generator.integers(3, TINY_VOCAB, 12).astype(np.int32)
        top = np.log(np.full((8, 4), 0.2, np.float16))
        ids = np.stack([generator.permutation(TINY_VOCAB)[:4] for _ in range(8)]).astype(np.uint16)
        found.append(TraceRow(tokens, 4, False, np.zeros(8, np.float32), ids, top))
    return found


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.arange(3, 20)[None]
        inputs = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        logits: torch.Tensor = model(**inputs).logits
        return logits


TEXT = [name for name, family in families().items() if not family.config.mel_bins]


@pytest.mark.parametrize("family", sorted(TEXT))
def test_adapters_change_nothing_at_first_and_are_merged_exactly(family: str) -> None:
    model, table = make_model(family), families()[family]
    before, names = logits_of(model), list(model.state_dict())
    learning = add_adapters(model, table, ("kv_heads", "ffn"), 2, 8.0, seed=1)
    assert learning
    assert all("lora_" in name for name in learning)
    assert logits_of(model).equal(before)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == list(learning)
    with torch.no_grad():
        for parameter in learning.values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted = logits_of(model)
    assert not torch.allclose(adapted, before, atol=1e-3)
    merge_adapters(model)
    assert torch.allclose(logits_of(model), adapted, atol=1e-5 * float(adapted.abs().max()))
    assert list(model.state_dict()) == names
    assert not hasattr(model, "peft_config")


def test_the_axes_say_which_projections_have_one() -> None:
    def adapted(*axes: str) -> set[str]:
        model = make_model()
        learning = add_adapters(model, families()["llama"], axes, 1, 1.0, seed=0)
        return {name.split(".")[4] for name in learning}

    assert adapted("kv_heads") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted("ffn") == {"gate_proj", "up_proj", "down_proj"}
    assert len(adapted("hidden")) == 7
    with pytest.raises(RequestError, match="no projection of llama has encoder_ffn; its axes are"):
        adapted("encoder_ffn")


def test_the_seed_alone_decides_how_adapters_begin() -> None:
    def begun(seed: int) -> list[torch.Tensor]:
        model = make_model()
        torch.seed()
        learning = add_adapters(model, families()["llama"], ("ffn",), 2, 1.0, seed)
        return [p.detach() for name, p in learning.items() if "lora_A" in name]

    assert all(a.equal(b) for a, b in zip(begun(5), begun(5), strict=True))
    assert not any(a.equal(b) for a, b in zip(begun(5), begun(6), strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_A19_a_recovered_drafter_is_a_plain_checkpoint(
    tied: bool, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Head and embeddings are as they were, tied or not; the folder reloads equal."""
    model = make_model(tie_word_embeddings=tied)
    head = model.lm_head.weight.detach().clone()
    curve = distill(
        model, families()["llama"], rows(), rows(2), SHORT, seed=0, state=tmp_path / "state"
    )
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert model.lm_head.weight.equal(head)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    again = load_model(resolve(str(save(model))))
    assert logits_of(again).equal(logits_of(model))


def test_a_killed_recovery_goes_on_with_the_same_adapters(tmp_path: Path) -> None:
    whole = make_model()
    distill(whole, families()["llama"], rows(), [], SHORT, seed=3, state=tmp_path / "a")
    torch.manual_seed(99)
    first = make_model()

    evaluations: list[int] = []

    def stop_at_the_second(*_: Any) -> dict[str, float]:
        evaluations.append(1)
        if len(evaluations) == 2:
            raise KeyboardInterrupt
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            distill(first, families()["llama"], rows(), [], SHORT, seed=3, state=tmp_path / "b")
    second = make_model()
    distill(second, families()["llama"], rows(), [], SHORT, seed=3, state=tmp_path / "b")
    for name, tensor in second.state_dict().items():
        assert tensor.equal(whole.state_dict()[name]), name


def test_recomputed_activations_change_no_number(tmp_path: Path) -> None:
    curves = []
    for i, again in enumerate((False, True)):
        model = make_model()
        settings = replace(SHORT, lora_rank=0, checkpoint_activations=again)
        state = tmp_path / str(i)
        curves.append(
            distill(model, families()["llama"], rows(), rows(2), settings, seed=0, state=state)
        )
        assert not model.is_gradient_checkpointing
    assert curves[0] == curves[1]


def test_what_learns_without_adapters() -> None:
    table = families()["llama"]
    layers = replace(SHORT, lora_rank=0, train="layers")
    names = trainable_parameters(make_model(), table, layers, seed=0)
    assert "model.norm.weight" in names
    assert "lm_head.weight" not in names
    every = trainable_parameters(make_model(), table, replace(layers, train="all"), seed=0)
    assert "lm_head.weight" in every
