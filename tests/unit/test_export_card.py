"""The model card of an export loads as the hub reads it and says what is known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from draftsmith.checkpoints.export import export_drafter
from draftsmith.checkpoints.export.base import Report
from draftsmith.checkpoints.export.card import FILE, Made, card_of, terms_of
from draftsmith.checkpoints.export.parity import Parity
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import job_of, make_model

Save = Callable[..., Path]
SCORE: dict[str, Any] = {
    "machine": {"cpu": "a CPU", "gpu": "none"},
    "prompts": "quick",
    "runtime": "torch",
    "verify": "greedy",
    "lossless": True,
    "decode": [
        {
            "lookahead": 4,
            "accepted_per_round": 1.5,
            "emitted_per_round": 2.5,
            "acceptance_rate": 0.375,
            "speedup_measured": None,
        }
    ],
    "verdict": {"text": "Draft with 4 proposals."},
}
REPORTS = {
    "hf": Report(
        ("hf",), "target.generate(assistant_model=drafter)", Parity("transformers 5", 0.1)
    ),
    "vllm": Report(("vllm",), "vllm serve TARGET", None, ("the target's context is 64",)),
}


@pytest.fixture
def job(tiny: Any, save: Save) -> Any:
    return job_of(tiny, save(tiny))


def text_of(job: Any, made: Made | None = None, reports: Any = REPORTS) -> str:
    """The card's body."""
    return str(card_of(job, reports, made or Made()).text)


def test_an_export_has_a_card_at_both_places(tiny: Any, save: Save, tmp_path: Path) -> None:
    """Loaded offline, as the hub would; it names no folder of this machine."""
    target, drafter = save(tiny, name="target"), save(make_model(seed=1), name="drafter")
    (target / FILE).write_text("---\nlicense: apache-2.0\n---\n# A target\n")
    out = tmp_path / "out"
    settings = ExportSettings(to=("hf", "gguf"))
    models = resolve(str(drafter)), resolve(str(target))
    export_drafter(*models, out, settings, recipe="quick", score=SCORE)
    for folder in (out, out / "hf"):
        card = ModelCard.load(folder / FILE)
        assert card.data.license == "apache-2.0"
        assert card.data.library_name == "transformers"
        assert card.data.pipeline_tag == "text-generation"
        assert card.data.tags == ["speculative-decoding", "draft-model", "draftsmith"]
        assert card.data.base_model is None
        assert "# A drafter for target\n" in card.text
        assert "| recipe | quick |" in card.text
        assert "| 4 | 1.5 | 2.5 | 0.375 | – |" in card.text
        assert str(tmp_path) not in card.content
        assert ("llama-server -m TARGET.gguf" in card.text) == (folder == out)
        assert "assistant_model=drafter" in card.text


def test_the_base_model_is_a_target_of_the_hub(job: Any) -> None:
    card = card_of(replace(job, target=replace(job.target, spec="org/model")), REPORTS, Made())
    assert card.data.base_model == "org/model"
    assert card.data.base_model_relation == "finetune"
    assert "A drafter for org/model" in card.text


def test_a_license_that_is_not_stated_is_to_be_looked_up(job: Any) -> None:
    card = card_of(job, REPORTS, Made())
    assert card.data.license == "other"
    assert "**Check the target's license before you pass this drafter on**" in card.text
    (job.target.folder / FILE).write_text("---\ntags: [x]\n---\n")
    assert terms_of(job.target) is None


def test_a_license_of_its_own_name_is_carried_over_whole(job: Any) -> None:
    terms = {"license": "other", "license_name": "some-terms", "license_link": "LICENSE"}
    lines = "".join(f"{name}: {value}\n" for name, value in terms.items())
    (job.target.folder / FILE).write_text(f"---\nlanguage: en\n{lines}---\n# A target\n")
    assert terms_of(job.target) == terms
    card = card_of(job, REPORTS, Made())
    assert card.data.license_link == "LICENSE"
    assert "The license is the target's." in card.text


def gguf_target(tmp_path: Path, **fields: str) -> ModelRef:
    """A GGUF file that says this of itself, and holds one tensor."""
    import numpy as np
    from gguf import GGUFWriter

    path = tmp_path / "some.gguf"
    writer = GGUFWriter(path, "llama")
    for name, value in fields.items():
        writer.add_string(f"general.{name.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve(str(path))


def test_a_gguf_target_states_license_and_origin(job: Any, tmp_path: Path) -> None:
    target = gguf_target(
        tmp_path, license="mit", license__link="LICENSE", repo_url="https://huggingface.co/a/b"
    )
    card = card_of(replace(job, target=target), REPORTS, Made())
    assert (card.data.license, card.data.license_link) == ("mit", "LICENSE")
    assert card.data.base_model == "a/b"
    elsewhere = gguf_target(tmp_path, repo_url="https://example.org/a/b")
    card = card_of(replace(job, target=elsewhere), REPORTS, Made())
    assert card.data.base_model is None
    assert card.data.license == "other"
    assert "A drafter for some.gguf" in card.text


def test_what_is_not_known_is_left_out(job: Any) -> None:
    text = text_of(job)
    assert "recipe" not in text
    assert "## Measured" not in text
    assert "| parameters | " + f"{sum(p.numel() for p in job.model.parameters()):,} |" in text
    assert "### vllm\n\n```\nvllm serve TARGET\n```\n\nNote: the target's context is 64." in text
    assert "| hf | transformers 5 | – | – | – | – | – |" in text
    assert "| vllm |" not in text
    assert "## Read back" not in text_of(job, reports={"vllm": REPORTS["vllm"]})


def test_scores_say_whether_the_text_was_the_targets(job: Any) -> None:
    exact = text_of(job, Made(score=SCORE))
    assert "of the prompts `quick` in torch on a CPU, with greedy verification: the text" in exact
    assert "Draft with 4 proposals." in exact
    lossy = SCORE | {"lossless": False, "verdict": None, "machine": {"cpu": "x", "gpu": "a GPU"}}
    assert "on a GPU, with greedy verification.\n" in text_of(job, Made(score=lossy))


def test_figures_of_what_was_read_back(job: Any) -> None:
    parity = Parity("engine 1", 1e-5, 1.5e-6, 4.25, 1.0, 23, 24, True, 13)
    text = text_of(job, reports={"gguf": Report(("x.gguf",), "run", parity)})
    assert "| gguf | engine 1 | 1.5e-06 | 4.25 | 1 | 23 of 24 | 13 |" in text
    assert "| --- | --- | --- | --- | --- | --- | --- |" in text


@pytest.mark.parametrize(("agreement", "told"), [(None, False), (0.95, False), (0.61, True)])
def test_a_drafter_that_packing_made_another_is_told(agreement: float | None, told: bool) -> None:
    from draftsmith.checkpoints.export import _doubts
    from draftsmith.checkpoints.export.base import Report
    from draftsmith.checkpoints.export.parity import Parity

    found = list(_doubts(Report((), "", Parity("x", 1.5, top1_agreement=agreement))))
    assert bool(found) == told
    assert not told or "the same at 61% of 64 positions" in found[0]
    assert list(_doubts(Report((), ""))) == []
