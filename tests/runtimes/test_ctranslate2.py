"""What CTranslate2 says of an export: shapes that only pruning makes, and every kind of model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import ctranslate2, export_drafter
from draftsmith.checkpoints.export.base import Report
from draftsmith.checkpoints.export.parity import Answers
from draftsmith.checkpoints.formats import resolve
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import CAUSAL, TINY_VOCAB, job_of, make_model, make_tokenizer

pytestmark = pytest.mark.runtime("ctranslate2")
Save = Callable[..., Path]
NO_WINDOW = {"sliding_window": 4096, "max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SOUND_TOKENS = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]


def export(
    model: Any, save: Save, tmp_path: Path, tokenizer: Any = None, **settings: Any
) -> Report:
    """A model exported for itself; the folder `out` holds what was written."""
    job, asked = job_of(model, save(model, tokenizer)), ExportSettings(**settings)
    out = tmp_path / "out"
    out.mkdir()
    ctranslate2.preflight(job, asked)
    return ctranslate2.export(job, out, asked)


def is_right(report: Report) -> None:
    """Logits at all positions and a greedy text were compared."""
    parity = report.parity
    assert parity is not None
    assert parity.reader.startswith("ctranslate2 4")
    assert parity.max_difference is not None
    assert parity.scale is not None
    assert parity.max_difference <= 1e-5 * parity.scale
    assert parity.top1_agreement == 1
    assert parity.greedy_compared
    assert parity.greedy_identical == parity.greedy_compared
    assert parity.strings_compared is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"head_dim": 6, "hidden_size": 40, "intermediate_size": 63},
        {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", CAUSAL)
def test_shapes_of_decoders(
    family: str, changes: dict[str, Any], save: Save, tmp_path: Path
) -> None:
    is_right(export(make_model(family, **(NO_WINDOW | changes)), save, tmp_path))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("mistral", {"rope_parameters": LLAMA3}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("gemma3_text", {"query_pre_attn_scalar": 20, "rms_norm_eps": 1e-3}),
        (
            "gemma3_text",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
                },
            },
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_scales_that_the_converter_forgets(
    family: str, changes: dict[str, Any], save: Save, tmp_path: Path
) -> None:
    is_right(export(make_model(family, **(NO_WINDOW | changes)), save, tmp_path))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bart", {}),
        ("bart", {"decoder_attention_heads": 2, "scale_embedding": True}),
        ("bart", {"tie_word_embeddings": True}),
        ("t5", {"d_kv": 6, "num_heads": 3, "num_layers": 4}),
        ("t5", {"tie_word_embeddings": True, "feed_forward_proj": "gated-gelu"}),
        ("marian", {}),
        ("marian", {"tie_word_embeddings": True, "decoder_layers": 1}),
    ],
    ids=str,
)
def test_encoder_decoders(family: str, changes: dict[str, Any], save: Save, tmp_path: Path) -> None:
    last = {"pad_token_id": TINY_VOCAB - 1, "decoder_start_token_id": TINY_VOCAB - 1}
    padded = family == "marian"
    model = make_model(family, **(last if padded else {}), **changes)
    is_right(export(model, save, tmp_path, with_last_padding() if padded else None))


def with_last_padding() -> Any:
    """A tokenizer with the padding where translation models have it."""
    tokenizer = make_tokenizer(TINY_VOCAB - 1)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer


def with_sound() -> Any:
    """A tokenizer with the tokens that a prompt of sound needs."""
    tokenizer = make_tokenizer(TINY_VOCAB - len(SOUND_TOKENS))
    tokenizer.add_special_tokens({"additional_special_tokens": SOUND_TOKENS})
    return tokenizer


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "decoder_layers": 1}])
def test_sound(changes: dict[str, Any], save: Save, tmp_path: Path) -> None:
    tokenizer = with_sound()
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    model = make_model("whisper", decoder_start_token_id=start, **changes)
    report = export(model, save, tmp_path, tokenizer)
    assert report.parity is not None
    assert report.parity.max_difference is None
    assert report.parity.greedy_compared
    assert report.parity.greedy_identical == report.parity.greedy_compared
    assert "models.Whisper(" in report.launch


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_smaller_tensor_types(precision: str, save: Save, tmp_path: Path) -> None:
    report = export(make_model(), save, tmp_path, precision=precision)
    assert report.parity is not None
    assert report.parity.max_difference is not None
    assert report.parity.max_difference > 1e-4
    assert report.notes[0].startswith("it has no draft model")
    assert "max_length=4" in report.launch


def test_a_cpu_whose_8_bit_products_overflow_is_told_of(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI; the weights are right nevertheless, and the export is kept."""
    read_back = ctranslate2.read_back

    def overflowing(*asked: Any, compute_type: str) -> Answers:
        answers = read_back(*asked, compute_type=compute_type)
        assert answers.logits is not None
        wrong = answers.logits.roll(1, -1)
        return replace(answers, logits=wrong) if compute_type == "default" else answers

    monkeypatch.setattr(ctranslate2, "read_back", overflowing)
    report = export(make_model(), save, tmp_path, precision="int8")
    assert report.parity is not None
    assert report.parity.top1_agreement is not None
    assert report.parity.top1_agreement > 0.9
    assert report.notes[1].startswith("8-bit products on this CPU change logits by ")


