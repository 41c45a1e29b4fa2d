"""Traces by vLLM: a stand-in that speaks its API over a tiny model, and vLLM itself."""

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.data.traces import TraceRow, TraceStore, shard_name
from draftsmith.distill import trace
from draftsmith.distill.trace import Prompts, TextWriter, Writer, write_batch, write_traces
from draftsmith.distill.vllm_writer import VllmWriter
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.loading import load, validate
from draftsmith.recipes.run import Run, run_stages
from draftsmith.recipes.schema import Recipe
from tests.conftest import make_model, make_tokenizer

INSTALLED = importlib.util.find_spec("vllm") is not None
PROMPTS = (
    "how many apples are left?",
    "write a list",
    "she has nine",
    "first, we find",
    "a",
    "six",
)
# Rows of the head above the tokenizer's: padding, of which vLLM knows nothing.
PADDED = 104


# --- the stand-in


@dataclass
class SamplingParams:
    """As vLLM's, of which the writer uses these."""

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        if (
            not 0 <= self.temperature <= 2
            or self.max_tokens < 1
            or len(self.logit_bias or ()) > 1024
        ):
            raise ValueError(f"not among what vLLM takes: {self}")


def tokens_prompt(prompt_token_ids: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt_token_ids}


class LLM:
    """One row at a time, without a cache; log-probabilities as vLLM's sampler gives them."""

    made = 0
    open = 0
    generated: int = 0

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        seed: int,
        max_model_len: int,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        generation_config: str = "auto",
        tensor_parallel_size: int = 1,
    ) -> None:
        from transformers import AutoModelForCausalLM

        assert tensor_parallel_size == 1
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.context, self.max_logprobs = max_model_len, max_logprobs
        self.processed = logprobs_mode == "processed_logprobs"
        assert generation_config == "vllm"
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))
        LLM.made += 1
        LLM.open += 1

    def _shutdown(self) -> None:
        LLM.open -= 1

    def generate(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], use_tqdm: bool = True
    ) -> list[Any]:
        LLM.generated += 1
        return [
            SimpleNamespace(outputs=[self._write(prompt["prompt_token_ids"], asked)])
            for prompt, asked in zip(prompts, params, strict=True)
        ]

    @torch.inference_mode()
    def _write(self, ids: list[int], asked: SamplingParams) -> Any:
        if len(ids) + 1 > self.context:
            raise ValueError(f"a prompt of {len(ids)} tokens is longer than max_model_len")
        if (asked.logprobs or 0) > self.max_logprobs:
            raise ValueError(f"Requested sample logprobs of {asked.logprobs}")
        generator = torch.Generator().manual_seed(asked.seed or 0)
        written: list[int] = []
        found: list[dict[int, Any]] = []
        stops = set(asked.stop_token_ids or ()) | (set() if asked.ignore_eos else {2})
        for _ in range(min(asked.max_tokens, self.context - len(ids))):
            raw = self.model(input_ids=torch.tensor([[*ids, *written]])).logits[0, -1].float()
            logits = raw.clone()
            for token, bias in (asked.logit_bias or {}).items():
                logits[token] += bias
            token = int(logits.argmax())
            if asked.temperature:
                logits /= asked.temperature
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            written.append(token)
            logprobs = (logits if self.processed else raw).log_softmax(-1)
            if asked.logprobs is not None:
                found.append(self._place(logprobs, token, asked.logprobs))
            if token in stops:
                break
        return SimpleNamespace(token_ids=written, logprobs=found or None)

    def _place(self, logprobs: torch.Tensor, token: int, n: int) -> dict[int, Any]:
        """The chosen id first; n entries if it is among the top n, else n + 1."""
        top = logprobs.topk(n)
        chosen = float(logprobs[token])
        rank = int((logprobs >= chosen).sum())
        place = {token: SimpleNamespace(logprob=chosen, rank=rank, decoded_token=None)}
        for rank, (i, p) in enumerate(zip(top.indices.tolist(), top.values.tolist(), strict=True)):
            place[i] = SimpleNamespace(logprob=p, rank=rank + 1, decoded_token=None)
        return place


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `vllm`, in which a test may change things."""
    module: Any = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams, module.TokensPrompt = LLM, SamplingParams, tokens_prompt
    LLM.made = LLM.open = LLM.generated = 0
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


# --- what the tests work with


def recipe_for(target: object, tmp_path: Path, **changes: Any) -> Recipe:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    plain: dict[str, Any] = {
        "target": str(target),
        "dtype": "float32",
        "data": {"source": "prompts", "path": [str(prompts)]},
        "trace": {
            "engine": "vllm",
            "tokens": 200,
            "batch": 6,
            "top_n": 8,
            "max_new_tokens": 12,
            "sampled_share": 0.0,
        },
    }
    for key, value in changes.items():
        plain[key] = plain[key] | value
    return validate(plain)


def padded_model() -> Any:
    """Padding rows, a row without a string, ids that may not be said, or not first; two EOS."""
    model = make_model(vocab_size=PADDED)
    config = model.generation_config
    config.suppress_tokens, config.begin_suppress_tokens = [40, 41, 42], [50, 51, 60, 61]
    config.eos_token_id = [2, 30, 31, 32, 33]
    return model


def vllm_writer(target: ModelRef, recipe: Recipe, longest: int = 40) -> VllmWriter:
    return VllmWriter(
        target,
        make_tokenizer(),
        recipe.trace,
        dtype=torch.float32,
        seed=0,
        longest_prompt=longest,
    )


def batch(writer: TextWriter, recipe: Recipe, target: ModelRef, tmp_path: Path) -> list[TraceRow]:
    job = trace.Job.of(recipe, target, tmp_path)
    prompts = Prompts(job.data, job.trace.batch, make_tokenizer(), job.seed)
    return write_batch(writer, prompts, job, 0)


def same_as_transformers(model: Any, folder: Path, tmp_path: Path) -> list[TraceRow]:
    recipe, target = recipe_for(folder, tmp_path), resolve(str(folder))
    theirs = batch(vllm_writer(target, recipe), recipe, target, tmp_path)
    ours = batch(Writer(model, make_tokenizer()), recipe, target, tmp_path)
    for a, b in zip(theirs, ours, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert a.prompt_length == b.prompt_length
        assert not a.sampled
        assert a.domain == b.domain == "prompts"
        assert a.logprobs.dtype == np.float32
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert a.top_ids.dtype == np.uint16
        assert np.array_equal(a.top_ids, b.top_ids)
        assert a.top_logprobs.dtype == np.float16
        assert np.allclose(a.top_logprobs, b.top_logprobs, rtol=1e-3, atol=1e-3)
    return theirs


# --- tests


def test_greedy_rows_are_those_of_transformers(
    vllm: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Tokens exactly, with padding, ids that may not be said, and several that end a row."""
    model = padded_model()
    rows = same_as_transformers(model, save(model), tmp_path)
    assert len({len(r.answer) for r in rows}) > 1, "the test needs rows that end early"


