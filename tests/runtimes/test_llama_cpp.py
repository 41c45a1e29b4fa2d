"""llama.cpp loads what was exported, says what was meant, and drafts with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Limits, speculative_decode
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.checkpoints.export import gguf, parity, processes
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model, make_tokenizer

pytestmark = pytest.mark.runtime("llama.cpp")

CUT = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
BY_PART = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PROMPTS = [[5, 6, 7], [1, 20, 9, 44, 3], [70, 8]]


def export(
    model: Any, target: Path, folder: Path, kind: str = "F32"
) -> tuple[Path, gguf.Report, parity.Parity]:
    """The file, what is told of it, and how it compares."""
    job, settings = job_of(model, target), ExportSettings(gguf_type=kind)
    gguf.preflight(job, settings)
    report = gguf.export(job, folder, settings)
    assert report.parity is not None
    assert "llama.cpp" in report.parity.reader
    return folder / report.files[0], report, report.parity


@pytest.mark.parametrize(
    ("family", "changes", "both"),
    [
        ("llama", CUT | {"hidden_size": 24, "tie_word_embeddings": True}, True),
        ("llama", {"attention_bias": True, "mlp_bias": True}, False),
        ("mistral", CUT, False),
        ("qwen2", {}, True),
        ("qwen2", CUT, False),
        ("qwen3", CUT, True),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear"}}, False),
        ("llama", {"rope_parameters": ROPE | BY_PART}, False),
        ("qwen3", {"rope_parameters": ROPE | {"rope_type": "yarn"}}, False),
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_type": "yarn", "attention_factor": 0.9}},
            False,
        ),
    ],
    ids=str,
)
def test_A14_A17_pruned_shapes_say_what_was_meant(
    family: str, changes: dict[str, Any], both: bool, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Every shape that transformers reads back too, and those that it can't."""
    model = make_model(family, **({"sliding_window": None} | changes))
    _, report, found = export(model, save(make_model()), tmp_path)
    assert ("transformers" in found.reader) == both
    assert found.max_difference is not None
    assert 0 < found.max_difference < 1e-4
    assert found.top1_agreement == 1.0
    assert found.greedy_identical == found.greedy_compared
    other = "not as wide as the hidden width" in " ".join(report.notes)
    assert other == (family == "qwen2" and changes == CUT)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_packed_types_are_read(kind: str, save: Callable[..., Path], tmp_path: Path) -> None:
    _, _, found = export(make_model(), save(make_model()), tmp_path, kind)
    assert found.max_difference is not None
    assert found.max_difference > 1e-4


def trained_tokenizer(steps: Any, whole_words: bool = False) -> Any:
    """Merges of all bytes, after a text was split by some steps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(parity.HARD_STRINGS), "1234 5678 " * 9], trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def steps_of(rule: str) -> tuple[Any, bool]:
    """The steps of tokenizer.json that have a name in llama.cpp."""
    from tokenizers import Regex, pre_tokenizers

    from draftsmith.checkpoints.export.gguf_vocabulary import _PRE_TOKENIZERS

    (names, whole_words), *_ = (key for key, name in _PRE_TOKENIZERS.items() if name == rule)
    known = {
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "words": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    }
    return [
        known.get(name) or pre_tokenizers.Split(Regex(name), "isolated") for name in names
    ], whole_words


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe", "tekken"])
def test_A32_text_is_split_by_the_rule_of_that_name(
    rule: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = trained_tokenizer(*steps_of(rule))
    model = make_model(vocab_size=len(tokenizer), num_hidden_layers=1)
    _, _, found = export(model, save(model, tokenizer), tmp_path)
    # All but one that the tokenizer's decoder changes.
    assert found.strings_compared is not None
    assert found.strings_compared >= len(parity.HARD_STRINGS) - 1


def test_A32_a_wrong_rule_is_noticed(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = trained_tokenizer(*steps_of("smollm"))
    model = make_model(vocab_size=len(tokenizer), num_hidden_layers=1)
    monkeypatch.setattr(
        "draftsmith.checkpoints.export.gguf_vocabulary._form", lambda *_: "llama-bpe"
    )
    with pytest.raises(DraftsmithError, match="read back, it splits"):
        export(model, save(model, tokenizer), tmp_path)


def sentencepiece_folder(folder: Path) -> Path:
    """Files of a target as its authors published them before tokenizer.json."""
    import json

    import sentencepiece

    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(
        "\n".join(["how many apples are left in the basket", "don't we've 12 cafés"] * 9)
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | names))
    return folder


def test_A32_vocabularies_of_sentencepiece(tmp_path: Path) -> None:
    """From tokenizer.model: scores, bytes, and the space before a text."""
    folder = sentencepiece_folder(tmp_path / "target")
    model = make_model(vocab_size=340, num_hidden_layers=1)
    model.save_pretrained(folder)
    _, _, found = export(model, folder, tmp_path)
    assert found.strings_compared is not None
    assert found.strings_compared >= len(parity.HARD_STRINGS) - 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    """A target, a drafter that is nearly the same, and their files."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_model()
    drafter = make_model()
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) / 100)
    files = []
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
        path = folder / f"{name}.gguf"
        gguf.write(job_of(model, folder / name), path, "F32")
        files.append(path)
    return target, drafter, files[0], files[1]