def test_ids_without_a_string_keep_their_place(save: Save, tmp_path: Path) -> None:
    """The converter counts tokens, so that one gap would move all that follow."""
    tokenizer, model = make_tokenizer(80), make_model()
    folder = save(model, tokenizer)
    file = folder / "tokenizer.json"
    plain = json.loads(file.read_text())
    moved = next(s for s, i in plain["model"]["vocab"].items() if i == 79)
    plain["model"]["vocab"][moved] = 90
    file.write_text(json.dumps(plain))
    (tmp_path / "out").mkdir()
    is_right(ctranslate2.export(job_of(model, folder), tmp_path / "out", ExportSettings()))
    strings = json.loads((tmp_path / "out" / "ctranslate2" / "vocabulary.json").read_text())
    assert len(strings) == TINY_VOCAB
    assert strings[90] == moved
    assert strings[79] == "[PAD79]"


def test_a_wrong_export_fails(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stated scale of queries, the runtime takes that of other models."""
    monkeypatch.setattr(ctranslate2, "_attention", lambda *_: {})
    with pytest.raises(DraftsmithError, match="read back, its logits"):
        export(make_model("gemma3_text", **NO_WINDOW), save, tmp_path)


def test_what_the_converter_says_is_told(save: Save, tmp_path: Path) -> None:
    job = job_of(make_model("t5", num_layers=4), save(make_model()))
    job.model.config.dense_act_fn = "unheard-of"
    with pytest.raises(DraftsmithError, match="its converter failed: 'unheard-of'"):
        ctranslate2.export(job, tmp_path, ExportSettings())
    assert not (tmp_path / "ctranslate2").exists()


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {}, {"precision": "int4"}, "precision int4 is none of its.* set export.precision"),
    ("mistral", {"sliding_window": 8}, {}, r"windows \(here of 8 tokens\).* export.max_length: 8"),
    ("mistral", {"sliding_window": 8}, {"max_length": 9}, "texts may have 9;"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        "rotary scaling 'dynamic' is not converted",
    ),
    ("whisper", {}, {}, r"has no token <\|startoftranscript\|>"),
    ("marian", {}, {}, "the padding, from which .* <pad> = 95, but is None"),
    (
        "marian",
        {"share_encoder_decoder_embeddings": False},
        {},
        "the encoder has a vocabulary of its own",
    ),
]


@pytest.mark.parametrize(("family", "changes", "settings", "message"), REFUSED, ids=str)
def test_refusals(
    family: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    save: Save,
    tmp_path: Path,
) -> None:
    with pytest.raises(RequestError, match=f"export ctranslate2: .*{message}"):
        export(make_model(family, **changes), save, tmp_path, **settings)
    assert not list((tmp_path / "out").iterdir())


def test_windows_that_no_text_reaches_are_taken(save: Save, tmp_path: Path) -> None:
    is_right(export(make_model("mistral", sliding_window=80), save, tmp_path, max_length=80))


def test_a_model_that_it_does_not_know(save: Save) -> None:
    job = job_of(make_model(), save(make_model()))

    class Unheard:
        sliding_window = None

    with pytest.raises(RequestError, match=r"knows no Unheard; set export\.to"):
        ctranslate2.preflight(replace(job, config=Unheard()), ExportSettings())


def test_A32_counts_are_compared_before_converting(save: Save) -> None:
    job, larger = job_of(make_model(), save(make_model())), make_tokenizer()
    larger.add_tokens([f"<extra{i}>" for i in range(TINY_VOCAB)])
    target = resolve(str(save(make_model(), larger, "larger")))
    with pytest.raises(RequestError, match="only 96 rows"):
        ctranslate2.preflight(replace(job, target=target), ExportSettings())


def test_the_command_writes_it(save: Save, tmp_path: Path) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    report = export_drafter(
        resolve(str(drafter)),
        resolve(str(target)),
        tmp_path / "out",
        ExportSettings(to=("ctranslate2",)),
    )
    assert report["ctranslate2"]["parity"]["greedy_compared"]
    assert torch.tensor(report["ctranslate2"]["parity"]["max_difference"]) < 1e-4
