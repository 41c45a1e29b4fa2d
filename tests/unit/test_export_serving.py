"""vLLM, SGLang and TensorRT-LLM: what starts them, and which pairs they would refuse."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from draftsmith.checkpoints.export import export_drafter, exporter, vllm
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model

ENGINES = ("vllm", "sglang", "tensorrt-llm")
# Narrower heads than TensorRT-LLM knows would hide every other rule.
WIDE = {"head_dim": 32}


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written must not hang on what is installed; tests/runtimes reads it back."""
    monkeypatch.setattr(vllm, "is_installed", lambda runtime: False)


@pytest.fixture
def notes(save: Callable[..., Path]) -> Callable[..., str]:
    """Asks an engine about a drafter for a target, both tiny; returns its notes."""

    def ask(
        engine: str,
        target: dict[str, Any] | None = None,
        family: str = "llama",
        settings: dict[str, Any] | None = None,
        **drafter: Any,
    ) -> str:
        folder = save(make_model(family, **WIDE | (target or {})))
        job = job_of(make_model(family, seed=1, **WIDE | drafter), folder)
        return "\n".join(exporter(engine).preflight(job, ExportSettings(**settings or {})))

    return ask


@pytest.mark.parametrize(
    ("engine", "launch", "content"),
    [
        (
            "vllm",
            "vllm serve TARGET --config vllm.yaml",
            {
                "tensor-parallel-size": 2,
                "speculative-config": {
                    "method": "draft_model",
                    "model": "hf",
                    "num_speculative_tokens": 3,
                    "draft_tensor_parallel_size": 2,
                },
                "max-model-len": 128,
            },
        ),
        (
            "sglang",
            "python -m sglang.launch_server --model-path TARGET --config sglang.yaml",
            {
                "speculative-algorithm": "STANDALONE",
                "speculative-draft-model-path": "hf",
                "speculative-num-steps": 3,
                "speculative-eagle-topk": 1,
                "speculative-num-draft-tokens": 4,
                "tensor-parallel-size": 2,
                "context-length": 128,
            },
        ),
        (
            "tensorrt-llm",
            "trtllm-serve TARGET --config tensorrt-llm.yaml",
            {
                "backend": "pytorch",
                "tensor_parallel_size": 2,
                "speculative_config": {
                    "decoding_type": "Draft_Target",
                    "max_draft_len": 3,
                    "speculative_model": "hf",
                },
                "disable_overlap_scheduler": True,
                "max_seq_len": 128,
            },
        ),
    ],
)
def test_configurations_name_method_lookahead_and_lengths(
    engine: str, launch: str, content: dict[str, Any], save: Callable[..., Path], tmp_path: Path
) -> None:
    target, drafter = (
        resolve(str(save(make_model(seed=seed, **WIDE), name=name)))
        for seed, name in enumerate(("target", "drafter"))
    )
    settings = ExportSettings(to=(engine,), lookahead=3, tensor_parallel=2, max_length=128)
    folder = tmp_path / "out"
    export_drafter(drafter, target, folder, settings)
    report = json.loads((folder / "export.json").read_text())
    assert YAML(typ="safe").load(folder / f"{engine}.yaml") == content
    assert report[engine]["launch"] == launch
    assert report[engine]["parity"] is None
    assert f"{engine}.yaml was not tried" in report[engine]["notes"][-1]
    # What is launched must be there, and it was compared.
    assert (folder / "hf" / "model.safetensors").is_file()
    assert report["hf"]["parity"]["max_difference"] == 0.0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        # Heads cut from 4 to 3.
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, r"the drafter's heads \(3\)"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, r"the drafter's KV heads \(3\)"),
        ({"intermediate_size": 49}, 2, r"the drafter's FFN \(49\)"),
        ({"num_attention_heads": 8}, 8, r"the target's heads \(4\)"),
    ],
    ids=["heads", "kv-heads", "ffn", "target"],
)
def test_counts_that_gpus_cannot_share_are_refused(
    engine: str, changes: dict[str, int], gpus: int, message: str, notes: Callable[..., str]
) -> None:
    with pytest.raises(
        RequestError, match=f"^export {engine}: {message} can't be shared by {gpus}"
    ):
        notes(engine, settings={"tensor_parallel": gpus}, hidden_size=48, **changes)


@pytest.mark.parametrize("engine", ENGINES)
def test_odd_shapes_that_gpus_can_share_pass(engine: str, notes: Callable[..., str]) -> None:
    """KV heads are repeated where GPUs outnumber them; heads need not fill the hidden width."""
    for changes in (
        {"num_key_value_heads": 2, "hidden_size": 24},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
    ):
        assert not notes(engine, settings={"tensor_parallel": 4}, head_dim=64, **changes)


