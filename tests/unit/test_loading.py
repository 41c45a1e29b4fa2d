"""Models in: what is refused before loading, what loading reports, and working without a GPU."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import draftsmith
from draftsmith.checkpoints.devices import compute_dtype, default_device, working_dtype
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.generation import repair_generation_config, stop_ids
from draftsmith.checkpoints.loading import describe, load_config, load_model, load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.errors import RequestError
from tests.conftest import make_model

Save = Callable[..., Path]


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights of a saved model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    plain = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(plain | changes), encoding="utf-8")


# --- resolve


def test_a_folder_is_found(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    ref = resolve(str(folder))
    assert ref == ModelRef(str(folder), folder)
    assert ref.path == folder


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no such model", r"there is no such folder or file; give an HF folder, a hub id"),
        ("/a/b/c", r"there is no such folder or file"),
        ("nothere.gguf", r"nothere\.gguf: there is no such file"),
        ("package:", r"write it as package:MODULE/FILE\.gguf"),
        ("package:json", r"write it as package:MODULE/FILE\.gguf"),
        ("package:/a.gguf", r"write it as package:MODULE/FILE\.gguf"),
        ("package:no_such_module_here/a.gguf", r"not installed; pip install .*no-such-module-here"),
        ("package:no_such_module_here.sub/a.gguf", "not installed"),
        ("package:email/a.gguf", r"the package has no such file; its \.gguf files: none"),
    ],
)
def test_what_is_not_there_is_refused(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        resolve(spec)
    assert str(raised.value).startswith(f"{spec}: ")


def test_a_hub_model_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def no_network(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(RequestError, match=r"org/model: .*\(no route to host\); check the name"):
        resolve("org/model")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"a folder or a \.gguf file, and this is neither"):
        resolve(str(tmp_path / "model.bin"))


def test_a_folder_without_config(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    (folder / "config.json").unlink()
    with pytest.raises(RequestError, match=r"no config\.json, so not an HF model folder$"):
        resolve(str(folder))
    (folder / "a.gguf").touch()
    with pytest.raises(RequestError, match="a GGUF inside it must be named as a file"):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickle_files_are_not_read(save: Save, tiny: Any, name: str) -> None:
    folder = save(tiny)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(RequestError, match=rf"no \.safetensors weights \(pickle .*: {name}\)"):
        resolve(str(folder))


def test_a_folder_without_weights(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    (folder / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"no \.safetensors weights$"):
        resolve(str(folder))


@pytest.mark.parametrize("size", [0, 4, 200, -1])
def test_truncated_safetensors(save: Save, tiny: Any, size: int) -> None:
    folder = save(tiny)
    file = folder / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    with pytest.raises(RequestError, match=r"model\.safetensors is damaged .*get it again"):
        resolve(str(folder))


def test_an_unfinished_folder_is_refused(save: Save, tiny: Any) -> None:
    folder = save(tiny, name="pruned.partial")
    with pytest.raises(RequestError, match=r"an unfinished folder, not a checkpoint"):
        resolve(str(folder))


@pytest.fixture
def sharded(save: Save, tiny: Any) -> Path:
    """A model in several files with an index."""
    folder = save(tiny)
    (folder / "model.safetensors").unlink()
    tiny.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_shards_are_loaded(sharded: Path, tiny: Any) -> None:
    model = load_model(resolve(str(sharded)), device="cpu")
    assert torch.equal(model.lm_head.weight, tiny.lm_head.weight)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(RequestError, match=rf"shards are missing: {lost.name}; get them again"):
        resolve(str(sharded))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RequestError, match=r"index\.json is damaged"):
        resolve(str(sharded))


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """A GGUF file of one tensor."""
    from gguf import GGUFWriter

    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_found(small_gguf: Path) -> None:
    ref = resolve(str(small_gguf))
    assert (ref.folder, ref.gguf, ref.path) == (small_gguf.parent, small_gguf.name, small_gguf)


@pytest.mark.parametrize("missing", [1, 500, 1023])
def test_a_truncated_gguf_is_refused(small_gguf: Path, missing: int) -> None:
    """Cut inside the tensors' data, where the header is still whole."""
    os.truncate(small_gguf, small_gguf.stat().st_size - missing)
    with pytest.raises(RequestError, match=r"small\.gguf: .*get (it|the file) again"):
        resolve(str(small_gguf))


