"""transformers drafts with an export by its own `generate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import processes
from tests.conftest import make_model

pytestmark = pytest.mark.runtime("transformers")
PROMPTS = [[5, 6, 7, 8], [9], [20, 21, 22]]
NEW_TOKENS = 24
# Heads cut from 4 to 3, of a width that hidden / heads is not.
ODD = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24, "head_dim": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a drafter that is nearly it, and one of another shape."""
    near = make_model(seed=3)
    with torch.no_grad():
        torch.manual_seed(0)
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    odd = make_model(seed=4, num_hidden_layers=1, tie_word_embeddings=True, **ODD)
    saved = {}
    for name, model in (("target", make_model(seed=3)), ("near", near), ("odd", odd)):
        saved[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(saved[name])
    return saved


@pytest.fixture
def pair(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The target with a drafter, in this process."""
    from transformers.generation import AssistedCandidateGenerator, utils

    from draftsmith.checkpoints.export.workers import transformers_worker

    # The worker puts its own there.
    monkeypatch.setattr(utils, "AssistedCandidateGenerator", AssistedCandidateGenerator)

    def load(drafter: str, stop_ids: tuple[int, ...] = ()) -> Any:
        target, small = str(folders["target"]), str(folders[drafter])
        return transformers_worker.Pair(target, small, [3], NEW_TOKENS, stop_ids, threads=1)

    return load


def test_drafts_leave_the_text_as_it_is_and_are_counted(folders: dict[str, Path]) -> None:
    found = processes.ask(
        "transformers",
        "speculate",
        prompts=PROMPTS,
        lookaheads=[3],
        target=str(folders["target"]),
        drafter=str(folders["near"]),
        max_new_tokens=NEW_TOKENS,
        stop_ids=[],
        threads=1,
    )
    assert found["runtime"].startswith("transformers ")
    for alone, drafted in zip(found["texts"]["0"], found["texts"]["3"], strict=True):
        assert drafted["tokens"] == alone["tokens"]
        assert len(alone["tokens"]) == alone["passes"] == NEW_TOKENS
        assert alone["drafted"] is None
        # A pass emits what it accepts and one token of its own.
        assert drafted["accepted"] + drafted["passes"] == NEW_TOKENS
        assert 0 < drafted["accepted"] <= drafted["drafted"] <= 3 * drafted["passes"]


def test_a_drafter_like_its_target_is_accepted_and_an_odd_one_drafts(
    pair: Callable[..., Any],
) -> None:
    same, odd = pair("target"), pair("odd")
    for prompt in PROMPTS:
        text = same.generate(prompt, 3)
        # Three drafts and a token more in each pass: 6 of them.
        assert (text["passes"], text["accepted"], text["drafted"]) == (6, 18, 18)
        drafted = odd.generate(prompt, 3)
        assert drafted["tokens"] == text["tokens"]
        assert drafted["accepted"] < 18
        assert drafted["drafted"] > 18


def test_a_stop_id_ends_the_text_and_an_accepted_one_counts(pair: Callable[..., Any]) -> None:
    """Where each id of the text in turn ends it: a draft in three cases of four."""
    text = pair("target").generate(PROMPTS[0], 0)["tokens"]
    ends = [text.index(token) for token in dict.fromkeys(text)]
    for end in ends[:8]:
        drafted = pair("target", stop_ids=(text[end],)).generate(PROMPTS[0], 3)
        assert drafted["tokens"] == text[: end + 1]
        assert drafted["passes"] == end // 4 + 1
        # The target's own tokens are every fourth.
        assert drafted["accepted"] == end + 1 - (end + 1) // 4
