"""`draftsmith plan`: will the stages fit, is there text enough, and how long does it take?

Everything but the time comes from configs, tokenizer and recipe alone: no weights are read.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.devices import default_device
from draftsmith.checkpoints.formats import ModelRef, local_path, resolve
from draftsmith.checkpoints.growing import with_another_row
from draftsmith.checkpoints.layout import layout_of, meta_model, with_counts
from draftsmith.checkpoints.loading import describe, load_config
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.chat import read_prompts
from draftsmith.data.corpus import read_texts
from draftsmith.data.sound import Sound, feature_extractor
from draftsmith.data.traces import TraceRow, TraceStore, id_dtype
from draftsmith.distill.estimate import (
    Counts,
    Teacher,
    Work,
    counts_of,
    encoder_parameters,
    peak,
    teacher_of,
)
from draftsmith.distill.hearing import MOST_BYTES
from draftsmith.distill.trace import Prompts, Reads
from draftsmith.errors import RequestError
from draftsmith.recipes.fits import (
    RESERVE,
    Device,
    Fit,
    Text,
    gb,
    plain_fit,
    that_fit,
    way_name,
)
from draftsmith.recipes.prune_plan import PrunePlan, plan_prune
from draftsmith.recipes.run import Run, check, stage_keys, written_ids
from draftsmith.recipes.schema import DistillSettings, PruneSettings

SCHEMA = 1
# Beyond so many epochs repeated text teaches hardly more (Muennighoff et al. 2023: up to four are
# nearly as good as new text, at sixteen most of the gain is gone).
MOST_EPOCHS = 8
# Seconds that the measurement of time may take, and steps that it makes at most.
SECONDS, STEPS = 16.0, 8
# What a smaller run could be, if the recipe's own does not fit.
LORA_RANK = 16


# What a hub model has beside its weights.
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


class PlannedRun(Run):
    """A run whose models may lack their weights: config and tokenizer are enough to plan."""

    def find(self, spec: str) -> ModelRef:
        """A model's config and tokenizer."""
        key = "target" if spec == self.recipe.target else "source"
        return find_config(spec, self.allow_pickle, f"-s {key}=FOLDER")

    def prune_files(self) -> dict[str, Path]:
        """None: what is missing is told, not refused."""
        return {}


@dataclass(frozen=True)
class Time:
    """Seconds of the distill stage, from measured steps.

    Attributes:
        steps: how many were measured.
        rows: of the micro-batches that were measured.
        step_low: seconds of the quickest step of the recipe's size.
        step_median: of the median.
        step_high: of the slowest.
        total_low: seconds of all of the recipe's steps, if each were so quick.
        total_median: if each were the median.
        total_high: if each were so slow.
    """

    steps: int
    rows: int
    step_low: float
    step_median: float
    step_high: float
    total_low: float
    total_median: float
    total_high: float


@dataclass(frozen=True)
class Plan:
    """All that `draftsmith plan` says.

    Attributes:
        recipe: the target, as the recipe names it.
        counts: of the drafter.
        target_parameters: of the target.
        shared: parameters of an encoder that serves both; 0: the drafter has its own, or none.
        dtype: of matrix products.
        device: what there is.
        text: what is learned from.
        fits: ways to run the distill stage.
        prune: the same of the prune stage; none where nothing is learned there.
        changes: what would fit, where the recipe's own way does not.
        time: none with `--check`, or where it was not measured.
        warnings: in words.
    """

    recipe: str
    counts: Counts
    target_parameters: int
    shared: int
    settings: DistillSettings
    dtype: str
    device: Device
    text: Text
    fits: tuple[Fit, ...]
    prune: PrunePlan | None = None
    changes: tuple[Fit, ...] = ()
    time: Time | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> Fit:
        """The recipe's own way."""
        return next(fit for fit in self.fits if fit.chosen)

    @property
    def together(self) -> int:
        """Parameters of target and drafter in memory, a shared encoder once."""
        return self.target_parameters + self.counts.parameters - self.shared

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """Those of pruning first."""
        return (*(self.prune.warnings if self.prune else ()), *self.warnings)

    def to_plain(self) -> dict[str, Any]:
        """For JSON: bytes, seconds and counts."""
        counts, text = self.counts, self.text
        return {
            "schema": SCHEMA,
            "target": self.recipe,
            "dtype": self.dtype,
            "drafter": {
                "shape": asdict(counts.shape),
                "parameters": counts.parameters,
                "learning": counts.learning,
                "adapters": counts.adapters,
                "tied_head": counts.tied,
                "shared_encoder": self.shared,
                "with_target": self.together,
            },
            "device": asdict(self.device),
            "batch": {
                "rows": self.settings.batch,
                "tokens_of_a_row": text.longest,
                "tokens_of_a_source": text.longest_source,
            },
            "text": {
                **asdict(text),
                "asked_tokens": text.asked_tokens,
                "epochs": text.epochs,
            },
            "prune": None if self.prune is None else self.prune.to_plain(),
            "memory": [plain_fit(fit) for fit in self.fits],
            "changes": [plain_fit(fit) for fit in self.changes],
            "time": None if self.time is None else asdict(self.time),
            "warnings": list(self.all_warnings),
        }


