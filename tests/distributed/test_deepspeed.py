"""Two processes under DeepSpeed's launcher give what one gives, survive kills, and save whole.

`make test-distributed` runs these; CPU and gloo are enough.
"""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.distill.engine import TorchEngine
from draftsmith.errors import DraftsmithError
from tests.conftest import make_model, make_tokenizer
from tests.distributed.training import (
    CLIP,
    LONG_STEPS,
    STAGES,
    STEPS,
    VARIANTS,
    LossModule,
    advance,
    engine_of,
    probe,
    rows_of,
    train,
    train_masks,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.distributed,
    # Starting processes is what takes time, and most of all where other work runs.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("deepspeed", "peft")),
        reason="needs draftsmith[deepspeed]",
    ),
]
ANY_STAGE = pytest.mark.parametrize("zero", STAGES)
ANY_VARIANT = pytest.mark.parametrize(
    ("zero", "tied"), VARIANTS, ids=[f"{z}-{'tied' if t else 'untied'}" for z, t in VARIANTS]
)


def launch(scenario: str, folder: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a scenario in several processes, as users start theirs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank"]
    command += ["--num_gpus", str(processes), "--master_port", str(port)]
    command += ["--module", "tests.distributed.training", scenario, str(folder)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=500, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scenarios that share a launch wrote."""
    folder = tmp_path_factory.mktemp("together")
    tokenizer = folder / "equality" / "tokenizer"
    make_model().save_pretrained(tokenizer)
    make_tokenizer().save_pretrained(tokenizer)
    done = launch("together", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def result(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
    return loaded


def assert_close(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-5), name


def variant(zero: int, tied: bool) -> str:
    return f"{zero}-{'tied' if tied else 'untied'}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """The same training in one process, with plain torch."""
    runs = {}
    for tied in (True, False):
        module = LossModule(make_model(tie_word_embeddings=tied))
        engine = engine_of(module, tmp_path_factory.mktemp("alone"))
        assert isinstance(engine, TorchEngine)
        log = train(engine, STEPS)
        with torch.inference_mode():
            logits = module.model(input_ids=probe()).logits
        after = advance(engine, rows_of(STEPS))
        state = engine.full_state(module.model)
        runs[tied] = {"log": vars(log), "logits": logits, "after": after, "state": state}
    return runs


@ANY_VARIANT
def test_two_processes_give_the_numbers_of_one(
    out: Path, alone: dict[bool, dict[str, Any]], zero: int, tied: bool
) -> None:
    """Losses, gradient norms before clipping, and all weights."""
    two, one = result(out / "equality" / variant(zero, tied)), alone[tied]
    assert min(one["log"]["norms"]) > CLIP, "nothing was clipped"
    assert two["log"]["losses"] == pytest.approx(one["log"]["losses"], abs=1e-5)
    assert two["log"]["norms"] == pytest.approx(one["log"]["norms"], rel=1e-5)
    assert_close(two["state"], one["state"])


@ANY_VARIANT
def test_an_evaluation_in_between_sees_whole_weights_and_changes_nothing(
    out: Path, alone: dict[bool, dict[str, Any]], zero: int, tied: bool
) -> None:
    two, one = result(out / "equality" / variant(zero, tied)), alone[tied]
    assert torch.allclose(two["logits"], one["logits"], atol=1e-3)
    assert two["after"] == pytest.approx(one["after"], rel=1e-5)


@ANY_VARIANT
def test_A21_the_finished_model_is_a_strictly_loadable_folder(
    out: Path, zero: int, tied: bool
) -> None:
    folder = out / "equality" / variant(zero, tied)
    model = load_model(resolve(str(folder / "hf")))
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == tied
    found = result(folder)
    assert found["cut"] == (zero == 3), "stage 3 cuts the weights into parts"
    assert found["shared"] == tied
    saved, state = model.state_dict(), found["state"]
    assert set(saved) == set(state)
    assert all(torch.equal(saved[name], state[name]) for name in state)
    with torch.inference_mode():
        logits = model(input_ids=probe()).logits
    assert torch.equal(logits, torch.load(folder / "hf-logits.pt", weights_only=True))


@ANY_STAGE
def test_A25_one_batch_two_micro_batches_or_two_ranks_are_the_same(
    out: Path, tmp_path: Path, zero: int
) -> None:
    """The mean over four tokens, not over rows: 1 and 3 answer tokens weigh as 1 to 3."""
    rows = rows_of(0, answers=(1, 3))
    batch = LossModule(make_model(tie_word_embeddings=True))
    before = {n: p.detach().clone() for n, p in batch.model.state_dict().items()}
    (sum(batch(row) for row in rows) / 4).backward()
    gradients = {n: p.grad for n, p in batch.model.named_parameters()}
    accumulated = LossModule(make_model(tie_word_embeddings=True))
    engine = engine_of(accumulated, tmp_path, 0, lambda p: torch.optim.SGD(p, lr=1.0))
    advance(engine, rows)
    two_ranks = result(out / "one_step" / str(zero))["state"]
    for name, gradient in gradients.items():
        expected = before[name] - gradient
        assert torch.allclose(accumulated.model.state_dict()[name], expected, atol=1e-5), name
        assert torch.allclose(two_ranks[name], expected, atol=1e-5), name


@ANY_STAGE
def test_one_rank_without_numbers_stops_all_and_nothing_is_updated(out: Path, zero: int) -> None:
    found = result(out / "not_a_number" / str(zero))
    assert found["same"]
    assert len(found["errors"]) == 2
    assert all("step 1: the gradients are no longer numbers" in e for e in found["errors"])


@ANY_STAGE
def test_resumed_training_equals_one_that_was_left_alone(out: Path, zero: int) -> None:
    """Scheduler, optimizer, dropout's random numbers and the loop's own data go on."""
    expected = result(out / "straight")["log"]
    found = result(out / "resume" / str(zero))["log"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


@ANY_STAGE
def test_A22_a_damaged_newest_save_is_passed_over(out: Path, zero: int) -> None:
    """Cut short, emptied, or with other bytes: the one before it is taken."""
    expected = result(out / "straight")["log"]
    found = result(out / "resume" / str(zero))
    assert {"step-0000002", "step-0000004"} <= set(found["kept"])
    assert found["to"] == 2
    assert found["extra"]["losses"] == pytest.approx(expected["losses"][:2], abs=1e-5)
    assert found["fallback"]["losses"] == pytest.approx(expected["losses"], abs=1e-5)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that is killed twice, in a step and in a save, and then left to end."""
    folder = tmp_path_factory.mktemp("killed")
    deaths, saves = {}, {}
    for how in ("killed_in_a_step", "killed_in_a_save"):
        deaths[how] = launch(how, folder).returncode
        saves[how] = sorted(p.name for p in (folder / "state").glob("step-*"))
    done = launch("long_run", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"deaths": deaths, "saves": saves, "folder": folder, "result": result(folder)}


def test_A22_a_save_without_its_mark_is_never_taken(killed: dict[str, Any]) -> None:
    assert all(killed["deaths"].values())
    finished, saves = ["step-0000002", "step-0000002.json"], killed["saves"]
    assert saves["killed_in_a_step"] == finished
    assert saves["killed_in_a_save"] == [*finished, "step-0000004"]
    assert killed["result"]["first"] == 2


def test_A22_killed_ranks_and_a_resume_give_the_uninterrupted_numbers(
    out: Path, killed: dict[str, Any]
) -> None:
    """Bit for bit."""
    straight, resumed = result(out / "straight"), killed["result"]
    assert resumed["log"] == straight["log"]
    assert len(resumed["log"]["losses"]) == LONG_STEPS
    for name, tensor in straight["state"].items():
        assert torch.equal(resumed["state"][name], tensor), name


@ANY_STAGE
def test_another_number_of_processes_is_refused_with_the_way_that_works(
    out: Path, zero: int
) -> None:
    wanted = (
        f"saved by 3 processes at ZeRO stage {zero}, but this run is 2 processes at ZeRO stage "
        f"{zero}; go on with 3 processes at ZeRO stage {zero}, or delete that folder"
    )
    refused = result(out / "resume" / str(zero))["refused"]
    assert len(refused) == 2
    assert all(wanted in error for error in refused)


def test_one_process_refuses_the_saves_of_two(out: Path) -> None:
    engine = engine_of(LossModule(make_model()), out / "straight" / "state")
    with pytest.raises(DraftsmithError, match=r"saved by 2 .* stage 3.* this run is one process"):
        engine.load()


def test_A23_adapters_and_a_fully_saved_head_are_gathered(out: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file

    folder = out / "lora"
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(tensor.numel() for tensor in adapters.values())
    assert any("lora_B" in name for name in adapters)
    assert any("lm_head" in name for name in adapters)
    gathered = result(folder)["state"]
    assert set(gathered) == set(adapters)
    assert all(torch.equal(gathered[name], adapters[name]) for name in adapters)
    loaded = PeftModel.from_pretrained(make_model(), folder / "adapter").eval()
    with torch.inference_mode():
        logits = loaded(input_ids=probe()).logits
    assert torch.equal(logits, torch.load(folder / "logits.pt", weights_only=True))
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(0)
    engine = engine_of(LossModule(get_peft_model(make_model(), settings)), tmp_path)
    log = train(engine, STEPS)
    assert result(folder)["log"]["losses"] == pytest.approx(log.losses, abs=1e-5)


def test_masks_are_the_same_on_every_rank_and_as_in_one_process(out: Path, tmp_path: Path) -> None:
    log, masks_H = train_masks(tmp_path)
    two = result(out / "masks")
    assert two["log"]["losses"] == pytest.approx(log.losses, abs=1e-5)
    assert torch.allclose(two["state"]["masks"], masks_H, atol=1e-5)
