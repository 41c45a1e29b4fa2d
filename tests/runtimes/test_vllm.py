"""vLLM takes the configuration, reads the HF folder back, and drafts with it."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import hf, processes, vllm
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import job_of, make_model

pytestmark = pytest.mark.runtime("vllm")
# Narrower heads than vLLM takes on a CPU would leave nothing to read back.
WIDE = {"head_dim": 32}
# What `vllm serve` makes of its arguments; no weights are loaded.
PARSE = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
args = parser.parse_args(sys.argv[1:])
args.model = args.model_tag
found = AsyncEngineArgs.from_cli_args(args).create_engine_config()
drafts = found.speculative_config
print(drafts.method, drafts.num_speculative_tokens, drafts.model, found.model_config.max_model_len)
"""


def test_an_odd_shape_is_read_back_and_its_configuration_taken(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    """Heads cut from 4 to 3, hidden width and layers cut, tied."""
    cut = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}
    model = make_model(seed=1, num_hidden_layers=2, tie_word_embeddings=True, **WIDE | cut)
    target = save(make_model(**WIDE))
    job, settings = job_of(model, target), ExportSettings(lookahead=3, max_length=128)
    hf.export(job, tmp_path, settings)
    report = vllm.export(job, tmp_path, settings)
    assert report.parity is not None
    assert report.parity.reader.startswith("vLLM ")
    assert report.parity.max_difference is not None
    assert report.parity.greedy_compared
    assert report.parity.strings_compared
    words = report.launch.replace("TARGET", str(target)).split()
    python = processes.interpreter_of("vllm")
    parsed = subprocess.run(
        [python, "-c", PARSE, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert parsed.stdout.splitlines()[-1:] == ["draft_model 3 hf 128"], parsed.stderr


def test_drafts_leave_the_text_as_it_is_past_the_drafters_context(
    save: Callable[..., Path],
) -> None:
    """Cases A1 and A11: a head of 104 rows and one of 96, 256 positions and 32."""
    target = make_model(seed=3, vocab_size=104, **WIDE)
    near = make_model(seed=3, max_position_embeddings=32, **WIDE)
    like = target.state_dict()
    with torch.no_grad():
        torch.manual_seed(0)
        for name, weight in near.named_parameters():
            weight.copy_(like[name][: len(weight)] + torch.randn_like(weight) * 0.01)
    prompts = [[5, 6, 7, 8], [9, 10]]
    found = processes.ask(
        "vllm",
        "speculate",
        prompts=prompts,
        lookaheads=[3],
        target=str(save(target, name="target")),
        drafter=str(save(near, name="near")),
        max_new_tokens=48,
        stop_ids=[],
        threads=1,
    )
    assert found["runtime"].startswith("vLLM ")
    texts: dict[str, list[dict[str, Any]]] = found["texts"]
    for prompt, alone, drafted in zip(prompts, texts["0"], texts["3"], strict=True):
        assert drafted["tokens"] == alone["tokens"]
        assert len(alone["tokens"]) == alone["passes"] == 48
        assert drafted["accepted"] + drafted["passes"] == 48
        # Past its context there are no drafts; what vLLM verifies there are zeros, which it counts.
        assert 0 < drafted["accepted"] <= 32 - len(prompt)
        assert drafted["accepted"] <= drafted["drafted"] <= 3 * drafted["passes"]