@pytest.mark.parametrize("engine", ENGINES)
def test_encoders_and_cut_vocabularies_are_refused_with_nothing_written(
    engine: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    whole = resolve(str(save(make_model("t5"), name="t5")))
    with pytest.raises(RequestError, match=f"export {engine}: t5 has an encoder"):
        export_drafter(whole, whole, tmp_path / "out", ExportSettings(to=(engine,)))
    assert not (tmp_path / "out").exists()
    job = job_of(make_model(**WIDE), save(make_model(**WIDE)))
    cut = replace(job, token_map=TokenMap(TINY_VOCAB, tuple(range(TINY_VOCAB)), 0))
    with pytest.raises(RequestError, match="cut vocabulary"):
        exporter(engine).preflight(cut, ExportSettings())


def test_A1_padded_sizes_are_mapped_or_refused_by_each_engines_rule(
    notes: Callable[..., str], save: Callable[..., Path], tmp_path: Path
) -> None:
    """90-odd tokens; 104 rows here, 96 there, and the other way about."""
    larger = {"vocab_size": 104}
    assert "96 rows, the target's 104: vLLM maps" in notes("vllm", target=larger)
    with pytest.raises(RequestError, match="export sglang: the drafter's head has 96 rows and the"):
        notes("sglang", target=larger)
    assert not notes("tensorrt-llm", target=larger)
    with pytest.raises(RequestError, match="104 rows, the target's 96: a drafted padding id"):
        notes("tensorrt-llm", vocab_size=104)
    job = job_of(make_model(**WIDE), save(make_model(**WIDE | larger)))
    vllm.export(job, tmp_path, ExportSettings())
    written = YAML(typ="safe").load(tmp_path / "vllm.yaml")
    assert written["speculative-config"]["use_heterogeneous_vocab"] is True


@pytest.mark.parametrize("engine", ENGINES)
def test_A11_a_shorter_context_is_told_or_limits_the_pair(
    engine: str, notes: Callable[..., str], save: Callable[..., Path], tmp_path: Path
) -> None:
    """The drafter knows 64 positions, the target 256."""
    short = {"max_position_embeddings": 64}
    told = notes(engine, **short)
    assert "the drafter knows 64 positions, the target 256" in told
    asked = {"max_length": 100}
    if engine == "vllm":
        assert "past them vLLM goes on by the target alone" in told
        assert notes(engine, settings=asked, **short)
    else:
        assert "started for texts of 64 tokens" in told
        with pytest.raises(RequestError, match=r"max_length: 100 .* 64 positions of the drafter"):
            notes(engine, settings=asked, **short)
    exporter(engine).export(
        job_of(make_model(**WIDE | short), save(make_model(**WIDE))), tmp_path, ExportSettings()
    )
    written = YAML(typ="safe").load(tmp_path / f"{engine}.yaml")
    assert written.get("context-length", written.get("max_seq_len")) in (
        [None] if engine == "vllm" else [64]
    )
    with pytest.raises(RequestError, match="max_length: 300 is more than the 256 positions of the"):
        notes(engine, settings={"max_length": 300})


@pytest.mark.parametrize("engine", ENGINES)
def test_A14_heads_that_do_not_fill_the_hidden_width(
    engine: str, notes: Callable[..., str]
) -> None:
    """Of the families, vLLM takes hidden / heads for head_dim in one, whatever the config says."""
    for name, family in families().items():
        if family.has_encoder:
            continue
        # Kinds of layers have a rule of their own.
        plain = {"family": name, "num_hidden_layers": 1, "head_dim": 64}
        if engine in family.derives_head_dim:
            with pytest.raises(RequestError, match="4 heads of 64 don't make hidden 32"):
                notes(engine, **plain)
            notes(engine, **plain | {"hidden_size": 256})
        else:
            notes(engine, **plain)
    assert any("vllm" in family.derives_head_dim for family in families().values())


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vllm", "no attention for them on CPUs"),
        ("sglang", "start with --attention-backend triton"),
    ],
)
def test_widths_of_heads_that_few_kernels_take_are_told(
    engine: str, message: str, notes: Callable[..., str]
) -> None:
    assert message in notes(engine, head_dim=40)
    assert not notes(engine, head_dim=64)


def test_widths_of_heads_that_end_tensorrt_llm_are_refused(notes: Callable[..., str]) -> None:
    with pytest.raises(RequestError, match="heads of 40: its attention takes 32, 48, 64"):
        notes("tensorrt-llm", head_dim=40)


def test_layers_of_two_kinds_are_refused_by_vllm_alone(notes: Callable[..., str]) -> None:
    mixed = {
        "family": "qwen3",
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 8,
    }
    with pytest.raises(RequestError, match="full_attention and sliding_attention, and vLLM"):
        notes("vllm", **mixed)
    for engine in ("sglang", "tensorrt-llm"):
        notes(engine, **mixed)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gguf_target_is_told_how_to_become_a_folder(
    engine: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    from draftsmith.checkpoints.export import gguf

    model = make_model(**WIDE)
    job = job_of(model, save(model))
    file = tmp_path / gguf.export(job, tmp_path, ExportSettings()).files[0]
    told = exporter(engine).preflight(job_of(model, file), ExportSettings())
    assert any("--to hf --out DIR` writes one" in note for note in told)
