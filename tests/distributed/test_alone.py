"""What holds in one process, with or without DeepSpeed installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.distill.deepspeed_engine import make_engine
from draftsmith.distill.engine import Ranks, TorchEngine
from draftsmith.errors import DraftsmithError, RequestError
from tests.distributed.training import fresh, train


def tiny_engine(folder: Path) -> TorchEngine:
    module = nn.Linear(2, 1)
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), folder)
    assert isinstance(engine, TorchEngine)
    return engine


def test_A33_one_process_does_not_import_deepspeed() -> None:
    code = (
        "import sys; import draftsmith.cli, draftsmith.distill.deepspeed_engine as d; "
        "d.start_processes(); from pathlib import Path; from torch import nn, optim; "
        "m = nn.Linear(2, 1); d.make_engine(m, optim.SGD(m.parameters(), lr=1.0), Path('none')); "
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_A33_many_processes_without_deepspeed_are_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(RequestError, match=r"2 processes needs DeepSpeed.*draftsmith\[deepspeed\]"):
        tiny_engine(tmp_path)


def test_saves_of_deepspeed_are_refused(tmp_path: Path) -> None:
    mark = {"zero": 2, "world": 4, "sha256": {}}
    (tmp_path / "step-0000003.json").write_text(json.dumps(mark))
    with pytest.raises(DraftsmithError, match="go on with 4 processes at ZeRO stage 2, or delete"):
        tiny_engine(tmp_path).load()


@pytest.mark.parametrize("mark", ["", "[1]", "{}", '{"sha256": 5}'])
def test_A22_a_mark_that_says_nothing_is_passed_over(tmp_path: Path, mark: str) -> None:
    (tmp_path / "step-0000003.json").write_text(mark)
    (tmp_path / "step-0000003.pt").write_bytes(b"x")
    assert tiny_engine(tmp_path).load() == {}


def test_micro_batches_that_can_not_be_shared_evenly_are_refused() -> None:
    ranks = Ranks()
    assert ranks.share([1, 2, 3]) == [1, 2, 3]
    ranks.world, ranks.rank = 2, 1
    assert ranks.share([1, 2, 3, 4]) == [2, 4]
    with pytest.raises(RequestError, match=r"3 micro-batches .* accumulate a multiple of 2"):
        ranks.share([1, 2, 3])


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    straight = train(fresh(tmp_path / "straight", 0), 4)
    train(fresh(tmp_path / "stopped", 0), 2, save_every=2)
    assert train(fresh(tmp_path / "stopped", 0), 4) == straight


def test_full_state_is_a_copy_in_which_tied_names_share(tmp_path: Path) -> None:
    engine = fresh(tmp_path, 0)
    state = engine.full_state(engine.module.model)  # type: ignore[attr-defined]
    embedding, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    assert embedding is head
    train(engine, 1)
    assert not torch.equal(embedding, engine.full_state()["model.lm_head.weight"])


def test_A23_a_tensor_without_elements_is_refused(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    engine.module.weight.data = torch.zeros(0)
    with pytest.raises(DraftsmithError, match=r"^weight: 0 elements after gathering"):
        engine.full_state()
