"""Distillation against TRL's GKD trainer and its chunked `DistillationTrainer`.

    .venv/bin/pip install -c constraints.txt trl==1.16.0
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/vs_trl_gkd.py [--quick]

TRL is no dependency of draftsmith, and the first line is for this script alone.

SmolLM2-135M teaches four of its layers the full forward KL on its own texts, float32, on one
thread. All ways get the same rows, without padding, the same AdamW with the same learning rates and
clipping, and neither evaluate, save, log nor compute activations again:
- `traces`: draftsmith with the 64 likeliest tokens of stored traces, no target in memory,
- `live`: draftsmith with the target in memory,
- `gkd`: `trl.experimental.gkd.GKDTrainer` at lmbda 0 (given texts) and beta 0 (forward KL),
- `chunked`: `trl.DistillationTrainer` at beta 0. It knows texts of the student alone; what it would
  have the student write is replaced by the given texts, so writing costs it nothing here.

Prints, as medians of neighbouring runs with the smallest and largest,
- `draftsmith_traces_over_gkd` and the other three pairs: answer tokens per second, ours over
  theirs. The clock is the same for all: whole optimizer steps of the real training loop, from the
  end of one to the end of the next; `_cpu` counts the time on a core alone, for a busy machine,
- the same with `_memory`: the most that training adds to its process, models and optimizer
  included and what was imported not,
- the same with `_process_memory`: all that the process holds then. Ours carries TRL's imports too,
- `trace_tokens_per_second`: writing the traces, once for whatever is distilled from them,
- `losses`: of each way over its first steps on one batch, each with the updates of its own.
  `largest_difference` is that of `live`, `gkd` and `chunked`, which compute the same. A trace has
  all tokens but its 64 as one outcome and probabilities in half precision, so `traces` gives a
  lower bound, and its updates differ a little.

Every run is a process of its own. `--quick` takes fewer and shorter rows, and repeats less: its
memory is mostly that of the models, and tells little.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module, metadata, util
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import LAYERS, TARGET, ratio, report
from datasets import Dataset
from kd_loss import resident
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import describe, load_model, load_tokenizer, quiet_transformers
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.chat import read_prompts
from draftsmith.data.traces import TraceRow, id_dtype, read_shard, shard_name, write_shard
from draftsmith.distill.teacher import Teacher
from draftsmith.distill.trace import Sample, Writer
from draftsmith.distill.train import FINAL_LR, distill
from draftsmith.recipes.schema import DistillSettings, TraceSettings

TRL = "1.16.0"
OURS, THEIRS = ("traces", "live"), ("gkd", "chunked")
# Peak learning rate and largest gradient norm; weight decay is 0, since TRL decays no norms.
LR, CLIP = 1e-4, 1.0
# The first step makes the optimizer's state and is not timed.
WARMUP = 1


@dataclass(frozen=True)
class Size:
    """What is trained on.

    Attributes:
        batch: rows of a step.
        prompt: tokens of a prompt.
        answer: tokens of an answer.
        steps: that are timed in a run.
        repeats: runs of each way.
        compared: steps over which losses are compared.
        written: texts that the target writes at once.
    """

    batch: int
    prompt: int
    answer: int
    steps: int
    repeats: int
    compared: int
    written: int

    @property
    def tokens(self) -> int:
        """Answer tokens of a step."""
        return self.batch * self.answer


FULL = Size(
    batch=4, prompt=40, answer=200, steps=2, repeats=5, compared=3, written=TraceSettings().batch
)
QUICK = Size(batch=2, prompt=40, answer=40, steps=1, repeats=3, compared=1, written=8)


@dataclass(frozen=True)
class Run:
    """What was seen of a training run.

    Attributes:
        step: seconds of an optimizer step.
        cpu: of which this process had a core; less, where others want it too.
        added: bytes that it added to its process at most.
        whole: the most that the process held.
        losses: by step, if they were asked for.
    """

    step: float
    cpu: float
    added: float
    whole: float
    losses: list[float]


@dataclass(frozen=True)
class Task:
    """What a way is to do.

    Attributes:
        size: of its batches.
        folder: of models and traces.
        steps: of the run.
        rows: of the traces; the batches of so many steps, or one batch again and again.
        logs: whether losses are wanted.
    """

    size: Size
    folder: Path
    steps: int
    rows: int
    logs: bool = False

    def texts(self) -> list[TraceRow]:
        """The rows."""
        return read_shard(self.folder / shard_name(0))[: self.rows]

    def model(self, name: str) -> Any:
        """The target or the student."""
        return AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32)


def prepare(folder: Path, size: Size, rows: int) -> float:
    """Cut the student, write the traces; returns the trace tokens written per second."""
    torch.manual_seed(0)
    reference = resolve(TARGET)
    target, tokenizer = load_model(reference, device="cpu"), load_tokenizer(reference)
    family, shape = describe(target.config, reference)
    student = compact_model(target, family, Selection.of_layers(shape, LAYERS))
    target.save_pretrained(folder / "target")
    student.save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "target")
    settings = TraceSettings()
    prompts = [list(p.ids[: size.prompt]) for p in read_prompts("quick", tokenizer)]
    samples = [Sample(prompts[i % len(prompts)], sampled=True) for i in range(size.written)]
    writer, start = Writer(target, tokenizer), time.perf_counter()
    # No id ends a row: rows of one length need no padding, whichever way lays them out.
    writer.write(
        samples,
        size.answer,
        temperature=settings.temperature,
        generator=torch.Generator().manual_seed(0),
        end=frozenset(),
        top_n=settings.top_n,
    )
    seconds = time.perf_counter() - start
    written = [sample.row(id_dtype(shape.vocab)) for sample in samples]
    write_shard(folder, 0, written[:rows])
    return sum(len(row.answer) for row in written) / seconds


def draftsmith(task: Task, live: bool) -> list[float]:
    """`draftsmith distill`."""
    student = task.model("student")
    family, _ = describe(student.config, resolve(TARGET))
    settings = DistillSettings(
        teacher="live" if live else "traces",
        steps=task.steps,
        batch=task.size.batch,
        max_length=task.size.prompt + task.size.answer,
        lr=LR,
        warmup=0,
        weight_decay=0.0,
        clip=CLIP,
        evaluate_every=1 if task.logs else task.steps,
        save_every=task.steps,
    )
    teacher = Teacher(task.model("target")) if live else None
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        curve = distill(
            student, family, task.texts(), [], settings, seed=0, state=state, teacher=teacher
        )
    assert curve[-1]["tokens"] == task.steps * task.size.tokens
    return [row["loss"] for row in curve]


def gkd(task: Task) -> list[float]:
    """TRL's GKD on given texts."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = task.texts()
    data = {
        "prompt": ["" for _ in rows],
        "input_ids": [row.tokens.tolist() for row in rows],
        "completion_mask": [[0] * row.prompt_length + [1] * len(row.answer) for row in rows],
    }
    off_policy = {"lmbda": 0.0, "seq_kd": False}
    return _train(task, GKDTrainer, GKDConfig, data, off_policy)