def test_what_may_not_be_said_would_have_been(
    vllm: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Else the bans of the test above would prove nothing: without them, other rows come out."""
    model = padded_model()
    folder = save(model)
    recipe, target = recipe_for(folder, tmp_path), resolve(str(folder))
    free = vllm_writer(target, recipe)
    free._banned, free._never_first = set(), set()
    with pytest.raises(DraftsmithError, match=r"vLLM gave id \d+, which may not be said"):
        batch(free, recipe, target, tmp_path)
    firsts = vllm_writer(target, recipe)
    firsts._never_first = set()
    banned = batch(vllm_writer(target, recipe), recipe, target, tmp_path)
    other = batch(firsts, recipe, target, tmp_path)
    assert [r.answer[0] for r in banned] != [r.answer[0] for r in other]
    assert not {int(r.answer[0]) for r in banned} & {50, 51, 60, 61}


def test_sampled_rows_have_the_targets_log_probabilities(
    vllm: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    """With n = 2 most chosen tokens are not among the top n, where vLLM adds an entry."""
    model = padded_model()
    model.generation_config.begin_suppress_tokens = None
    folder = save(model)
    recipe = recipe_for(folder, tmp_path, trace={"sampled_share": 1.0, "top_n": 2})
    Path(recipe.data.path[0]).write_text('{"text": "how many?"}\n' * 6)
    target = resolve(str(folder))
    writer = vllm_writer(target, recipe)
    rows = batch(writer, recipe, target, tmp_path)
    outside = 0
    for row in rows:
        assert row.sampled
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([row.tokens.tolist()])).logits[0]
        said = writer.vocabulary.restrict(logits[row.prompt_length - 1 : -1]).log_softmax(-1)
        top = said.topk(2)
        assert np.array_equal(row.top_ids, top.indices.numpy())
        assert np.allclose(row.top_logprobs, top.values.numpy(), atol=2e-3)
        chosen = said.gather(-1, torch.from_numpy(row.answer.astype(np.int64))[:, None])[:, 0]
        assert np.allclose(row.logprobs, chosen.numpy(), atol=1e-4)
        outside += int((row.answer[:, None] != row.top_ids).all(-1).sum())
    assert outside > 5
    again = batch(vllm_writer(target, recipe), recipe, target, tmp_path)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(rows, again, strict=True))
    assert len({r.tokens.tobytes() for r in rows}) == len(rows), "rows have seeds of their own"


def test_store_is_the_same_after_a_stop(
    vllm: Any,
    save: Callable[..., Path],
    tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Self-written prompts, greedy and sampled; the second run writes only what is missing."""
    target = save(tiny)
    data = {"source": "self", "path": [], "openings": ["how ", "write "], "prompt_tokens": 10}
    recipe = recipe_for(target, tmp_path, data=data, trace={"sampled_share": 0.5})
    folders = [tmp_path / name for name in ("one", "stopped")]
    for folder in folders:
        folder.mkdir()
    write_traces(recipe, resolve(str(target)), folders[0])
    whole, LLM.generated = LLM.generated, 0
    store = TraceStore(folders[0])
    rows = store.rows("train") + store.rows("validation")
    assert {r.sampled for r in rows} == {True, False}
    assert {r.domain for r in rows} == {""}
    assert store.answer_tokens >= 200
    (folders[1] / shard_name(0)).write_bytes((folders[0] / shard_name(0)).read_bytes())
    (folders[1] / shard_name(1)).write_bytes(b"half a shard")
    write_traces(recipe, resolve(str(target)), folders[1])
    contents = [{p.name: p.read_bytes() for p in f.iterdir()} for f in folders]
    assert contents[0] == contents[1]
    assert 0 < LLM.generated < whole
    assert LLM.open == 0, "vLLM's processes hold the memory of the GPUs"


def test_nothing_is_started_where_all_is_done(
    vllm: Any, save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    recipe = recipe_for(target, tmp_path, trace={"tokens": 20})
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(recipe, resolve(str(target)), folder)
    (folder / "index.json").unlink()
    write_traces(recipe, resolve(str(target)), folder)
    assert LLM.made == 1
    assert TraceStore(folder).domains == ("prompts",)


def test_prompts_that_run_out_end_it(
    vllm: Any, save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    folder = tmp_path / "traces"
    folder.mkdir()
    recipe = recipe_for(target, tmp_path, trace={"tokens": 10_000, "batch": 4})
    write_traces(recipe, resolve(str(target)), folder)
    assert sum(s.rows for s in TraceStore(folder).shards) == len(PROMPTS)


def test_prompts_that_fill_the_context_are_left_out(
    vllm: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    target = save(make_model(max_position_embeddings=24))
    recipe = recipe_for(target, tmp_path)
    long = json.dumps({"text": "how many apples " * 20}) + "\n"
    Path(recipe.data.path[0]).write_text('{"text": "she has"}\n' + long)
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(recipe, resolve(str(target)), folder)
    store = TraceStore(folder)
    (row,) = store.rows("train") + store.rows("validation")
    assert len(row.tokens) <= 24


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm_nothing_is_done(save: Callable[..., Path], tiny: Any, tmp_path: Path) -> None:
    target = save(tiny)
    folder = tmp_path / "traces"
    folder.mkdir()
    with pytest.raises(
        RequestError, match=r"recipe\.trace\.engine: vllm: vLLM is not installed; pip install vllm"
    ):
        write_traces(recipe_for(target, tmp_path), resolve(str(target)), folder)
    assert not list(folder.iterdir())


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_a_run_without_vllm_is_refused_before_its_folder_is_made(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    recipe = load(str(tiny_recipe), ["trace.engine=vllm", "trace.sampled_share=0"])
    with pytest.raises(RequestError, match="vLLM is not installed"):
        run_stages(Run(recipe, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_gguf_is_refused_with_the_way_to_a_folder(vllm: Any, tmp_path: Path) -> None:
    target = ModelRef("package:some/model.gguf", tmp_path, "model.gguf")
    with pytest.raises(RequestError, match=r"model\.gguf is a GGUF.*draftsmith export .*--to hf"):
        write_traces(recipe_for("package:some/model.gguf", tmp_path), target, tmp_path)
    assert not LLM.made


def test_weights_of_other_sizes_than_the_config_says_are_refused(
    vllm: Any, save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(RequestError, match="config and weights don't belong together"):
        write_traces(recipe_for(target, tmp_path), resolve(str(target)), tmp_path)
    assert not LLM.made


def test_more_bans_than_vllm_takes_are_refused(
    vllm: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    target = save(make_model(vocab_size=2000))
    with pytest.raises(RequestError, match=r"1,90\d ids that may not be said.*ban 1,024"):
        write_traces(recipe_for(target, tmp_path), resolve(str(target)), tmp_path)
    assert not LLM.made


def test_draws_at_another_temperature_are_refused(tmp_path: Path) -> None:
    draws = {"sampled_share": 0.5, "temperature": 0.7}
    with pytest.raises(RequestError, match=r"temperature 0\.7: engine vllm.*sampled_share: 0\.0"):
        recipe_for("t", tmp_path, trace=draws)
    assert recipe_for("t", tmp_path, trace={"temperature": 0.7}).trace.engine == "vllm"
    assert recipe_for("t", tmp_path, trace=draws | {"engine": "transformers"})


def spoil_texts(text: Any) -> None:
    text.token_ids.pop()


def spoil_length(text: Any) -> None:
    text.logprobs.pop()


def spoil_top(text: Any) -> None:
    text.logprobs[0].popitem()


def spoil_chosen(text: Any) -> None:
    del text.logprobs[0][text.token_ids[0]]


def spoil_number(text: Any) -> None:
    text.logprobs[0][text.token_ids[0]].logprob = math.nan


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_texts, "does not end where it should"),
        (spoil_length, "log-probabilities of 11 tokens, not 12"),
        (spoil_top, "7 log-probabilities of a token, not 8"),
        (spoil_chosen, "no log-probability of id"),
        (spoil_number, "no log-probability of id"),
    ],
)
def test_other_sizes_than_asked_for_are_one_error(
    vllm: Any,
    save: Callable[..., Path],
    tiny: Any,
    tmp_path: Path,
    spoil: Callable[[Any], None],
    message: str,
) -> None:
    class Spoiled(LLM):
        def _write(self, ids: list[int], asked: SamplingParams) -> Any:
            text = super()._write(ids, asked)
            spoil(text)
            return text

    vllm.LLM = Spoiled
    target = save(tiny)
    with pytest.raises(DraftsmithError, match=f"vLLM gave.*{message}"):
        write_traces(recipe_for(target, tmp_path), resolve(str(target)), tmp_path)
    assert LLM.open == 0


def test_what_vllm_raises_is_one_error_with_a_cure(
    vllm: Any, save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    def too_small(**arguments: Any) -> None:
        raise ValueError("No available memory for the cache blocks.\n  Traceback and so on")

    vllm.LLM = too_small
    target = save(tiny)
    with pytest.raises(DraftsmithError, match=r"vLLM failed: No available memory.*trace\.workers"):
        write_traces(recipe_for(target, tmp_path), resolve(str(target)), tmp_path)


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed; pip install vllm")
def test_vllm_itself(save: Callable[..., Path], tmp_path: Path) -> None:
    """Wide enough heads for vLLM's kernels."""
    model = make_model(hidden_size=256, num_attention_heads=4, head_dim=64, vocab_size=PADDED)
    folder = save(model)
    recipe, target = recipe_for(folder, tmp_path), resolve(str(folder))
    writer = vllm_writer(target, recipe)
    try:
        theirs = batch(writer, recipe, target, tmp_path)
    finally:
        writer.close()
    ours = batch(Writer(model.to("cpu"), make_tokenizer()), recipe, target, tmp_path)
    for a, b in zip(theirs, ours, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.allclose(a.top_logprobs, b.top_logprobs, atol=1e-2)
