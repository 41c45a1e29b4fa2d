"""Drafters of blocks: what they learn from, what they are saved as, and the deeper encoder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.cache import cached
from draftsmith.accept.drafters import BlockDrafter
from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.blocks import MODULE, Block
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.growing import repeat_encoder, start_block_drafting
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.pair import SharedVocabulary, check_pair
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, collate
from draftsmith.distill.blocks import Blocks
from draftsmith.distill.evaluation import Costs, evaluate
from draftsmith.distill.head_loss import Projection
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.train import distill
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import BlockSettings, DistillSettings, ScoreSettings
from tests.conftest import TINY_VOCAB, killed_after, make_model, make_tokenizer
from tests.unit.test_batches import trace_rows

SEQ2SEQ = sorted(n for n, f in families().items() if f.has_encoder and not f.config.mel_bins)
FAMILIES = ["llama", *SEQ2SEQ]
SIZE = 3


def drafter_of_blocks(family: str, seed: int = 0) -> tuple[Any, Block]:
    """A random model whose last row is its mask."""
    model = make_model(family, seed=seed)
    model = start_block_drafting(model, families()[family], SIZE, range(TINY_VOCAB - 1))
    return model, Block(SIZE, TINY_VOCAB - 1)


def rows_for(family: str, count: int, seed: int = 0) -> list[TraceRow]:
    """Random texts; with sources of their own for an encoder."""
    rows = trace_rows(count, seed=seed)
    if not families()[family].has_encoder:
        return rows
    rng = np.random.default_rng(seed)
    return [
        replace(
            row, source=rng.integers(3, TINY_VOCAB - 1, int(rng.integers(2, 9))).astype(np.int32)
        )
        for row in rows
    ]


def likeliest(model: Any) -> Any:
    """A model's likeliest ids at a batch's positions."""

    def propose(batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            return Projection.of(model)(hidden_at_answers(model, batch)).argmax(-1)

    return propose


def blocks_of(model: Any, block: Block, **settings_: Any) -> Blocks:
    return Blocks(likeliest(model), block, BlockSettings(size=SIZE, **settings_), seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_is_what_is_drafted(family: str) -> None:
    """At a batch's masks stand the very tokens that the drafter would propose there."""
    model, block = drafter_of_blocks(family)
    rows = rows_for(family, 3)
    batch = collate(rows, max_length=16)
    blocks = blocks_of(model, block, prefixes=2)
    masked = blocks.mask(batch, np.random.default_rng(0))
    assert len(masked.ids) == 6
    found = likeliest(model)(masked).tolist()
    everything = SharedVocabulary(TINY_VOCAB)
    drafter = BlockDrafter(cached(model), everything, frozenset(), SIZE, block.mask_id)
    drafted, labels = [], []
    width = masked.ids.shape[1]
    for number, ids in enumerate(masked.ids.tolist()):
        text, row = ids[: ids.index(block.mask_id)], rows[number // 2]
        assert text == row.tokens[: len(text)].tolist()
        assert len(text) >= row.prompt_length
        own = [p - number * width for p in masked.positions.tolist() if p // width == number]
        assert own == list(range(len(text), len(text) + len(own)))
        drafter.reset(1, [0], [] if row.source is None else [row.source.tolist()])
        drafted += drafter.propose([text], [SIZE])[0].tokens[: len(own)]
        labels += row.tokens[:16][len(text) :][:SIZE].tolist()
    assert found == drafted
    assert masked.labels.tolist() == labels


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1), seed=st.integers(0, 99))
def test_glancing_shows_a_share_of_the_mistakes(share: float, seed: int) -> None:
    model, block = drafter_of_blocks("marian")
    blocks = blocks_of(model, block)
    rng = np.random.default_rng(seed)
    masked = blocks.mask(collate(rows_for("marian", 4, seed), max_length=16), rng)
    glanced = blocks.glance(masked, share, rng)
    width = masked.ids.shape[1]
    wrong = blocks.propose(masked) != masked.labels
    for row in range(4):
        own = masked.positions // width == row
        left = int((glanced.positions // width == row).sum())
        shown = round(share * int(wrong[own].sum()))
        assert left == int(own.sum()) - shown
    # What is shown are the texts' own tokens; what is asked is masked, and as before.
    kept = set(glanced.positions.tolist())
    ids, flat = glanced.ids.flatten().tolist(), masked.ids.flatten().tolist()
    for position, label in zip(masked.positions.tolist(), masked.labels.tolist(), strict=True):
        assert ids[position] == (block.mask_id if position in kept else label)
    others = set(range(len(ids))) - set(masked.positions.tolist())
    assert all(ids[i] == flat[i] for i in others)
    order = [masked.positions.tolist().index(p) for p in glanced.positions.tolist()]
    assert glanced.labels.tolist() == masked.labels[order].tolist()
    assert torch.equal(glanced.traces.top_ids, masked.traces.top_ids[order])


def test_less_is_shown_as_training_goes_on() -> None:
    model, block = drafter_of_blocks("marian")
    blocks = blocks_of(model, block, glancing=1.0, glancing_end=0.0)
    batch = collate(rows_for("marian", 6), max_length=16)
    counts = [blocks.of(batch, 5, progress).tokens for progress in (0.0, 0.5, 1.0)]
    assert counts[0] < counts[1] < counts[2]
    again = blocks.of(batch, 5, 0.5)
    assert torch.equal(again.ids, blocks.of(batch, 5, 0.5).ids)
    assert not torch.equal(blocks.of(batch, 6, 1.0).ids, blocks.of(batch, 5, 1.0).ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [TINY_VOCAB, TINY_VOCAB - 2])
def test_a_saved_drafter_tells_what_it_is(family: str, tokens: int, tmp_path: Path) -> None:
    """It loads here and, with its own file, in transformers; both propose the same."""
    from transformers import AutoModel

    source = tmp_path / "source"
    model = make_model(family)
    model.save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    model = start_block_drafting(model, families()[family], SIZE, range(tokens))
    block = Block(SIZE, tokens)
    assert Block.of(model.config) == block
    assert len(model.get_output_embeddings().weight) == max(TINY_VOCAB, tokens + 1)
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_model(model, resolve(str(source)), folder)
    loaded = load_model(resolve(str(folder)))
    assert Block.of(loaded.config) == block
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    theirs = AutoModel.from_pretrained(folder, trust_remote_code=True)
    read = [3, 4, 5, 6]
    everything = SharedVocabulary(TINY_VOCAB + 1)
    drafter = BlockDrafter(cached(loaded), everything, frozenset(), SIZE, block.mask_id)
    encoder = families()[family].has_encoder
    drafter.reset(1, [0], [read] if encoder else [])
    (draft,) = drafter.propose([[1, 7]], [SIZE])
    sources = {"input_ids": torch.tensor([read])} if encoder else {}
    assert theirs.propose(torch.tensor([[1, 7]]), **sources).tolist() == [draft.tokens]
    assert (folder / f"{MODULE}.py").is_file()


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_each_encoder_layer_comes_twice(family: str) -> None:
    table, model = families()[family], make_model(family)
    deep = repeat_encoder(model, table, 2)
    before, after = shape_of(model.config, table), shape_of(deep.config, table)
    assert after == replace(before, encoder_layers=2 * before.encoder_layers)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    encoder = model.get_encoder()
    blocks = next(m for m in encoder.modules() if isinstance(m, torch.nn.ModuleList))
    # The same in place: each block is passed twice before the next.
    deeper = torch.nn.ModuleList(block for block in blocks for _ in range(2))
    with torch.inference_mode():
        found = deep.get_encoder()(input_ids=ids).last_hidden_state
        name = next(n for n, m in encoder.named_modules() if m is blocks)
        encoder.set_submodule(name, deeper)
        expected = encoder(input_ids=ids).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5)
    assert repeat_encoder(model, table, 1) is model


LEARN = DistillSettings(
    block=BlockSettings(size=SIZE, prefixes=3),
    loss="sequence",
    label_smoothing=0.1,
    steps=12,
    batch=2,
    lr=1e-2,
    warmup=2,
    max_length=16,
    evaluate_every=6,
    save_every=5,
    lookahead=2,
)


def learn(model: Any, state: Path, **changes: Any) -> list[dict[str, float]]:
    """Let a drafter of blocks learn four texts."""
    family = model.config.model_type
    rows = [replace(row, sampled=False) for row in rows_for(family, 4)]
    settings_ = replace(LEARN, **changes)
    curve = distill(model, families()[family], rows, rows, settings_, seed=1, state=state)
    found = evaluate(model, rows, settings_, Costs(0.1))
    assert found["emitted_per_round"] == curve[-1]["emitted_per_round"]
    return curve


def test_golden_losses(tmp_path: Path) -> None:
    """Losses of a drafter of blocks: a change of what it learns from shows here."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "blocks.json").read_text())
    model, _ = drafter_of_blocks("t5")
    curve = learn(model, tmp_path / "state", evaluate_every=2)
    assert [point["loss"] for point in curve] == pytest.approx(golden["loss"], rel=1e-3)
    assert [point["tokens"] for point in curve] == golden["tokens"]


def test_blocks_are_learned(tmp_path: Path) -> None:
    """Texts that are learned by heart are drafted."""
    # One layer each: deeper ones that normalise their sums learn slowly from random weights.
    model = make_model("marian", encoder_layers=1, decoder_layers=1, dropout=0.0)
    model = start_block_drafting(model, families()["marian"], SIZE, range(TINY_VOCAB - 1))
    changes = {"steps": 160, "batch": 4, "lr": 3e-3, "label_smoothing": 0.0}
    curve = learn(model, tmp_path / "state", evaluate_every=80, save_every=200, **changes)
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert curve[-1]["top1"] > 0.5
    assert curve[-1]["emitted_per_round"] > 1.4


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_resumed_blocks_equal_ones_that_were_left_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = (drafter_of_blocks(family)[0] for _ in range(2))
    curve = learn(whole, tmp_path / "whole")
    with killed_after(8, monkeypatch):
        learn(drafter_of_blocks(family)[0], tmp_path / "killed")
    assert learn(resumed, tmp_path / "killed") == curve
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_blocks_refuse_what_they_cannot_use() -> None:
    with pytest.raises(RequestError, match="block_drafting is"):
        Block.of(type("config", (), {"block_drafting": {"size": 0, "mask_id": 1}}))
    for wrong in ({"teacher": "live"}, {"train": "layers"}, {"lookahead": 9}):
        with pytest.raises(ValueError, match="block"):
            DistillSettings(block=BlockSettings(size=SIZE), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing"):
        DistillSettings(label_smoothing=0.1)
    for name, value in {"teacher": "live", "temperature": 2.0, "cross_entropy": 0.5}.items():
        with pytest.raises(ValueError, match=f"{name} {value}: loss|{name} {value}"):
            DistillSettings(loss="sequence", **{name: value})  # type: ignore[arg-type]


def test_glancing_ends_where_it_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, seen = Blocks.of, []

    def watched(self: Blocks, batch: Batch, number: int, progress: float) -> Batch:
        seen.append(progress)
        return of(self, batch, number, progress)

    monkeypatch.setattr(Blocks, "of", watched)
    learn(drafter_of_blocks("marian")[0], tmp_path / "state")
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert seen == sorted(seen)


def test_a_mask_is_no_token_that_a_model_needs() -> None:
    """Not those that begin, end and pad its texts, and its embedding is theirs on the mean."""
    model = make_model("marian", bos_token_id=3, pad_token_id=4, decoder_start_token_id=5)
    table = model.get_decoder().get_input_embeddings().weight.detach().clone()
    grown = start_block_drafting(model, families()["marian"], SIZE, range(7, TINY_VOCAB))
    assert grown.config.block_drafting["mask_id"] == 0
    new = grown.get_decoder().get_input_embeddings().weight[0]
    assert torch.allclose(new, table[[2, 3, 4, 5, *range(7, TINY_VOCAB)]].mean(0), atol=1e-6)


def test_a_mask_behind_a_vocabulary_of_its_own_is_still_a_pair(
    tmp_path: Path, save: Callable[..., Path]
) -> None:
    model = make_model("marian", share_encoder_decoder_embeddings=False)
    target = resolve(str(save(model)))
    blocks = start_block_drafting(model, families()["marian"], SIZE, range(TINY_VOCAB))
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_model(blocks, target, folder)
    pair = check_pair(target, resolve(str(folder)))
    assert pair.shared.size == TINY_VOCAB
    assert not pair.shared.has(TINY_VOCAB)


def test_a_mask_is_never_proposed(tmp_path: Path, save: Callable[..., Path]) -> None:
    """Not even where it is the likeliest by far."""
    from transformers import AutoModel

    model, block = drafter_of_blocks("marian")
    model.final_logits_bias[0, block.mask_id] = 1e4
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_model(model, resolve(str(save(make_model("marian")))), folder)
    theirs = AutoModel.from_pretrained(folder, trust_remote_code=True)
    found = theirs.propose(torch.tensor([[1]]), input_ids=torch.tensor([[3, 4]]))
    assert block.mask_id not in found.tolist()[0]


@pytest.mark.parametrize("train", ["decoder", "all"])
def test_an_encoder_that_does_not_learn_is_as_in_drafting(train: Any, tmp_path: Path) -> None:
    """Without dropout, after evaluations too."""
    model, modes = make_model("marian", dropout=0.3), []
    model.get_encoder().register_forward_pre_hook(lambda *_: modes.append(model.training))
    encoder = model.get_encoder()
    encoder.register_forward_pre_hook(lambda *_: modes.append(encoder.training))
    rows = [replace(row, sampled=False) for row in rows_for("marian", 4)]
    settings_ = replace(LEARN, block=None, train=train)
    distill(model, families()["marian"], rows, rows, settings_, seed=1, state=tmp_path / "state")
    whole, own = modes[::2], modes[1::2]
    assert any(whole)
    assert own == (whole if train == "all" else [False] * len(own))


@pytest.fixture
def saved_blocks(tmp_path: Path, save: Callable[..., Path]) -> tuple[Any, Any]:
    """A target and a drafter of blocks for it, as references."""
    target = resolve(str(save(make_model("marian"), name="target")))
    model, _ = drafter_of_blocks("marian", seed=1)
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_model(model, target, folder)
    return target, resolve(str(folder))


def test_no_more_is_asked_than_a_block_has(saved_blocks: tuple[Any, Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "how many apples"}\n{"prompt": "she has nine"}\n')
    asked = ScoreSettings(prompts=str(prompts), max_new_tokens=8, lookahead=(SIZE + 1,))
    with pytest.raises(RequestError, match=f"lookahead {SIZE + 1}: .* proposes {SIZE} tokens"):
        score_drafter(*saved_blocks, asked, seed=0)
    score = score_drafter(*saved_blocks, replace(asked, lookahead=(SIZE,)), seed=0)
    assert [row.lookahead for row in score.replay] == list(range(1, SIZE + 1))
    assert score.lossless