def plan(run: Run, processes: int | None = None, measure: bool = True) -> Plan:
    """Say what the prune and distill stages need.

    Args:
        run: of the recipe, a `PlannedRun` if weights may be missing.
        processes: that would share it, each with a device; none: one for each GPU that is here, if
            they can share a step.
        measure: make a few steps to learn the time.

    Raises:
        RequestError: as `check`; or the micro-batches of a step can't be shared by the processes,
            or no projection can have an adapter.
    """
    settings = run.recipe.distill
    processes = _gpus(settings) if processes is None else processes
    if settings.accumulate % processes:
        raise RequestError(
            f"recipe.distill.accumulate: {settings.accumulate} micro-batches a step can't be "
            f"shared by {processes} processes; make it a multiple of {processes}"
        )
    shape, device = check(run), device_now()
    config, family = drafter_config(run, shape)
    rows = trace_rows(run)
    text = text_of(run, rows, shape.vocab, settings)
    pruning_text = text_of(run, rows, shape.vocab, run.recipe.prune)
    case = _Case(run, config, family, text, device)
    ways = [(0, 1)] if processes == 1 else [(0, 1), *((z, processes) for z in (1, 2, 3))]
    own = (0, 1) if processes == 1 else (settings.zero, processes)
    fits = tuple(case.fit(settings, *way, chosen=way == own) for way in ways)
    planned = Plan(
        run.recipe.target,
        counts_of(config, family, settings),
        _target_parameters(run),
        _shared_encoder(run, config, family),
        settings,
        str(run.dtype).removeprefix("torch."),
        device,
        text,
        fits,
        plan_prune(run, kept_shape(run, shape), device, processes, pruning_text),
    )
    if not planned.chosen.fits or planned.chosen.tight:
        planned = replace(planned, changes=that_fit(case.changes(*own)))
    taken = None
    if measure and planned.chosen.fits and _is_measured(settings):
        reads = Reads.of(run.target)
        listener = None if reads is None else reads.listener
        top_n = run.recipe.trace.top_n
        some = rows or synthetic_rows(settings, text, shape.vocab, top_n, listener)
        taken = measure_time(run, config, family, some, processes)
    warnings = (*_not_here(run, processes), *_warnings(planned, measure))
    return replace(planned, time=taken, warnings=warnings)


def find_config(
    spec: str, allow_pickle: bool = False, folder_option: str = "-s target=FOLDER"
) -> ModelRef:
    """Find a model as `resolve` does, but be content with its config and tokenizer.

    Args:
        spec: as for `resolve`.
        allow_pickle: as for `resolve`.
        folder_option: how a local folder is given instead, for errors.

    Raises:
        RequestError: they are not there; or there are weights, and these are damaged.
    """
    if spec.startswith("package:") or spec.endswith(".gguf"):
        return resolve(spec, allow_pickle)
    folder = local_path(spec)
    if not folder.exists() and spec.count("/") == 1:
        folder = _hub_config(spec, folder, folder_option)
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    if weights or not (folder / "config.json").is_file():
        return replace(resolve(str(folder), allow_pickle), spec=spec)
    return ModelRef(spec, folder)


