"""ONNX Runtime GenAI drafts with an exported pair, and the text stays the target's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export.ort_genai import export, join
from draftsmith.checkpoints.export.parity import questions_for
from draftsmith.checkpoints.export.processes import ask, read_back
from draftsmith.checkpoints.families import families
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import job_of, make_model, make_tokenizer

pytestmark = pytest.mark.runtime("ort-genai")

CONTEXT = 64


def make_target(**changes: Any) -> Any:
    return make_model(head_dim=16, attention_bias=True, **changes)


def write(model: Any, folder: Path) -> Path:
    """A model's export; its parity with transformers was checked."""
    hf = folder / "hf"
    model.save_pretrained(hf)
    make_tokenizer().save_pretrained(hf)
    report = export(job_of(model, hf), folder, ExportSettings(lookahead=3))
    assert report.parity is not None
    assert report.parity.strings_compared
    assert "lookahead=3" in report.launch
    return folder / report.files[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a drafter that is its first layers and knows fewer positions."""
    target = make_target()
    drafter = make_target(num_hidden_layers=3, max_position_embeddings=CONTEXT)
    drafter.load_state_dict(target.state_dict(), strict=False)
    folder = tmp_path_factory.mktemp("pair")
    return {"target": write(target, folder / "t"), "drafter": write(drafter, folder / "d")}


def speculate(pair: dict[str, Path], prompts: list[list[int]], **settings: Any) -> dict[str, Any]:
    settings = {"lookaheads": [1, 4], "max_new_tokens": 20, "stop_ids": [2]} | settings
    paths = {name: str(path) for name, path in pair.items()}
    return ask("ort-genai", "speculate", prompts=prompts, threads=1, **paths, **settings)["texts"]


def own_text(prompt: list[int]) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt])
    whole = make_target().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
    )
    text: list[int] = whole[0, len(prompt) :].tolist()
    return text


def test_drafting_changes_no_token_and_is_counted(pair: dict[str, Path]) -> None:
    """A prompt that ends with the padding id is read to its end too."""
    prompts = [[5, 6, 7], [8, 9, 10, 2]]
    texts = speculate(pair, prompts)
    ways = (texts[way] for way in ("0", "1", "4"))
    for prompt, alone, *drafted in zip(prompts, *ways, strict=True):
        assert alone["tokens"] == own_text(prompt)
        assert alone["accepted"] is None
        for lookahead, text in zip((1, 4), drafted, strict=True):
            assert text["tokens"] == alone["tokens"]
            assert 0 <= text["accepted"] <= text["drafted"] <= lookahead * text["passes"]
            # A pass adds a token of the target's own to those accepted, but for one past the limit.
            assert 0 <= text["accepted"] + text["passes"] - len(text["tokens"]) <= 1
    assert any(text["accepted"] for text in texts["4"])


def test_a_stop_id_is_included_and_ends_the_text(pair: dict[str, Path]) -> None:
    (whole,) = speculate(pair, [[5, 6, 7]], stop_ids=[])["0"]
    stop = whole["tokens"][3]
    texts = speculate(pair, [[5, 6, 7]], stop_ids=[stop])
    expected = whole["tokens"][: whole["tokens"].index(stop) + 1]
    assert [texts[way][0]["tokens"] for way in ("0", "1", "4")] == [expected] * 3


def test_A11_a_text_longer_than_the_drafters_context_is_refused(
    pair: dict[str, Path], tmp_path: Path
) -> None:
    """60 tokens and 20 new ones; past 64 positions the runtime would fail in the middle."""
    with pytest.raises(DraftsmithError, match=r"cannot be greater than model context_length \(64"):
        speculate(pair, [list(range(3, 63))])
    join(pair["target"], pair["drafter"], tmp_path / "pair", lookahead=3)
    config = json.loads((tmp_path / "pair" / "genai_config.json").read_text())
    assert config["model"]["context_length"] == config["search"]["max_length"] == CONTEXT
    assert config["speculative"] == {"max_draft_tokens": 3}
    assert (tmp_path / "pair" / config["model"]["draft"]["filename"]).is_file()
    assert (tmp_path / "pair" / "tokenizer.json").is_file()


def test_relative_paths_are_those_of_who_names_them(
    pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker links models from folders of its own."""
    whole = speculate(pair, [[5, 6, 7]], lookaheads=[2])
    monkeypatch.chdir(pair["target"])
    relative = {"target": Path("."), "drafter": pair["drafter"]}
    again = speculate(relative, [[5, 6, 7]], lookaheads=[2])
    assert again["2"][0]["tokens"] == whole["2"][0]["tokens"]
    questions = questions_for(make_target().config, families()["llama"])
    assert read_back("ort-genai", Path("."), questions).greedy


def test_a_folder_that_is_no_export_is_told(pair: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"has no genai_config\.json; export it to ort-genai"):
        join(pair["target"], tmp_path, tmp_path / "pair")
    assert not (tmp_path / "pair").exists()
