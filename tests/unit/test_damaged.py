"""Damaged checkpoints end in one clear error or in the very model that was saved.

A plain folder can't tell all damage: tensors of one shape that changed places, another rotary
base, heads that only share out a width. Such cases are kept for folders with SHA256SUMS, which
must tell every changed byte.
"""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.checkpoints.checksums import FILE as CHECKSUMS
from draftsmith.checkpoints.export import gguf
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.inspection import inspect_checkpoint
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.checkpoints.saving import save_model
from draftsmith.errors import DraftsmithError
from tests.conftest import job_of, make_model, make_tokenizer
from tests.matrix import inputs

Damage = Callable[[Path, random.Random], None]

PLAIN_CASES = 200
CHECKSUM_CASES = 40
GGUF_CASES = 60
SHARD_SIZE = "40KB"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MOST_FLIPS = 3
MOST_ADDED = 64
# Deeper than the interpreter's stack.
NESTING = 100_000
# Names that break a line, that no file can have, or that can't be written as UTF-8.
ODD_NAMES = ("two\nlines", "\0", "\ud800", "x" * 300, "..", ".", "")
# More than could be built or read; what believes such a count must not take long to doubt it.
ABSURD = 1 << 40
# Where gguf's reader keeps the length of an array: after the key, the type and that of entries.
ARRAY_LENGTH = 4
SECONDS = 10

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "tied": ("qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "t5": ("t5", {"num_layers": 2, "num_decoder_layers": 3}),
    "tied-t5": ("t5", {"num_layers": 2, "num_decoder_layers": 3, "tie_word_embeddings": True}),
    "whisper": ("whisper", {"encoder_layers": 2, "decoder_layers": 2}),
}
GGUF_MODELS = ("llama", "tied")


# --- Whole checkpoints, made once


@dataclass(frozen=True)
class Original:
    """A whole checkpoint.

    Attributes:
        path: its folder or file.
        family: of its model.
        state: the bytes of every tensor.
        inputs: of the model.
        logits: what it computes from them.
        facts: what its inspection says of the tensors.
    """

    path: Path
    family: Family
    state: Mapping[str, bytes]
    inputs: Mapping[str, torch.Tensor]
    logits: torch.Tensor
    facts: Mapping[str, Any]

    def copy(self, to: Path) -> Path:
        """A copy to be damaged."""
        shutil.copytree(self.path.parent, to / "copy")
        return to / "copy" / self.path.name


Originals = Callable[[str, str], Original]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    """Give the whole checkpoint of a model in a format; each is made when first asked for."""

    @cache
    def made(model_name: str, form: str) -> Original:
        name, changes = MODELS[model_name]
        model, family = make_model(name, **changes), families()[name]
        path = tmp_path_factory.mktemp("whole") / "model"
        WRITERS[form](model, family, path, tmp_path_factory.mktemp("source"))
        if form == "gguf":
            path = path.with_suffix(".gguf")
        given = inputs(model, family)
        facts = facts_of(inspect_checkpoint(resolve(str(path))))
        return Original(path, family, state_bytes(model), given, logits(model, given), facts)

    return made


def write_plain(model: Any, family: Family, path: Path, scratch: Path) -> None:
    """As transformers saves it."""
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def write_sharded(model: Any, family: Family, path: Path, scratch: Path) -> None:
    """As transformers saves a large model."""
    model.save_pretrained(path, max_shard_size=SHARD_SIZE)
    make_tokenizer().save_pretrained(path)


def write_checksummed(model: Any, family: Family, path: Path, scratch: Path) -> None:
    """As draftsmith saves it."""
    write_plain(model, family, scratch / "source", scratch)
    path.mkdir()
    save_model(model, resolve(str(scratch / "source")), path)


def write_gguf(model: Any, family: Family, path: Path, scratch: Path) -> None:
    """As draftsmith exports it."""
    write_plain(model, family, scratch / "source", scratch)
    gguf.write(job_of(model, scratch / "source"), path.with_suffix(".gguf"), "F32")