def speculate(target: Path, drafter: Path, lookaheads: list[int], **changes: Any) -> dict[str, Any]:
    asked = {"prompts": PROMPTS, "max_new_tokens": 20, "stop_ids": [2], "threads": 1} | changes
    found = processes.ask(
        "llama.cpp",
        "speculate",
        target=str(target),
        drafter=str(drafter),
        lookaheads=lookaheads,
        **asked,
    )
    texts: dict[str, Any] = found["texts"]
    return texts


def test_rounds_are_those_of_our_own_decoding(pair: tuple[Any, Any, Path, Path]) -> None:
    """The same text, and the same proposals accepted, with exactly k in a round.

    llama.cpp's first round follows the token that comes of the prompt.
    """
    target, drafter, target_file, drafter_file = pair
    texts = speculate(target_file, drafter_file, [1, 3])
    vocabulary = SharedVocabulary(TINY_VOCAB)
    stop_ids = frozenset({2})
    proposer = AutoregressiveDrafter(CachedModel(drafter), vocabulary, stop_ids)
    for lookahead in (1, 3):
        for prompt, alone, text in zip(PROMPTS, texts["0"], texts[str(lookahead)], strict=True):
            assert text["tokens"] == alone["tokens"]
            assert alone["passes"] == len(alone["tokens"])
            first, *rest = text["tokens"]
            ours = speculative_decode(
                CachedModel(target),
                proposer,
                [*prompt, first],
                lookahead,
                Limits(19, stop_ids),
                vocabulary,
            )
            assert ours.tokens == rest
            assert text["passes"] == 1 + len(ours.rounds)
            assert text["accepted"] == sum(r.accepted for r in ours.rounds)


def test_a_stop_id_ends_the_text_or_is_told(pair: tuple[Any, Any, Path, Path]) -> None:
    """Where the file says that it does; otherwise times would be of more than the text."""
    _, _, target, drafter = pair
    texts = speculate(target, drafter, [3])
    tokens = texts["0"][0]["tokens"]
    assert 2 not in tokens[:-1]
    with pytest.raises(DraftsmithError, match=f"does not say that id {tokens[1]} ends a text"):
        speculate(target, drafter, [3], stop_ids=[tokens[1]])


def test_A11_past_the_drafters_context_the_text_is_the_targets(
    save: Callable[..., Path], tmp_path: Path, pair: tuple[Any, Any, Path, Path]
) -> None:
    """A drafter of 64 positions, a prompt of 60 and 20 new tokens."""
    _, _, target, _ = pair
    drafter = make_model(max_position_embeddings=64)
    path = tmp_path / "short.gguf"
    gguf.write(job_of(drafter, save(make_model())), path, "F32")
    prompt = torch.randint(3, TINY_VOCAB, (60,), generator=torch.Generator().manual_seed(0))
    texts = speculate(target, path, [4], prompts=[prompt.tolist()], stop_ids=[])
    assert texts["4"][0]["tokens"] == texts["0"][0]["tokens"]
    assert len(texts["0"][0]["tokens"]) > 4