def chunked(task: Task) -> list[float]:
    """TRL's chunked trainer, with given texts in place of the student's."""
    from trl import DistillationConfig, DistillationTrainer

    rows = task.texts()

    class GivenTexts(DistillationTrainer):
        """Prompts are numbers of rows."""

        def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
            chosen = [rows[int(number)] for number in prompts]
            begun = [row.tokens[: row.prompt_length].tolist() for row in chosen]
            return begun, [row.answer.tolist() for row in chosen], None, None, []

    data = {"prompt": [str(number) for number in range(len(rows))]}
    return _train(task, GivenTexts, DistillationConfig, data, {})


def _train(
    task: Task, trainer: Any, config: Any, data: dict[str, Any], options: dict[str, Any]
) -> list[float]:
    """Train as `distill` does; returns the losses that were logged."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder,
            # Of the generalised Jensen–Shannon divergence: the forward KL.
            beta=0.0,
            temperature=1.0,
            max_steps=task.steps,
            per_device_train_batch_size=task.size.batch,
            learning_rate=LR,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": FINAL_LR},
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=CLIP,
            # On by default: less memory and more time.
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_strategy="steps" if task.logs else "no",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        learning = trainer(
            model=task.model("student"),
            teacher_model=task.model("target"),
            args=arguments,
            train_dataset=Dataset.from_dict(data),
            processing_class=AutoTokenizer.from_pretrained(task.folder / "target"),
        )
        learning.remove_callback(PrinterCallback)
        learning.train()
    return [entry["loss"] for entry in learning.state.log_history if "loss" in entry]


WAYS: dict[str, Callable[[Task], list[float]]] = {
    "traces": lambda task: draftsmith(task, live=False),
    "live": lambda task: draftsmith(task, live=True),
    "gkd": gkd,
    "chunked": chunked,
}


def observed(way: str, task: Task) -> Run:
    """Train in this process, from loading the models to the last step.

    One clock for all: it ticks where any optimizer ends a step.
    """
    torch.set_num_threads(1)
    before, ends, cpu = resident("VmRSS"), [], []

    def tick(*_: Any) -> None:
        ends.append(time.perf_counter())
        cpu.append(time.process_time())

    register_optimizer_step_post_hook(tick)
    losses = WAYS[way](task)
    assert len(ends) == task.steps
    peak = resident("VmHWM")
    step, busy = ((clock[-1] - clock[WARMUP - 1]) / task.size.steps for clock in (ends, cpu))
    return Run(step, busy, peak - before, peak, losses)


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Work in a process of its own, so that no earlier run has left anything.

    A fork saves the imports; it is sound while this process has computed nothing itself.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def compare(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Ours over theirs."""
    seconds, cpu, added, whole = (
        {way: [getattr(run, name) for run in seen] for way, seen in runs.items()}
        for name in ("step", "cpu", "added", "whole")
    )
    figures = {}
    for ours in OURS:
        for theirs in THEIRS:
            name = f"draftsmith_{ours}_over_{theirs}"
            # Of the same number of tokens.
            figures[name] = ratio(seconds, theirs, ours)
            figures[f"{name}_cpu"] = ratio(cpu, theirs, ours)
            figures[f"{name}_memory"] = ratio(added, ours, theirs)
            figures[f"{name}_process_memory"] = ratio(whole, ours, theirs)
    return {
        **figures,
        "seconds_per_step": _medians(seconds),
        "cpu_seconds_per_step": _medians(cpu),
        "added_gb": {way: value / 1e9 for way, value in _medians(added).items()},
        "process_gb": {way: value / 1e9 for way, value in _medians(whole).items()},
    }


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {way: statistics.median(seen) for way, seen in values.items()}