WRITERS: dict[str, Callable[[Any, Family, Path, Path], None]] = {
    "plain": write_plain,
    "sharded": write_sharded,
    "checksummed": write_checksummed,
    "gguf": write_gguf,
}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Reports of transformers about what is damaged on purpose."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    quiet_transformers()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


# --- What must come of a damaged one


def state_bytes(model: Any) -> dict[str, bytes]:
    """Every tensor, to the bit."""
    return {name: t.numpy().tobytes() for name, t in model.state_dict().items()}


def logits(model: Any, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What a model computes."""
    with torch.inference_mode():
        found: torch.Tensor = model(**given).logits
    return found


def facts_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the tensors show, out of an inspection."""
    return {name: found[name] for name in ("family", "shape", "tied_head", "parameters")}


def outcome(work: Callable[[], Any], path: Path) -> Any:
    """What `work` gives; None where it ends in an error of one line that names the place."""
    try:
        return work()
    except DraftsmithError as error:
        message = str(error)
    assert len(message.splitlines()) == 1, message
    assert str(path) in message
    return None


def load(path: Path) -> Any:
    """The model, or None where it is refused."""
    return outcome(lambda: load_model(resolve(str(path)), device="cpu"), path)


def inspect(path: Path) -> Any:
    """What is known about the checkpoint, or None where it is refused."""
    return outcome(lambda: inspect_checkpoint(resolve(str(path))), path)


def check_refused_or_exact(path: Path, original: Original) -> None:
    """The contract of safetensors folders."""
    found, model = inspect(path), load(path)
    assert found is None or facts_of(found) == original.facts
    if model is not None:
        assert state_bytes(model) == original.state
        assert torch.equal(logits(model, original.inputs), original.logits)


def check_refused(path: Path) -> None:
    """Neither loaded nor inspected."""
    assert inspect(path) is None
    assert load(path) is None


@pytest.mark.parametrize("form", ["plain", "sharded", "checksummed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_checkpoint_is_loaded(
    name: str, form: str, originals: Originals, tmp_path: Path
) -> None:
    """Otherwise all that is refused below would prove nothing."""
    original = originals(name, form)
    path = original.copy(tmp_path)
    assert load(path) is not None
    assert inspect(path) is not None
    check_refused_or_exact(path, original)


# --- Damage to safetensors files


def flip_bits(file: Path, rng: random.Random, start: int = 0, end: int | None = None) -> None:
    """Flip one to three bits of the bytes from `start` to `end`."""
    content = bytearray(file.read_bytes())
    places = range(start * 8, (len(content) if end is None else end) * 8)
    for place in rng.sample(places, rng.randint(1, MOST_FLIPS)):
        content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)


def cut(file: Path, rng: random.Random) -> None:
    """Lose the end."""
    os.truncate(file, rng.randrange(file.stat().st_size))


def lengthen(file: Path, rng: random.Random) -> None:
    """Gain bytes at the end."""
    with file.open("ab") as end:
        end.write(rng.randbytes(rng.randint(1, MOST_ADDED)))


def weights(folder: Path) -> list[Path]:
    """The safetensors files."""
    return sorted(folder.glob("*.safetensors"))


def header_end(file: Path) -> int:
    """Where the tensors begin."""
    with file.open("rb") as start:
        return LENGTH_BYTES + int.from_bytes(start.read(LENGTH_BYTES), "little")


def flip_length(folder: Path, rng: random.Random) -> None:
    file = rng.choice(weights(folder))
    flip_bits(file, rng, 0, LENGTH_BYTES)


def flip_header(folder: Path, rng: random.Random) -> None:
    file = rng.choice(weights(folder))
    flip_bits(file, rng, LENGTH_BYTES, header_end(file))


def cut_weights(folder: Path, rng: random.Random) -> None:
    cut(rng.choice(weights(folder)), rng)


def lengthen_weights(folder: Path, rng: random.Random) -> None:
    lengthen(rng.choice(weights(folder)), rng)


@contextmanager
def header_of(file: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a header, to be changed; the data stay as they are."""
    end, content = header_end(file), file.read_bytes()
    header = json.loads(content[LENGTH_BYTES:end])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    yield tensors
    text = json.dumps({"__metadata__": header["__metadata__"], **tensors}).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    file.write_bytes(len(text).to_bytes(LENGTH_BYTES, "little") + text + content[end:])


def two_of_different_shapes(folder: Path, rng: random.Random) -> tuple[Path, str, str]:
    """A file, and two of its tensors."""
    found = []
    for file in weights(folder):
        shapes = {name: tuple(t.shape) for name, t in load_file(file).items()}
        found += [(file, a, b) for a in shapes for b in shapes if shapes[a] < shapes[b]]
    return rng.choice(found)


def reshape(folder: Path, rng: random.Random) -> None:
    """Another shape of as many numbers."""
    with header_of(rng.choice(weights(folder))) as tensors:
        entry = tensors[rng.choice(sorted(tensors))]
        shape = entry["shape"]
        others = (shape[::-1], [math.prod(shape)], [1, *shape], [*shape, 1], [shape[0] // 2, 2])
        entry["shape"] = rng.choice([other for other in others if other != shape])


def swap_shapes(folder: Path, rng: random.Random) -> None:
    file, a, b = two_of_different_shapes(folder, rng)
    with header_of(file) as tensors:
        tensors[a]["shape"], tensors[b]["shape"] = tensors[b]["shape"], tensors[a]["shape"]


def exchange_names(folder: Path, rng: random.Random) -> None:
    file, a, b = two_of_different_shapes(folder, rng)
    with header_of(file) as tensors:
        tensors[a], tensors[b] = tensors[b], tensors[a]


def change_dtype(folder: Path, rng: random.Random) -> None:
    """Another type of the same width."""
    with header_of(rng.choice(weights(folder))) as tensors:
        tensors[rng.choice(sorted(tensors))]["dtype"] = rng.choice(["I32", "U32"])


@contextmanager
def tensors_of(file: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a file, to be changed."""
    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, metadata={"format": "pt"})


def empty_a_tensor(folder: Path, rng: random.Random) -> None:
    with tensors_of(rng.choice(weights(folder))) as tensors:
        name = rng.choice(sorted(tensors))
        tensors[name] = tensors[name][:0]


def spoil_a_number(folder: Path, rng: random.Random) -> None:
    with tensors_of(rng.choice(weights(folder))) as tensors:
        numbers = tensors[rng.choice(sorted(tensors))].view(-1)
        numbers[rng.randrange(len(numbers))] = rng.choice([math.nan, math.inf, -math.inf])


# --- Damage to an index


@contextmanager
def json_of(file: Path) -> Iterator[Any]:
    """A JSON file, to be changed."""
    plain = json.loads(file.read_text(encoding="utf-8"))
    yield plain
    file.write_text(json.dumps(plain), encoding="utf-8")


@contextmanager
def weight_map(folder: Path) -> Iterator[dict[str, Any]]:
    """An index's list of tensors, to be changed."""
    with json_of(folder / INDEX) as index:
        yield index["weight_map"]


def misplace_a_tensor(folder: Path, rng: random.Random) -> None:
    with weight_map(folder) as places:
        name = rng.choice(sorted(places))
        places[name] = rng.choice(sorted(set(places.values()) - {places[name]}))


def unlist_a_tensor(folder: Path, rng: random.Random) -> None:
    with weight_map(folder) as places:
        del places[rng.choice(sorted(places))]


def unlist_a_shard(folder: Path, rng: random.Random) -> None:
    with weight_map(folder) as places:
        lost = rng.choice(sorted(places.values()))
        for name in [name for name, shard in places.items() if shard == lost]:
            del places[name]


def list_another_tensor(folder: Path, rng: random.Random) -> None:
    with weight_map(folder) as places:
        places["other.weight"] = rng.choice(sorted(places.values()))


def lose_a_shard(folder: Path, rng: random.Random) -> None:
    rng.choice(weights(folder)).unlink()


def rename_a_shard(folder: Path, rng: random.Random) -> None:
    file = rng.choice(weights(folder))
    file.rename(file.with_name("other.safetensors"))


def exchange_shards(folder: Path, rng: random.Random) -> None:
    a, b = rng.sample(weights(folder), 2)
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def place_elsewhere(folder: Path, shard: str, place: str) -> None:
    """Let an index name another file for all tensors of a shard."""
    with weight_map(folder) as places:
        for name in [name for name, known in places.items() if known == shard]:
            places[name] = place


def lead_outside(folder: Path, rng: random.Random) -> None:
    """Whole shards that lie elsewhere, or are named in a way that could lead there."""
    outside = shutil.copytree(folder, folder.with_name("outside"))
    shard = rng.choice(weights(folder)).name
    paths = [f"../outside/{shard}", str(outside / shard), f"../{folder.name}/{shard}", f"./{shard}"]
    place_elsewhere(folder, shard, rng.choice(paths))


def void_entries(folder: Path, rng: random.Random) -> None:
    void = rng.choice([None, 3, True, [], {}])
    with weight_map(folder) as places:
        names = sorted(places)
        for name in rng.choice([names, names[:1]]):
            places[name] = void


def void_index(folder: Path, rng: random.Random) -> None:
    text = rng.choice(["null", "[]", "", '{"weight_map": null}', '{"weight_map": {}}', "\xff"])
    (folder / INDEX).write_text(text, encoding="latin-1")


def nest_index(folder: Path, rng: random.Random) -> None:
    (folder / INDEX).write_text(rng.choice(["[", '{"a":']) * NESTING)


def flip_index(folder: Path, rng: random.Random) -> None:
    flip_bits(folder / INDEX, rng)


def cut_index(folder: Path, rng: random.Random) -> None:
    cut(folder / INDEX, rng)


def lose_index(folder: Path, rng: random.Random) -> None:
    (folder / INDEX).unlink()


# --- Damage to a config

_SIZES = ("layers", "ffn", "hidden", "vocab", "encoder_layers", "encoder_ffn", "mel_bins")
_HEADS = ("heads", "kv_heads", "encoder_heads", "head_dim")
# A size that is none; MISSING takes the field away.
MISSING = object()
NO_SIZES = ("4", "", None, -4, 0, 4.5, 4.0, True, [4], {}, MISSING)


def fields_of(plain: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The config fields that hold these sizes."""
    keys = families()[plain["model_type"]].config
    return sorted({field for name in names if (field := getattr(keys, name))} & plain.keys())


def contradict(folder: Path, rng: random.Random) -> None:
    """Another size than that of the tensors."""
    with json_of(folder / "config.json") as plain:
        told_by_tensors = families()[plain["model_type"]].config.head_dim is not None
        fields = fields_of(plain, _SIZES + (_HEADS if told_by_tensors else ()))
        field = rng.choice(fields)
        size = plain[field]
        plain[field] = rng.choice([size - 1, size + 1, size * 2, size // 2 or 5])


def void_size(folder: Path, rng: random.Random) -> None:
    """A size that is none, or that is left to a default."""
    with json_of(folder / "config.json") as plain:
        field = rng.choice(fields_of(plain, (*_SIZES, *_HEADS, "context")))
        value = rng.choice(NO_SIZES)
        if value is MISSING:
            del plain[field]
        else:
            plain[field] = value


def void_model_type(folder: Path, rng: random.Random) -> None:
    with json_of(folder / "config.json") as plain:
        value = rng.choice(["lama", "", None, 3, [], {}, MISSING])
        if value is MISSING:
            del plain["model_type"]
        else:
            plain["model_type"] = value


def flip_tied(folder: Path, rng: random.Random) -> None:
    with json_of(folder / "config.json") as plain:
        plain["tie_word_embeddings"] = not plain["tie_word_embeddings"]


def nest_config(folder: Path, rng: random.Random) -> None:
    (folder / "config.json").write_text("[" * NESTING)


def cut_config(folder: Path, rng: random.Random) -> None:
    cut(folder / "config.json", rng)


# --- Plain folders

# Group -> what is done by turns; the groups have equal shares of the cases.
KINDS: dict[str, tuple[Damage, ...]] = {
    "header": (flip_length, flip_header, flip_header),
    "size": (cut_weights, lengthen_weights),
    "shapes": (reshape, swap_shapes, exchange_names, change_dtype, empty_a_tensor),
    "index": (
        misplace_a_tensor,
        unlist_a_tensor,
        unlist_a_shard,
        list_another_tensor,
        lose_a_shard,
        rename_a_shard,
        exchange_shards,
        lead_outside,
        lead_outside,
        void_entries,
        void_index,
        nest_index,
        flip_index,
        cut_index,
        lose_index,
    ),
    "config": (
        contradict,
        void_size,
        contradict,
        void_size,
        void_model_type,
        flip_tied,
        cut_config,
        nest_config,
    ),
    "values": (spoil_a_number,),
}


@dataclass(frozen=True)
class Case:
    """One damaged checkpoint."""

    seed: int
    model: str
    form: str
    damage: Damage

    def made(self, originals: Originals, to: Path) -> tuple[Path, Original]:
        """The damaged copy, and what it was."""
        original = originals(self.model, self.form)
        path = original.copy(to)
        self.damage(path, random.Random(self.seed))
        return path, original


def plain_cases() -> Iterator[Case]:
    """Every group with every model, in one file and in several, by turns."""
    for seed in range(PLAIN_CASES):
        turn, group = divmod(seed, len(KINDS))
        kind = list(KINDS)[group]
        damages, form = KINDS[kind], "sharded" if kind == "index" or turn % 2 else "plain"
        model = list(MODELS)[turn // 2 % len(MODELS)]
        yield Case(seed, model, form, damages[turn % len(damages)])


def cases_of(form: str, count: int, models: Sequence[str], damages: Sequence[Damage]) -> list[Case]:
    """Every damage to every model by turns."""
    return [
        Case(seed, models[seed // len(damages) % len(models)], form, damages[seed % len(damages)])
        for seed in range(count)
    ]


def case_name(case: Case) -> str:
    """For the list of tests."""
    return f"{case.seed}-{case.model}-{case.form}-{case.damage.__name__}"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", plain_cases(), ids=case_name)
def test_a_damaged_folder_is_refused_or_exact(
    case: Case, originals: Originals, tmp_path: Path
) -> None:
    check_refused_or_exact(*case.made(originals, tmp_path))


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_shard_of_an_odd_name_is_refused(name: str, originals: Originals, tmp_path: Path) -> None:
    folder = originals("llama", "sharded").copy(tmp_path)
    place_elsewhere(folder, weights(folder)[0].name, name)
    check_refused(folder)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_listed_tensor_of_an_odd_name_is_refused(
    name: str, originals: Originals, tmp_path: Path
) -> None:
    folder = originals("llama", "sharded").copy(tmp_path)
    with weight_map(folder) as places:
        places[name] = weights(folder)[0].name
    check_refused(folder)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_stored_tensor_of_an_odd_name_is_refused(
    name: str, originals: Originals, tmp_path: Path
) -> None:
    folder = originals("llama", "plain").copy(tmp_path)
    with header_of(weights(folder)[0]) as tensors:
        tensors[name] = tensors.pop("model.norm.weight")
    check_refused(folder)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("form", ["plain", "gguf"])
def test_absurdly_many_layers_are_refused_at_once(
    form: str, originals: Originals, tmp_path: Path
) -> None:
    """What builds them one by one before it looks at the files never ends."""
    path = originals("llama", form).copy(tmp_path)
    if form == "gguf":
        set_gguf_number(path, "llama.block_count", ABSURD >> 16)
    else:
        with json_of(path / "config.json") as plain:
            plain["num_hidden_layers"] = ABSURD
    check_refused(path)


# --- Folders with checksums


def listed(folder: Path) -> list[Path]:
    """The files whose digests are known."""
    lines = (folder / CHECKSUMS).read_text().splitlines()
    return [folder / line.partition("  ")[2] for line in lines]


def flip_weights(folder: Path, rng: random.Random) -> None:
    flip_bits(rng.choice(weights(folder)), rng)


def flip_config(folder: Path, rng: random.Random) -> None:
    flip_bits(folder / "config.json", rng)


def flip_generation_config(folder: Path, rng: random.Random) -> None:
    flip_bits(folder / "generation_config.json", rng)


def flip_listed(folder: Path, rng: random.Random) -> None:
    flip_bits(rng.choice(listed(folder)), rng)


def cut_listed(folder: Path, rng: random.Random) -> None:
    cut(rng.choice(listed(folder)), rng)


def lengthen_listed(folder: Path, rng: random.Random) -> None:
    lengthen(rng.choice(listed(folder)), rng)


def lose_listed(folder: Path, rng: random.Random) -> None:
    rng.choice(listed(folder)).unlink()


def exchange_data(folder: Path, rng: random.Random) -> None:
    """Two tensors of one shape: each loads in the other's place."""
    with tensors_of(rng.choice(weights(folder))) as tensors:
        pairs = [(a, b) for a in tensors for b in tensors if a < b]
        a, b = rng.choice([(a, b) for a, b in pairs if tensors[a].shape == tensors[b].shape])
        tensors[a], tensors[b] = tensors[b], tensors[a]


def change_config(folder: Path, rng: random.Random) -> None:
    """Another number, which may fit the tensors as well."""
    with json_of(folder / "config.json") as plain:
        number = rng.choice(sorted(key for key, value in plain.items() if type(value) is int))
        plain[number] += 1


LISTED_KINDS: tuple[Damage, ...] = (
    flip_weights,
    flip_config,
    flip_generation_config,
    flip_listed,
    exchange_data,
    change_config,
    cut_listed,
    lengthen_listed,
    lose_listed,
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "case", cases_of("checksummed", CHECKSUM_CASES, list(MODELS), LISTED_KINDS), ids=case_name
)
def test_any_change_of_a_listed_file_is_refused(
    case: Case, originals: Originals, tmp_path: Path
) -> None:
    """Even what loads and computes something else."""
    check_refused(case.made(originals, tmp_path)[0])


def flip_checksums(folder: Path, rng: random.Random) -> None:
    flip_bits(folder / CHECKSUMS, rng)


def cut_checksums(folder: Path, rng: random.Random) -> None:
    cut(folder / CHECKSUMS, rng)


@pytest.mark.parametrize(
    "case",
    cases_of("checksummed", 2 * len(MODELS), list(MODELS), (flip_checksums, cut_checksums)),
    ids=case_name,
)
def test_damaged_checksums_are_refused_or_the_model_is_exact(
    case: Case, originals: Originals, tmp_path: Path
) -> None:
    check_refused_or_exact(*case.made(originals, tmp_path))


# --- GGUF files


def flip_gguf_header(path: Path, rng: random.Random) -> None:
    """Anywhere before the tensors: counts, metadata, vocabulary, shapes."""
    from gguf import GGUFReader

    flip_bits(path, rng, 0, int(GGUFReader(path).data_offset))


def set_gguf_number(path: Path, key: str, number: int) -> None:
    """Overwrite a number of the metadata."""
    from gguf import GGUFReader

    reader = GGUFReader(path, "r+")
    field = reader.fields[key]
    field.parts[field.data[0]][0] = number
    reader.data.flush()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    cases_of("gguf", GGUF_CASES, GGUF_MODELS, (flip_gguf_header, cut, lengthen, flip_gguf_header)),
    ids=case_name,
)
def test_a_damaged_gguf_is_refused_or_finite(
    case: Case, originals: Originals, tmp_path: Path
) -> None:
    """Nothing in the format tells another metadata value, so no exact model is asked for."""
    path, _ = case.made(originals, tmp_path)
    inspect(path)
    model = load(path)
    assert model is None or all(t.isfinite().all() for t in model.state_dict().values())


@pytest.mark.timeout(SECONDS)
def test_a_gguf_array_longer_than_its_file_is_refused_at_once(
    originals: Originals, tmp_path: Path
) -> None:
    """The gguf package reads empty slices past the end, entry by entry."""
    from gguf import GGUFReader

    path = originals("llama", "gguf").copy(tmp_path)
    reader = GGUFReader(path, "r+")
    reader.fields["tokenizer.ggml.token_type"].parts[ARRAY_LENGTH][0] = ABSURD
    reader.data.flush()
    check_refused(path)
