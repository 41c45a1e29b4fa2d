"""ONNX Runtime GenAI: its model builder, and its speculative decoding on the CPU."""

import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Nothing is to be fetched; and the runtime reports its use over the network except in CI.
os.environ |= {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1", "CI": "true"}

VERSION = f"ONNX Runtime GenAI {version('onnxruntime-genai')}"
_CONFIG = "genai_config.json"
# What the builder imports and onnxruntime-genai doesn't bring along.
_BUILDER_NEEDS = ("torch", "transformers", "onnx", "onnx_ir")


def missing_modules() -> dict[str, Any]:
    """What the builder lacks in this Python."""
    return {"modules": [name for name in _BUILDER_NEEDS if find_spec(name) is None]}


def build(source: str, path: str, precision: str, head_dim: int) -> dict[str, Any]:
    """An HF folder -> a folder that ONNX Runtime GenAI loads.

    Args:
        source: the HF folder.
        path: an existing folder.
        precision: fp32, int8 or int4.
        head_dim: of the KV cache, whose width the builder leaves open.
    """
    import onnx
    from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

    with tempfile.TemporaryDirectory() as cache:
        options = {"-i": source, "-o": path, "-p": precision, "-e": "cpu", "-c": cache}
        sys.argv[1:] = [word for option in options.items() for word in option]
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
    file = Path(path) / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    # Plain onnxruntime has no other way to know how wide an empty cache is.
    make_dim_param_fixed(model.graph, "kv_cache_dim", head_dim)
    onnx.save(model, file)
    return {}


def read(path: str, questions: dict[str, Any]) -> dict[str, Any]:
    """What an export says."""
    import onnxruntime_genai

    model = _load(_alone(path), stop_ids=(), threads=1, target=path)
    ids, prompt = questions["inputs"]["input_ids"][0], questions["prompt"]
    tokenizer = onnxruntime_genai.Tokenizer(path)
    return {
        "logits": _started(model, ids, new_tokens=0).get_output("logits")[0],
        "greedy": _finished(_started(model, prompt, questions["new_tokens"])),
        "strings": [tokenizer.encode(text).tolist() for text in questions["strings"]],
    }


def join(target: str, drafter: str, folder: str, lookahead: int) -> dict[str, Any]:
    """Write a folder with the target's config, the drafter in it, and links to both.

    Args:
        target: a folder of an export.
        drafter: likewise.
        folder: is made, and must not exist.
        lookahead: tokens proposed in a round.
    """
    _write(_joined(target, drafter, lookahead), Path(folder), target=target, drafter=drafter)
    return {}


class Pair:
    """A target alone, and the same with a drafter, which drafts from the first token on."""

    def __init__(
        self,
        target: str,
        drafter: str,
        lookaheads: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        threads: int,
    ) -> None:
        """Load the target twice, since a model with a drafter can't decode without it."""
        self._max_new_tokens = max_new_tokens
        self._alone = _load(_alone(target), stop_ids, threads, target=target)
        both = _joined(target, drafter, max(lookaheads))
        self._both = _load(both, stop_ids, threads, target=target, drafter=drafter)

    def generate(self, prompt: list[int], lookahead: int) -> dict[str, Any]:
        """The greedy text after some ids; see the package's docstring."""
        model = self._both if lookahead else self._alone
        start = time.perf_counter()
        generator = _started(model, prompt, self._max_new_tokens, lookahead)
        tokens = _finished(generator)
        found = {"tokens": tokens, "seconds": time.perf_counter() - start}
        return found | _counts(generator.get_speculative_stats() if lookahead else None)


def _counts(stats: dict[str, Any] | None) -> dict[str, Any]:
    if stats is None:
        return {"drafted": None, "accepted": None, "passes": None}
    return {
        "drafted": stats["draft_tokens_proposed"],
        "accepted": stats["draft_tokens_accepted"],
        # Those that settle tokens; after a round of one token, another reads the target's own.
        "passes": stats["rounds"],
    }


def _started(model: Any, ids: Sequence[int], new_tokens: int, lookahead: int = 0) -> Any:
    """A generator that has read some ids."""
    import onnxruntime_genai

    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + new_tokens, do_sample=False)
    if lookahead:
        params.set_speculative_options(max_draft_tokens=lookahead)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(ids)
    return generator


def _finished(generator: Any) -> list[int]:
    """The text that follows; the sequence of the generator itself has no stop id at its end."""
    tokens = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


def _load(config: dict[str, Any], stop_ids: Sequence[int], threads: int, **folders: str) -> Any:
    """A model that ends texts at some ids and nowhere else; without any, where its config says."""
    import onnxruntime_genai

    model = config["model"]
    # Without padding, for a padding id at the end of a prompt would not be read.
    model |= {"eos_token_id": list(stop_ids) or model["eos_token_id"], "pad_token_id": -1}
    for part in {"decoder", "draft"} & model.keys():
        model[part]["session_options"]["intra_op_num_threads"] = threads
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        _write(config, folder, **folders)
        return onnxruntime_genai.Model(str(folder))


def _joined(target: str, drafter: str, lookahead: int) -> dict[str, Any]:
    """The target's config with the drafter in it; texts end where either knows no position."""
    config, draft = _alone(target), _config(drafter)["model"]
    context = min(config["model"]["context_length"], draft["context_length"])
    config["model"] |= {"context_length": context, "draft": _linked(draft, "drafter")}
    config["search"]["max_length"] = context
    config["speculative"] = {"max_draft_tokens": lookahead}
    return config


def _alone(target: str) -> dict[str, Any]:
    """The target's config, for a folder with a link to it."""
    config = _config(target)
    config["model"]["decoder"] = _linked(config["model"], "target")
    return config


def _linked(model: dict[str, Any], link: str) -> dict[str, Any]:
    """How a model runs, its file behind a link: a path must not lead out of the folder."""
    decoder: dict[str, Any] = model["decoder"]
    return decoder | {"filename": f"{link}/{decoder['filename']}"}


def _config(path: str) -> dict[str, Any]:
    file = Path(path) / _CONFIG
    if not file.is_file():
        raise RuntimeError(f"{path}: has no {_CONFIG}; export it to ort-genai")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _write(config: dict[str, Any], folder: Path, **folders: str) -> None:
    """Write a config; what it names, and the target's tokenizer, are links."""
    folder.mkdir(parents=True)
    for name, path in folders.items():
        (folder / name).symlink_to(Path(path).absolute(), target_is_directory=True)
    for file in Path(folders["target"]).absolute().iterdir():
        if file.name != _CONFIG and ".onnx" not in file.name:
            (folder / file.name).symlink_to(file)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