def agreement(runs: dict[str, Run]) -> dict[str, Any]:
    """Losses of the ways on one batch."""
    losses = {way: run.losses for way, run in runs.items()}
    full = [losses[way] for way in ("live", *THEIRS)]
    differences = [max(step) - min(step) for step in zip(*full, strict=True)]
    return {"losses": losses, "largest_difference": max(differences)}


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """All figures."""
    steps = WARMUP + size.steps
    written = apart(prepare, folder, size, steps * size.batch)
    one_batch = Task(size, folder, size.compared, size.batch, logs=True)
    agreeing = agreement({way: apart(observed, way, one_batch) for way in WAYS})
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for _ in range(size.repeats):
        for way, seen in runs.items():
            run = apart(observed, way, Task(size, folder, steps, steps * size.batch))
            print(f"{way:>8}  {run.step:.2f} s/step ({run.cpu:.2f} CPU), {run.added / 1e9:.2f} GB")
            seen.append(run)
    figures = compare(runs)
    rates = {way: size.tokens / took for way, took in figures["seconds_per_step"].items()}
    return {
        **figures,
        "tokens_per_second": rates,
        "trace_tokens_per_second": written,
        **agreeing,
    }


def imported() -> None:
    """Import what training needs before forking; TRL reports no use and is quiet."""
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    for name in (
        "torch.utils.tensorboard",
        "trl.experimental.gkd",
        "trl.trainer.distillation_trainer",
    ):
        import_module(name)
    quiet_transformers()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    size = QUICK if parser.parse_args(arguments).quick else FULL
    if util.find_spec("trl") is None:
        raise SystemExit(f"TRL is missing: pip install trl=={TRL}")
    imported()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(size, Path(folder))
    report({**figures, "trl": metadata.version("trl"), **asdict(size)})


if __name__ == "__main__":
    main()
