"""Verifiers other than greedy score encoder–decoders as they do decoders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.accept.form import Score
from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.formats import resolve
from draftsmith.recipes.schema import ScoreSettings
from tests.conftest import make_model, make_tokenizer
from tests.unit.test_decode import perturbed
from tests.unit.test_score import shown

TEXTS = ("how many apples are left", "she has nine", "write a short list of words")


@pytest.fixture
def scored(save: Callable[..., Path], tmp_path: Path) -> Callable[..., Score]:
    """Scores a tiny Marian with a drafter that is a little off."""
    model = make_model("marian", seed=1)
    plain = make_tokenizer(template=None)
    target, drafter = (
        resolve(str(save(own, plain, name)))
        for own, name in ((model, "target"), (perturbed(model, 0.05), "drafter"))
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    def score(**changes: Any) -> Score:
        short = {"max_new_tokens": 12, "lookahead": (3,), "replay_lookahead": 3}
        settings = ScoreSettings(prompts=str(prompts), **(short | changes))
        return score_drafter(target, drafter, settings)

    return score


@pytest.mark.parametrize("batch", [1, 3])
def test_top_beta_is_marked_lossy_and_says_how_lossy(
    scored: Callable[..., Score], batch: int
) -> None:
    score = scored(verify="top_beta", beta=30, tau=9.0, batch=batch)
    plain = json.loads(json.dumps(score.to_plain(), allow_nan=False))
    assert (plain["verify"], plain["lossless"], plain["replay"]) == ("top_beta", False, [])
    assert (plain["settings"]["beta"], plain["settings"]["tau"]) == (30, 9.0)
    quality = plain["quality"]
    assert quality["texts"] == len(TEXTS)
    assert 0.0 < quality["token_identity"] < 1.0
    assert 0.0 <= quality["rouge_l"] <= 1.0
    assert plain["decode"][0]["acceptance_rate"] > scored(batch=batch).decode[0].acceptance_rate
    assert "LOSSY: top_beta" in shown(score)
    assert plain["verdict"]["text"].startswith("LOSSY: the output is not the target's own.")


def test_a_strict_top_beta_changes_nothing(scored: Callable[..., Score]) -> None:
    """Among one likeliest token is greedy, and is still called lossy."""
    strict, exact = scored(verify="top_beta", beta=1, tau=0.0), scored()
    assert strict.quality is not None
    assert strict.quality["token_identity"] == 1.0
    assert strict.lossless is False
    assert strict.decode[0].accepted == exact.decode[0].accepted
    assert exact.lossless is True
    assert exact.quality is None


def test_sampling_draws_what_the_target_draws(scored: Callable[..., Score]) -> None:
    """By real decoding and by replay; samples with and without drafts are alike."""
    score = scored(verify="sampling", temperature=1.0, samples=4)
    assert score.lossless is True
    assert score.quality is None
    assert score.samples is not None
    assert score.samples["p_value"] > 1e-3
    (row,) = score.decode
    assert row.identical_tokens is None
    assert [r.lookahead for r in score.replay] == [1, 2, 3]
    assert score.replay[2].accepted_per_round == pytest.approx(row.accepted_per_round, abs=0.8)
    again = scored(verify="sampling", temperature=1.0)
    assert again.decode[0].accepted == row.accepted
