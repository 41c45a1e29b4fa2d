"""Encoder–decoders in two processes: the numbers of one, killed and gone on with."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import make_model
from tests.distributed.seq2seq import CASES, STEPS, distilled, masked

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not importlib.util.find_spec("deepspeed"), reason="needs draftsmith[deepspeed]"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes came to, all cases in one launch."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank", "--num_gpus", "2"]
    words += ["--master_port", port, "--module", "tests.distributed.seq2seq", str(folder)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, timeout=500, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return result


@pytest.mark.parametrize(("family", "train", "zero"), CASES)
def test_two_processes_distil_an_encoder_decoder_as_one(
    found: dict[str, Any], tmp_path: Path, family: str, train: str, zero: int
) -> None:
    """Curve and weights, after a run that broke off in its third step."""
    one, two = distilled(family, train, zero, tmp_path), found[f"{family}-{train}-{zero}"]
    assert [point["step"] for point in two["curve"]] == [2, STEPS]
    for ours, theirs in zip(two["curve"], one["curve"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    before = make_model(family, dropout=0.0, dropout_rate=0.0).state_dict()
    for name, tensor in one["weights"].items():
        # Adam makes much of a gradient that is rounding error.
        assert torch.allclose(two["weights"][name], tensor, atol=1e-3), name
        of_encoder = "encoder" in name and "encoder_attn" not in name
        if of_encoder and "embed" not in name and name in before:
            assert torch.equal(tensor, before[name]) == (train == "decoder"), name


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_two_processes_learn_the_masks_of_an_encoder_decoder(
    found: dict[str, Any], tmp_path: Path, family: str
) -> None:
    one, two = masked(family, tmp_path), found[f"{family}-masks"]
    assert two["selection"] == one["selection"]
    for name, values in one["trajectory"].items():
        assert torch.allclose(values.float(), two["trajectory"][name].float(), atol=1e-4), name