@pytest.mark.parametrize("size", [0, 3, 20, 60])
def test_a_gguf_without_its_header_is_refused(small_gguf: Path, size: int) -> None:
    os.truncate(small_gguf, size)
    with pytest.raises(RequestError, match=r"small\.gguf: not a readable GGUF file"):
        resolve(str(small_gguf))


def test_a_packaged_gguf_is_found_without_importing_the_package(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "ships_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    small_gguf.rename(package / "m.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    assert resolve("package:ships_a_model/m.gguf").path == package / "m.gguf"
    with pytest.raises(RequestError, match=r"no such file; its \.gguf files: m\.gguf"):
        resolve("package:ships_a_model/other.gguf")


# --- load_model


def test_a_model_is_loaded_exactly_and_in_eval_mode(save: Save, tiny: Any) -> None:
    model = load_model(resolve(str(save(tiny))), device="cpu")
    assert not model.training
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_missing_tensors_are_named(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    edit_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(RequestError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.wei"):
        load_model(resolve(str(folder)), device="cpu")


def test_left_over_tensors_are_named(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(
        RequestError, match=r"unexpected tensor model\.layers\.0\.extra\.weight \(2,\)"
    ):
        load_model(resolve(str(folder)), device="cpu")


def test_a_config_of_fewer_layers_is_refused(save: Save, tiny: Any) -> None:
    """Transformers alone would load the first layers and say nothing."""
    folder = save(tiny)
    edit_json(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(RequestError, match=r"unexpected tensor model\.layers\.2\..*; config and"):
        load_model(resolve(str(folder)), device="cpu")


def test_tensors_of_another_shape_are_refused(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(RequestError, match=str(folder)):
        load_model(resolve(str(folder)), device="cpu")


def test_an_unreadable_config_or_tokenizer_is_one_error(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    ref = resolve(str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RequestError, match="can't be loaded: ") as raised:
        load_tokenizer(ref)
    assert "\n" not in str(raised.value)
    (folder / "config.json").write_text("{")
    with pytest.raises(RequestError, match="can't be loaded: "):
        load_config(ref)


def test_an_unknown_family_lists_the_known_ones(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    edit_json(folder / "config.json", model_type="gpt2")
    ref = resolve(str(folder))
    with pytest.raises(RequestError, match=r"'gpt2' is not supported; supported are .*llama"):
        describe(load_config(ref), ref)


def test_stop_ids_are_one_or_many() -> None:
    model = make_model()
    model.generation_config.eos_token_id = [2, 5]
    assert stop_ids(model) == {2, 5}
    model.generation_config.eos_token_id = None
    assert stop_ids(model) == {2}
    model.config.eos_token_id = None
    assert stop_ids(model) == frozenset()


def test_tied_names_that_differ_are_refused(save: Save) -> None:
    """The config says one tensor, the files hold two: readers would keep one or the other."""
    folder = save(make_model(tie_word_embeddings=True))
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(
        RequestError,
        match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but .* differ; set",
    ):
        load_model(resolve(str(folder)), device="cpu")


def test_tied_names_that_agree_are_read(save: Save) -> None:
    model = make_model(tie_word_embeddings=True)
    folder = save(model)
    edit_tensors(
        folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    again = load_model(resolve(str(folder)), device="cpu")
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(0, 32), r"model\.norm\.weight in model\.safetensors has no entries"),
        (torch.ones(32, dtype=torch.int8), r"is I8, but weights are read as F64, F32, F16, BF16"),
        (torch.full((32,), torch.nan), r"model\.norm\.weight holds values that are no numbers"),
        (torch.full((32,), torch.inf), r"model\.norm\.weight holds values that are no numbers"),
    ],
    ids=["empty", "int8", "nan", "inf"],
)
def test_tensors_that_are_no_weights_are_named(
    tensor: torch.Tensor, message: str, save: Save, tiny: Any
) -> None:
    folder = save(tiny)
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": tensor}))
    with pytest.raises(RequestError, match=message):
        load_model(resolve(str(folder)), device="cpu")


def test_shapes_are_compared_before_anything_is_loaded(
    save: Save, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    folder = save(tiny)
    edit_json(folder / "config.json", intermediate_size=48)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", never)
    with pytest.raises(
        RequestError, match=r"mlp\.\w+\.weight is \(\d+, \d+\), but the config says \(\d+, \d+\)"
    ):
        load_model(resolve(str(folder)), device="cpu")


def test_pickles_are_read_when_asked(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    (folder / "model.safetensors").unlink()
    torch.save(tiny.state_dict(), folder / "pytorch_model.bin")
    model = load_model(resolve(str(folder), allow_pickle=True), device="cpu")
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_pickles_execute_nothing(save: Save, tiny: Any, tmp_path: Path) -> None:
    folder = save(tiny)
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(RequestError, match="can't be loaded: "):
        load_model(resolve(str(folder), allow_pickle=True), device="cpu")
    assert not (tmp_path / "executed").exists()


# --- completeness


def test_a_killed_save_is_never_taken_for_a_checkpoint(
    save: Save, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops, the folder is refused or holds the whole model."""
    from draftsmith.checkpoints import saving

    ref = resolve(str(save(tiny)))
    for step in ("_write_config_for_all_ages", "save_tokenizer", "write_checksums"):
        out = tmp_path / step
        out.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(saving, step, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                save_model(tiny, ref, out)
        with pytest.raises(RequestError, match="an unfinished folder, not a checkpoint"):
            resolve(str(out))
        save_model(tiny, ref, out)
        load_model(resolve(str(out)), device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_changed_after_saving_is_refused(
    name: str, save: Save, tiny: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_model(tiny, resolve(str(save(tiny))), out)
    data = bytearray((out / name).read_bytes())
    place = data.rindex(b"256") if name == "config.json" else len(data) - 3
    data[place] ^= 1
    (out / name).write_bytes(data)
    with pytest.raises(RequestError, match=rf"{name}: differs from its checksum in SHA256SUMS"):
        load_model(resolve(str(out)), device="cpu")
    (out / name).unlink()
    if name == "tokenizer.json":
        with pytest.raises(RequestError, match=rf"{name}: is gone, but SHA256SUMS lists it"):
            load_model(resolve(str(out)), device="cpu")


def test_checksums_are_those_of_coreutils(save: Save, tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_model(tiny, resolve(str(save(tiny))), out)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True)
    assert done.returncode == 0
    assert b"model.safetensors: OK" in done.stdout


# --- A20


def test_A20_contradicting_sampling_settings_are_dropped_with_a_warning(
    save: Save, tiny: Any, tmp_path: Path
) -> None:
    folder = save(tiny)
    edit_json(folder / "generation_config.json", do_sample=False, temperature=0.9, top_p=0.6)
    ref = resolve(str(folder))
    with pytest.warns(UserWarning, match="do_sample is false, so temperature, top_p was dropped"):
        model = load_model(ref, device="cpu")
    out = tmp_path / "out"
    out.mkdir()
    save_model(model, ref, out)
    saved = GenerationConfig.from_pretrained(out)
    saved.validate(strict=True)
    assert (saved.temperature, saved.top_p, saved.eos_token_id) == (None, None, 2)


@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 5},
        {"min_p": 0.1},
        {"typical_p": 0.5},
        {"epsilon_cutoff": 0.1},
        {"eta_cutoff": 0.1},
        {"length_penalty": 0.5},
        {"early_stopping": True},
        {"output_scores": True},
        {"top_p": 0.9, "temperature": 0.0, "top_k": 0},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_A20_no_generation_setting_keeps_a_model_from_being_saved(
    save: Save, tiny: Any, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """Alone, or beside another that was repaired, which makes transformers check them all."""
    for others in ({}, {"temperature": 0.9}):
        folder = save(tiny, name=f"model{len(others)}")
        edit_json(folder / "generation_config.json", do_sample=False, **(others | setting))
        ref = resolve(str(folder))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = load_model(ref, device="cpu")
        out = tmp_path / f"out{len(others)}"
        out.mkdir()
        save_model(model, ref, out)
        assert (out / "model.safetensors").is_file()
        GenerationConfig.from_pretrained(out).validate(strict=True)


def test_A20_consistent_settings_are_kept(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    edit_json(folder / "generation_config.json", do_sample=True, temperature=0.7, top_k=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config = load_model(resolve(str(folder)), device="cpu").generation_config
    assert (config.do_sample, config.temperature, config.top_k) == (True, 0.7, 20)


def test_A20_a_model_without_generation_config() -> None:
    model = make_model()
    assert repair_generation_config(model) == []
    model.generation_config = None
    assert repair_generation_config(model) == []


# --- A33


def test_A33_half_precision_is_never_chosen_for_a_cpu() -> None:
    assert working_dtype("cpu") is torch.float32
    assert compute_dtype("auto", "cpu") in {torch.float32, torch.bfloat16}
    assert compute_dtype("float32", "cpu") is torch.float32


def test_A33_half_precision_weights_are_widened_on_a_cpu(save: Save, tmp_path: Path) -> None:
    folder = save(make_model().half())
    ref = resolve(str(folder))
    model = load_model(ref, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.isfinite(model(torch.tensor([[1, 5, 9]])).logits).all()


def test_A33_the_cpu_is_used_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device() == "cpu"


@pytest.fixture
def without_gpu(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run Python code where no GPU is to be seen and importing deepspeed fails and is noted."""
    site = tmp_path / "site" / "deepspeed"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('imported').touch()\n"
        "raise ImportError('CUDA_HOME does not exist')\n"
    )

    def run(code: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(site.parent), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert not (site / "imported").exists(), "deepspeed was imported"
        return done

    return run


def test_A33_the_command_line_and_recipes_need_no_heavy_import(without_gpu: Any) -> None:
    done = without_gpu(
        "import sys\n"
        "import draftsmith.cli\n"
        "from draftsmith.recipes.loading import load\n"
        "print(load('quickstart').target)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'deepspeed'} & set(sys.modules)))\n"
    )
    target, heavy = done.stdout.splitlines()
    assert target.startswith("package:")
    assert heavy == "[]"


def test_A33_help_works(without_gpu: Any) -> None:
    code = (
        "import sys; sys.argv = ['draftsmith', '--help']; from draftsmith.cli import main; main()"
    )
    assert "distill" in without_gpu(code).stdout


def test_A33_no_module_imports_deepspeed(without_gpu: Any) -> None:
    root = Path(draftsmith.__file__).parent
    parts = ("accept", "checkpoints", "data", "distill", "prune", "recipes")
    files = [root / "cli.py", *(f for part in parts for f in sorted((root / part).rglob("*.py")))]
    # Programs that run in a Python with their runtime.
    files = [f for f in files if "workers" not in f.parts]
    modules = [".".join(("draftsmith", *f.relative_to(root).with_suffix("").parts)) for f in files]
    modules = [m.removesuffix(".__init__") for m in modules]
    assert len(modules) > 20
    done = without_gpu(
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print('deepspeed' in sys.modules)\n"
    )
    assert done.stdout.strip() == "False"