def _hub_config(spec: str, missing: Path, folder_option: str) -> Path:
    """The folder of a hub model's small files, from the cache if it has them."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(spec, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
        return Path(snapshot_download(spec, allow_patterns=_SMALL_FILES))
    except HFValidationError:
        # No name of the hub: `resolve` says what a model may be.
        return missing
    except Exception as error:  # network, authentication and absence each have their own class
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise RequestError(
            f"{spec}: no such folder, and the hub did not give its config ({reason}); check the "
            f"name, the network and `hf auth login`, or give a local folder: {folder_option}"
        ) from None


def device_now() -> Device:
    """The device that training would use, and the memory that is there now."""
    import psutil  # type: ignore[import-untyped]
    import torch

    host, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    kind = default_device()
    if kind == "cuda":
        free, whole = torch.cuda.mem_get_info()
        return Device(kind, torch.cuda.get_device_name(), whole, free, host.available, own)
    return Device(kind, "CPU", host.total, host.available, host.available, own)


def drafter_config(run: Run, shape: Shape) -> tuple[Any, Any]:
    """The config that the drafter will have, and the family's table."""
    config = load_config(run.source)
    family, _ = describe(config, run.source)
    kept = kept_shape(run, shape)
    counts: dict[str, int | None] = {
        str(axis): getattr(kept, axis) for axis in family.axes if axis != "vocab"
    }
    config = with_counts(config, family, counts)
    if (depth := family.config.encoder_layers) is not None:
        setattr(config, depth, shape.encoder_layers)
    if run.recipe.distill.block is not None and written_ids(run) >= {*range(shape.vocab)}:
        # No row is free for the mask.
        config = with_another_row(config, family)
    return config, family


