"""Requests that an encoder–decoder can't answer are told before any weight is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.accept.pairing import Request
from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.pair import check_pair
from draftsmith.data.chat import encode_source
from draftsmith.errors import RequestError
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, check
from draftsmith.recipes.schema import ScoreSettings
from tests.conftest import make_model, make_tokenizer
from tests.unit.test_encoder_decoder import TEXT

# What a family's own tokenizer would add; the tiny one adds nothing.
OWN = {"share_encoder_decoder_embeddings": False}
LONG = "how many apples are left in the basket after lunch? " * 3


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_nothing(*args: object, **kwargs: object) -> None:
        pytest.fail("weights were loaded")

    for place in ("accept.pairing", "recipes.run", "distill.trace"):
        monkeypatch.setattr(f"draftsmith.{place}.load_model", load_nothing)


def prompts_of(folder: Path, *texts: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": t[:3], "prompt": t}) + "\n" for t in texts))
    return str(path)


def recipe_of(target: Path, prompts: str, folder: Path, *overrides: str) -> Run:
    path = folder / "r.yaml"
    path.write_text(
        f"target: {target}\ndata: {{source: prompts, path: [{prompts}]}}\n"
        f"prune: {{shape: {{layers: 2}}}}\nscore: {{prompts: {prompts}}}\nexport: {{to: [hf]}}\n"
    )
    return Run(load(str(path), list(overrides)), folder / "out")


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("short", ["target", "drafter"])
def test_a_source_that_an_encoder_cannot_hold_is_named(
    family: str, short: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    """By its prompt, its tokens and the places that there are; T5 has no table to end."""
    few = {short: {"max_position_embeddings": 16}}
    names = ("target", "drafter")
    target, drafter = (save(make_model(family, **few.get(n, {})), name=n) for n in names)
    prompts = prompts_of(tmp_path, "how many", LONG)
    message = rf"prompt how: \d+ tokens leave no room in the {short}'s context of 16; shorten"
    with pytest.raises(RequestError, match=message):
        score_drafter(resolve(str(target)), resolve(str(drafter)), ScoreSettings(prompts=prompts))
    if short == "target":
        with pytest.raises(RequestError, match=message):
            check(recipe_of(target, prompts, tmp_path))


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("nothing", ["", "  \n"])
def test_a_prompt_of_nothing_is_named(
    family: str, nothing: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    target = resolve(str(save(make_model(family))))
    prompts = prompts_of(tmp_path, "how many", nothing)
    with pytest.raises(RequestError, match=r"prompts\.jsonl:2: .*empty; fill it in or take"):
        score_drafter(target, target, ScoreSettings(prompts=prompts))


def test_signs_that_a_tokenizer_drops_are_nothing() -> None:
    """Nor is the EOS that it adds something to read."""
    from tokenizers import normalizers, processors

    tokenizer = make_tokenizer()
    rust = tokenizer.backend_tokenizer
    rust.normalizer = normalizers.Replace("\u200b", "")
    rust.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    assert tokenizer("\u200b")["input_ids"] == [2]
    assert encode_source(tokenizer, "\u200b") == []
    assert encode_source(tokenizer, "how\u200b")[-1] == 2


@pytest.mark.parametrize("family", TEXT)
def test_A2_a_drafter_of_another_vocabulary_is_refused(
    family: str, save: Callable[..., Path]
) -> None:
    """The first id that means something else is named."""
    target = save(make_model(family), name="target")
    drafter = save(make_model(family), name="drafter")
    tokenizer = json.loads((drafter / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    strings = {i: s for s, i in vocab.items()}
    vocab[strings[30]], vocab[strings[31]] = 31, 30
    (drafter / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RequestError, match="different tokenizers: id 30 is"):
        Request.of(resolve(str(target)), resolve(str(drafter)))


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        (
            OWN | {"decoder_vocab_size": 60},
            OWN | {"decoder_vocab_size": 50},
            "60 tokens.*one of 50",
        ),
        (OWN | {"decoder_vocab_size": 96}, {}, "one writes the tokens that it reads"),
        ({}, OWN | {"decoder_vocab_size": 96}, "one writes the tokens that it reads"),
    ],
)
def test_A2_what_is_written_must_be_the_same_vocabulary_too(
    target: dict[str, Any], drafter: dict[str, Any], message: str, save: Callable[..., Path]
) -> None:
    refs = [
        resolve(str(save(make_model("marian", **changes), name=name)))
        for name, changes in (("target", target), ("drafter", drafter))
    ]
    with pytest.raises(RequestError, match=message):
        check_pair(*refs)


def test_equal_vocabularies_of_what_is_written_are_a_pair(save: Callable[..., Path]) -> None:
    own = OWN | {"decoder_vocab_size": 60}
    refs = [resolve(str(save(make_model("marian", seed=s, **own), name=str(s)))) for s in range(2)]
    assert check_pair(*refs).tokens == 60


def test_A31_a_drafter_with_another_width_is_a_pair(save: Callable[..., Path]) -> None:
    wide = resolve(str(save(make_model("t5"), name="target")))
    narrow = resolve(str(save(make_model("t5", d_model=16, d_ff=24), name="drafter")))
    assert check_pair(wide, narrow).drafter_context is None


def test_a_source_with_fewer_places_than_the_target_is_refused(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    target = save(make_model("bart"), name="target")
    sibling = save(make_model("bart", max_position_embeddings=64), name="sibling")
    run = recipe_of(target, prompts_of(tmp_path, "how many"), tmp_path, f"source={sibling}")
    with pytest.raises(RequestError, match=r"recipe\.source: .*sibling tells 64 positions .* 256"):
        check(run)
