"""Exports load where they should and compute what was meant."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import export_drafter, gguf, hf
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model, load_tokenizer
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model, make_tokenizer

# GGUF has no windows for these families, and mistral's default is one.
NO_WINDOW = {"sliding_window": None}
# Within the tiny alphabet; tests/e2e/test_real.py tries the rest on a real tokenizer.
HARD = ["how many", "  two  spaces", "a\n\nb", "<s>user</s>", ". ?", ""]


def ids() -> torch.Tensor:
    return torch.randint(3, TINY_VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))


def export_gguf(
    model: Any, save: Callable[..., Path], tmp_path: Path, kind: str = "F32", tokenizer: Any = None
) -> Path:
    job, settings = job_of(model, save(model, tokenizer)), ExportSettings(gguf_type=kind)
    gguf.preflight(job, settings)
    return tmp_path / gguf.export(job, tmp_path, settings).files[0]


@pytest.fixture(autouse=True)
def without_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/runtimes asks llama.cpp; here files are read by transformers alone."""
    monkeypatch.setattr(gguf, "is_installed", lambda runtime: False)


SHAPES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"head_dim": 6, "hidden_size": 40},
    {"num_key_value_heads": 4},
    {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24, "head_dim": 8},
]
# Biases, and heads that are not as wide as the residual stream: written in an architecture in
# which transformers knows no biases; tests/runtimes has llama.cpp read it.
UNREAD = [("qwen2", SHAPES[2])]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (name, changes)
        for name, family in sorted(families().items())
        for changes in SHAPES
        if family.gguf and (name, changes) not in UNREAD
    ],
    ids=str,
)
def test_gguf_shapes_and_logits(
    family: str, changes: dict[str, Any], save: Callable[..., Path], tmp_path: Path
) -> None:
    from gguf import GGUFReader

    model = make_model(family, **(NO_WINDOW | changes))
    path = export_gguf(model, save, tmp_path)
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    config = model.config
    assert tensors["token_embd.weight"].shape.tolist() == [config.hidden_size, TINY_VOCAB]
    assert tensors["blk.3.ffn_down.weight"].shape.tolist() == [64, config.hidden_size]
    assert ("output.weight" in tensors) == (not config.tie_word_embeddings)
    again = load_model(resolve(str(path)))
    with torch.inference_mode():
        difference = (again(input_ids=ids()).logits - model(input_ids=ids()).logits).abs().max()
    assert difference <= 1e-4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *UNREAD,
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("mistral", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ],
    ids=str,
)
def test_A14_what_only_the_runtime_reads_back_needs_it(
    family: str, changes: dict[str, Any], save: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"only llama\.cpp itself can read.*pip install"):
        export_gguf(make_model(family, **(NO_WINDOW | changes)), save, tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


def test_A14_tensors_that_the_runtime_does_not_know_are_refused(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model("qwen3", attention_bias=True)
    with pytest.raises(RequestError, match=r"self_attn\..*bias has no place in .* qwen3"):
        export_gguf(model, save, tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_gguf_holds_what_the_type_leaves(
    kind: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Every matrix comes back as the library packs it, norms as they were; the file says which."""
    from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType, quants

    model = make_model()
    path = export_gguf(model, save, tmp_path, kind)
    file_type = GGUFReader(path).fields["general.file_type"].contents()
    assert LlamaFileType(file_type).name == f"MOSTLY_{kind}"
    found, packing = load_model(resolve(str(path))).state_dict(), GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.ndim > 1:
            values = quants.dequantize(quants.quantize(values, packing), packing)
        assert torch.equal(found[name], torch.from_numpy(values)), name


def test_a_coarse_type_does_not_hide_a_wrong_order(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_interleave", lambda array, head_dim: array)
    with pytest.raises(DraftsmithError, match="read back, its logits differ"):
        export_gguf(make_model(), save, tmp_path, "Q4_0")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_widths_that_a_type_cannot_pack_are_refused(
    kind: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=rf"packed as {kind} in blocks of 32.*F16 or F32"):
        export_gguf(make_model(intermediate_size=40), save, tmp_path, kind)
    assert not list(tmp_path.glob("*.gguf*"))


def test_windows_are_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"windows \(here of 8 tokens\) are not written"):
        export_gguf(make_model("mistral", sliding_window=8), save, tmp_path)


@pytest.mark.parametrize(
    ("drafter", "served", "noted"),
    [(64, None, True), (256, None, False), (64, 64, False), (256, 300, True)],
)
def test_A11_a_shorter_context_is_noted(
    drafter: int, served: int | None, noted: bool, save: Callable[..., Path]
) -> None:
    """The target knows 256 positions."""
    model = make_model(max_position_embeddings=drafter)
    settings = ExportSettings(max_length=served)
    notes = gguf.preflight(job_of(model, save(make_model())), settings)
    assert any(f"start it with -c {drafter}" in note for note in notes) == noted


def test_widths_that_k_quants_do_not_take_are_noted(save: Callable[..., Path]) -> None:
    target = save(make_model())
    model = make_model(hidden_size=256, intermediate_size=300, num_hidden_layers=1, head_dim=64)
    (note,) = gguf.preflight(job_of(model, target), ExportSettings())
    assert "rows of 300 are no multiple of 256" in note


def test_A17_uneven_layers_are_refused_by_name(save: Callable[..., Path], tmp_path: Path) -> None:
    """FFN widths [64, 48, 64, 64] can't become a GGUF; the layer is named."""
    model = make_model()
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, torch.nn.Linear(32, 48, bias=False))
    mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    with pytest.raises(DraftsmithError, match=r"layers\.1\.mlp\.\w+\.weight is \(48, 32\)"):
        gguf.export(job_of(model, save(make_model())), tmp_path, ExportSettings())
    assert not list(tmp_path.glob("*.gguf*"))


def test_A32_gguf_keeps_the_targets_tokenizer(save: Callable[..., Path], tmp_path: Path) -> None:
    """Read back, it splits hard strings alike; a tokenizer of 97 for 96 rows is refused."""
    path = export_gguf(make_model(), save, tmp_path)
    ours, theirs = make_tokenizer(), load_tokenizer(resolve(str(path)))
    for text in HARD:
        assert (
            ours(text, add_special_tokens=False)["input_ids"]
            == theirs(text, add_special_tokens=False)["input_ids"]
        )
    assert theirs.eos_token_id == 2
    assert theirs.chat_template == ours.chat_template
    larger = make_tokenizer()
    larger.add_tokens(["<extra>"] * 1 + [f"<extra{i}>" for i in range(TINY_VOCAB)])
    with pytest.raises(RequestError, match="only 96 rows"):
        export_gguf(make_model(seed=2), save, tmp_path, tokenizer=larger)


def test_A32_a_gguf_targets_vocabulary_is_copied_field_by_field(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    from gguf import GGUFReader

    first = export_gguf(make_model(), save, tmp_path)
    drafter, folder = make_model(seed=1, num_hidden_layers=2), tmp_path / "second"
    folder.mkdir()
    second = folder / gguf.export(job_of(drafter, first), folder, ExportSettings()).files[0]

    def vocabulary(path: Path) -> dict[str, Any]:
        fields = GGUFReader(path).fields
        return {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}

    assert vocabulary(first) == vocabulary(second)


def test_A2_a_reordered_tokenizer_is_refused_before_weights(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids 7 and 8 swapped: export stops before it loads a model."""
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1), name="drafter")
    file = drafter / "tokenizer.json"
    plain = json.loads(file.read_text())
    vocab = plain["model"]["vocab"]
    a, b = (next(s for s, i in vocab.items() if i == n) for n in (7, 8))
    vocab[a], vocab[b] = 8, 7
    file.write_text(json.dumps(plain))
    monkeypatch.setattr(
        "draftsmith.checkpoints.loading.load_model", lambda *a: pytest.fail("weights were loaded")
    )
    with pytest.raises(RequestError, match=r"different tokenizers: id 7 is "):
        export_drafter(
            resolve(str(drafter)), resolve(str(target)), tmp_path, ExportSettings(to=("hf",))
        )


def test_hf_folder_works_as_assistant_model(save: Callable[..., Path], tmp_path: Path) -> None:
    """Loads with plain transformers and drafts in its own `generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, drafter = make_model(), make_model(seed=1, num_hidden_layers=2)
    report = hf.export(job_of(drafter, save(target)), tmp_path, ExportSettings())
    assert report.parity is not None
    assert report.parity.max_difference == 0.0
    assert report.parity.strings_compared
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "hf").get_vocab() == make_tokenizer().get_vocab()
    )
    prompt = torch.tensor([[5, 6, 7]])
    alone = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assisted = target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=loaded)
    assert torch.equal(alone, assisted)


def test_a_wrong_export_fails(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reordering of q and k the file loads but computes something else."""
    monkeypatch.setattr(gguf, "_interleave", lambda array, head_dim: array)
    with pytest.raises(DraftsmithError, match="read back, its logits differ"):
        export_gguf(make_model(), save, tmp_path)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
BY_PART = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": BY_PART}, "scaling 'llama3' has no form in .* qwen3"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}, "with beta_fast 16.0"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' has no"),
        ("llama", {"intermediate_size": 40}, "rows of 40 can't be packed as Q8_0"),
    ],
    ids=["by part", "yarn", "dynamic", "block"],
)
def test_what_cannot_be_written_is_known_before_training(
    family: str, changes: dict[str, Any], message: str, save: Callable[..., Path]
) -> None:
    if "rope_parameters" in changes:
        changes = {"rope_parameters": {"rope_theta": 1e4} | changes["rope_parameters"]}
    model = make_model(family, **changes)
    with pytest.raises(RequestError, match=message):
        gguf.preflight(job_of(model, save(model)), ExportSettings(gguf_type="Q8_0"))


@pytest.mark.parametrize("order", ["apart", "missing"])
def test_A32_merges_that_scores_cannot_express_are_refused(
    order: str, save: Callable[..., Path]
) -> None:
    """Of a tokenizer without splits, llama.cpp merges by the score of what comes out."""
    merges = [("▁", "a"), ("a", "n"), ("▁a", "n"), ("▁", "an")]
    wrong = [*merges[:3], ("n", "n"), merges[3]] if order == "apart" else merges[:3]
    model, settings = make_model(), ExportSettings()
    gguf.preflight(job_of(model, save(model, scored_tokenizer(merges), "right")), settings)
    with pytest.raises(RequestError, match="an order that no scores of tokens give"):
        gguf.preflight(job_of(model, save(model, scored_tokenizer(wrong), "wrong")), settings)


def test_A32_an_unknown_split_is_refused(save: Callable[..., Path]) -> None:
    from tokenizers import pre_tokenizers

    model, tokenizer = make_model(), make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(False)]
    )
    with pytest.raises(RequestError, match=r"splits text by Digits.*target as \.gguf"):
        gguf.preflight(job_of(model, save(model, tokenizer)), ExportSettings())


def scored_tokenizer(merges: list[tuple[str, str]]) -> Any:
    """Like sentencepiece's: spaces become a sign, nothing is split."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = dict.fromkeys("".join(merge) for merge in merges)
    words = ["<unk>", "<s>", "</s>", "▁", "a", "n", *made]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def test_masks_of_another_model_are_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    from draftsmith.prune.compact import compact_from_file

    model = make_model()
    shape = shape_of(model.config, families()["llama"])
    masks = tmp_path / "masks.json"
    selection = Selection.of_layers(shape, [0, 1]).to_plain()
    masks.write_text(json.dumps({"selection": selection, "source_shape": vars(shape)}))
    larger = resolve(str(save(make_model(num_hidden_layers=6), name="larger")))
    with pytest.raises(RequestError, match=r"made for a model of 4 layers.* is llama of 6 layers"):
        compact_from_file(larger, masks, tmp_path)