def kept_shape(run: Run, shape: Shape) -> Shape:
    """What is left of the source when it is cut, before layers of its encoder are repeated."""
    return replace(shape, encoder_layers=shape.encoder_layers // run.recipe.prune.encoder_repeat)


def _target_parameters(run: Run) -> int:
    config = load_config(run.target)
    family, _ = describe(config, run.target)
    return layout_of(config, family).parameters()


def _shared_encoder(run: Run, config: Any, family: Any) -> int:
    """Parameters of the target's encoder, if the drafter keeps it as it is; else 0."""
    own = encoder_parameters(config, family)
    same = own == encoder_parameters(load_config(run.target), family)
    return own if run.recipe.distill.train == "decoder" and same else 0


def _is_measured(settings: DistillSettings) -> bool:
    """Whether a step can be made without the target, row by row."""
    return settings.teacher == "traces" and settings.block is None


def trace_rows(run: Run) -> list[TraceRow]:
    """Rows to train on, if the run has traces made with these settings; else none."""
    folder = run.folder("traces")
    if (made := provenance.read_key(folder)) is None or made != stage_keys(run)["traces"]:
        return []
    return TraceStore(folder).rows("train")


def text_of(
    run: Run, rows: Sequence[TraceRow], vocab: int, settings: DistillSettings | PruneSettings
) -> Text:
    """What there is to learn from, from the traces or, before there are any, from the recipe.

    Before, every answer is taken to be `max_new_tokens` long: rows are fewer than they may turn
    out, and epochs more.

    Args:
        run: of the recipe.
        rows: of its traces.
        vocab: ids of the drafter.
        settings: of the stage that reads them.
    """
    trace = run.recipe.trace
    asked = settings.steps * settings.accumulate * settings.batch
    if rows:
        lengths = [min(len(row.tokens), settings.max_length) for row in rows]
        used = [n - row.prompt_length for n, row in zip(lengths, rows, strict=True)]
        answers = sum(max(0, n) for n in used)
        folder = run.folder("traces")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        useful = sum(n > 0 for n in used)
        frames = frames_heard(run)
        longest_read = max(0 if row.source is None else len(row.source) for row in rows)
        return Text(
            True,
            useful,
            max(lengths),
            answers / max(1, useful),
            answers,
            asked,
            _TWICE * size,
            frames or longest_read,
        )
    reads = Reads.of(run.target)
    # With the chat template around it, and real prompts as long as they are.
    prompts = Prompts(run.recipe.data, trace.batch, run.tokenizer, run.recipe.seed, reads)
    prompt = prompts.longest if reads is None else len(reads.start)
    source = 0 if reads is None else longest_source(run, reads, settings.max_length)
    longest = min(settings.max_length, prompt + trace.max_new_tokens)
    # Few self-written prompts come near their bound.
    usual = prompt - _SPARE * run.recipe.data.prompt_tokens * (run.recipe.data.source == "self")
    mean = max(1, min(trace.max_new_tokens, settings.max_length - usual))
    kept = round(trace.tokens * (1 - trace.validation_share))
    count = max(1, kept // trace.max_new_tokens)
    each = trace.top_n * (np.dtype(id_dtype(vocab)).itemsize + 2) + 8
    read = 4 * (prompt + source)
    if reads is not None and reads.listener is not None:
        read = 2 * feature_extractor(reads.listener).n_samples
    size = trace.tokens * each + read * (trace.tokens // trace.max_new_tokens)
    return Text(False, count, longest, float(mean), count * mean, asked, _TWICE * size, source)


def frames_heard(run: Run) -> int | None:
    """Positions of the target's encoder for any sound; None: it reads text, or there is none."""
    config = load_config(run.target)
    family, _ = describe(config, run.target)
    return int(getattr(config, family.config.frames)) if family.config.mel_bins else None


def longest_source(run: Run, reads: Reads, otherwise: int) -> int:
    """Tokens of the longest source that the encoder reads, or its frames where it hears.

    Of the data, where these are here and small; else as many as the encoder holds, or `otherwise`
    where it holds any number.
    """
    if (frames := frames_heard(run)) is not None:
        return frames
    most = reads.most or otherwise
    data = run.recipe.data
    try:
        files = run.data_files()
    except RequestError:
        return most
    if sum(path.stat().st_size for path in files.values()) > _CHEAP:
        return most
    if data.source == "prompts":
        found = [p for path in data.path for p in read_prompts(path, run.tokenizer, start=())]
        lengths = [len(prompt.source or ()) for prompt in found]
    else:
        texts = read_texts(list(files.values()), Counter(), data.text_key)
        lengths = [len(run.tokenizer(text)["input_ids"]) for text in texts]
    return max((n for n in lengths if reads.most is None or n <= reads.most), default=most)


# The bound of a self-written prompt allows each of its tokens to become so many more.
_SPARE = 3
# Bytes of files of sources up to which they are read.
_CHEAP = 8 * 2**20
# Training and validation rows are views of shards that each split reads for itself.
_TWICE = 2


@dataclass(frozen=True)
class _Case:
    """A drafter and its text, under any settings."""

    run: Run
    config: Any
    family: Any
    text: Text
    device: Device

    def fit(
        self,
        settings: DistillSettings,
        zero: int,
        processes: int,
        *,
        chosen: bool = False,
        name: str | None = None,
    ) -> Fit:
        """Estimate one way."""
        work = self.work(settings, processes)
        memory = peak(counts_of(self.config, self.family, settings), work, zero, processes)
        return Fit(
            name or way_name(zero, processes),
            zero,
            processes,
            chosen,
            memory,
            self.text.memory + self._kept(settings),
            self.device.share(processes),
            self.device.kind == "cpu",
        )

    def _kept(self, settings: DistillSettings) -> int:
        """Bytes of the states of sounds that an encoder which doesn't learn keeps."""
        if settings.train != "decoder" or frames_heard(self.run) is None:
            return 0
        hidden = getattr(self.config, self.family.config.hidden)
        return min(MOST_BYTES, 4 * hidden * self.text.longest_source * self.text.rows)

    def work(self, settings: DistillSettings, processes: int) -> Work:
        """What a process does: every row of a batch as long as the longest."""
        # All but one token of each row may be answers.
        length, answers = self.text.longest, self.text.longest - 1
        if settings.on_policy:
            # Where every round is wrong at once, as before training, what it would have gone on
            # to propose stands in the row too, for each answer.
            length += answers * (settings.lookahead - 1)
            answers *= settings.lookahead
        rows, prefixes = settings.batch, 1
        if (block := settings.block) is not None:
            # Each row is a beginning of the text, however long, and the masks after it.
            prefixes, answers = block.prefixes, block.size
            rows, length = rows * prefixes, length + block.size
        work = Work(
            rows=rows,
            length=length,
            answers=rows * answers,
            micro_batches=settings.accumulate // processes,
            top_n=self.run.recipe.trace.top_n,
            width=self.run.dtype.itemsize,
            checkpoint=settings.checkpoint_activations,
            columns=settings.vocab_limit,
            device=self.device.kind,
            source_length=self.text.longest_source,
            rows_of_source=prefixes,
        )
        return replace(work, teacher=self._teacher(settings, work, processes))

    def changes(self, zero: int, processes: int) -> Iterator[Fit]:
        """Smaller ways, each by one change, and the last by all settings of these together."""
        settings = self.run.recipe.distill
        small = settings
        for name, change in self._candidates(settings):
            small = replace(small, **change)
            yield self.fit(replace(settings, **change), zero, processes, name=name)
        if processes > 1 and zero != 3:
            yield self.fit(settings, 3, processes, name="distill.zero: 3")
        yield self.fit(small, zero, processes, name="all of these settings together")

    def _candidates(self, settings: DistillSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if not settings.checkpoint_activations:
            yield "distill.checkpoint_activations: true", {"checkpoint_activations": True}
        batch = settings.batch
        if batch > 1:
            times = batch * settings.accumulate
            name = f"distill.batch: 1, accumulate: {times} (the same step)"
            yield name, {"batch": 1, "accumulate": times}
        if not settings.lora_rank and settings.block is None:
            yield f"distill.lora_rank: {LORA_RANK}", {"lora_rank": LORA_RANK}

    def _teacher(self, settings: DistillSettings, work: Work, processes: int) -> Teacher:
        if settings.teacher == "traces":
            return Teacher()
        config = load_config(self.run.target)
        family, shape = describe(config, self.run.target)
        drafter = counts_of(self.config, self.family, settings).shape
        reads = (drafter.layers - 1) * shape.hidden if settings.hidden_matching else 0
        parts = processes if settings.shard_teacher else 1
        return teacher_of(config, family, work, parts, reads)


def measure_time(
    run: Run, config: Any, family: Any, rows: Sequence[TraceRow], processes: int
) -> Time:
    """Make a few optimizer steps of the drafter's shape with random weights.

    One row is tried first; the micro-batch is as large as the recipe's, or the largest for which
    enough steps can be made in time, and then counted up in proportion.

    Args:
        run: of the recipe.
        config: the drafter's.
        family: its table.
        rows: to learn from.
        processes: that would share a step. What they tell one another is not measured.
    """
    from draftsmith.distill.batches import BatchStream

    settings = run.recipe.distill
    forward, update = _trainer(run, config, family, rows)
    first = partial(forward, BatchStream(rows, 1, settings.max_length, run.recipe.seed)[0])
    _seconds(first, update)
    began = time.monotonic()
    alone, _ = _seconds(first, update)
    most = max(1, int(SECONDS / ((STEPS // 2) * max(alone, 1e-9))))
    stream = BatchStream(rows, min(settings.batch, most), settings.max_length, run.recipe.seed)
    scale = settings.batch / stream.batch * settings.accumulate / processes
    steps: list[float] = []
    while len(steps) < STEPS and (len(steps) < 2 or time.monotonic() - began < SECONDS):
        batch = stream[len(steps)]
        work, rest = _seconds(partial(forward, batch), update)
        steps.append(work * scale + rest)
    low, middle, high = min(steps), statistics.median(steps), max(steps)
    total = settings.steps
    return Time(
        len(steps), stream.batch, low, middle, high, low * total, middle * total, high * total
    )


def _trainer(run: Run, config: Any, family: Any, rows: Sequence[TraceRow]) -> Any:
    """(one micro-batch forward and back, the optimizer's step) of a random drafter."""
    import torch

    from draftsmith.distill.engine import TorchEngine
    from draftsmith.distill.teacher import Lesson
    from draftsmith.distill.train import Student, loss_head, trainable_parameters

    settings = run.recipe.distill
    if run.recipe.threads:
        torch.set_num_threads(run.recipe.threads)
    model = meta_model(config, family, default_device()).float().train()
    learning = trainable_parameters(model, family, settings, run.recipe.seed)
    student = Student(model, loss_head(model, rows, settings), run.dtype)
    optimizer = torch.optim.AdamW(learning.values(), lr=1e-5, fused=True)
    engine = TorchEngine(learning, optimizer, Path(), clip=settings.clip, module=student)

    def forward(batch: Any) -> None:
        batch = batch.to(model.device)
        value = engine(batch, Lesson(batch.traces)) / max(1, batch.tokens)
        engine.backward(value)
        # Reading it waits for a device that works by itself.
        float(value.detach())

    return forward, engine.step


def _seconds(work: Any, update: Any) -> tuple[float, float]:
    """Seconds of a micro-batch, and of the optimizer's step after it."""
    start = time.perf_counter()
    work()
    middle = time.perf_counter()
    update()
    return middle - start, time.perf_counter() - middle


def synthetic_rows(
    settings: DistillSettings, text: Text, vocab: int, top_n: int, listener: Path | None = None
) -> list[TraceRow]:
    """Random rows of the expected length, enough for every measured step.

    Args:
        settings: the recipe's `distill`.
        text: what is expected.
        vocab: ids of the drafter.
        top_n: log-probabilities of each token.
        listener: of a target that hears, as of `Sound`.
    """
    rng = np.random.default_rng(0)
    answers = min(text.longest - 1, max(1, round(text.mean_answer)))

    def source() -> Any:
        if listener is not None:
            return Sound(rng.integers(-99, 99, size=16_000).astype(np.int16), listener)
        length = text.longest_source
        return rng.integers(vocab, size=length).astype(np.int32) if length else None

    def row() -> TraceRow:
        return TraceRow(
            tokens=rng.integers(vocab, size=text.longest).astype(np.int32),
            prompt_length=text.longest - answers,
            sampled=True,
            logprobs=np.zeros(answers, np.float32),
            top_ids=rng.integers(vocab, size=(answers, top_n)).astype(id_dtype(vocab)),
            top_logprobs=np.full((answers, top_n), -5.0, np.float16),
            source=source(),
        )

    return [row() for _ in range(settings.batch * 2)]


def _gpus(settings: DistillSettings) -> int:
    """As many as are here, if they can share the micro-batches of a step."""
    import torch

    found = torch.cuda.device_count()
    return found if found and settings.accumulate % found == 0 else 1


def _not_here(run: Run, processes: int) -> Iterator[str]:
    """What stages need that a person can still bring."""
    try:
        run.data_files()
    except RequestError as error:
        yield f"{error}; the traces need it"
    if run.recipe.trace.engine == "vllm" and find_spec("vllm") is None:
        yield "recipe.trace.engine: vllm: not installed here; pip install vllm"
    if processes > 1 and find_spec("deepspeed") is None:
        yield "DeepSpeed is not installed here; pip install draftsmith[deepspeed]"


def _warnings(planned: Plan, measure: bool) -> Iterator[str]:
    text, own, device = planned.text, planned.chosen, planned.device
    if text.epochs > MOST_EPOCHS:
        yield (
            f"every row is seen {text.epochs:.1f} times; beyond {MOST_EPOCHS} epochs repeated text "
            "teaches little: raise trace.tokens or lower distill.steps"
        )
    if device.kind != "cpu" and own.traces * own.processes > device.host_available:
        yield (
            f"the traces take {gb(own.traces)} of the host's memory in each of {own.processes} "
            f"processes, and {gb(device.host_available)} are free; lower trace.tokens or "
            "trace.top_n"
        )
    if own.tight:
        yield (
            f"less than {RESERVE:.0%} of the free memory is left, and allocators may keep as much "
            "of what was freed"
        )
    if (raced := _race_bytes(planned)) > own.available:
        yield (
            f"recipe.prune.race: drafters are distilled beside the source, in {gb(raced)}, and "
            f"{gb(own.available)} are free; set race: 0, or take a larger device"
        )
    if not own.fits and not planned.changes:
        yield "nothing here makes it fit; take a smaller prune.shape or a larger device"
    if measure and not own.fits:
        yield "time was not measured, since it does not fit"
    elif measure and planned.settings.teacher == "live":
        yield "time was not measured: a live target's forward pass would have to be loaded"
    elif measure and not _is_measured(planned.settings):
        yield "time was not measured: it is for drafters that propose token by token alone"


def _race_bytes(planned: Plan) -> int:
    """What a race of layers holds: the source, and a drafter that learns as in distillation."""
    prune = planned.prune
    if prune is None or not prune.settings.race:
        return 0
    return prune.chosen.memory.weights + planned.chosen.total
