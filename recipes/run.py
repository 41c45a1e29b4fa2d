"""The stages of a recipe: each reads folders and writes one, resumes, and is skipped when done."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.devices import compute_dtype, default_device
from draftsmith.checkpoints.families.base import Axis, Family
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.layout import narrowest_window
from draftsmith.checkpoints.loading import (
    describe,
    load_config,
    load_configs,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from draftsmith.checkpoints.pair import (
    check_pair,
    check_tokenizer_rows,
    context_of,
    tokenizer_rows,
)
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape, resolve_shape
from draftsmith.data.chat import prompt_inputs, user_turn
from draftsmith.data.corpus import corpus_files
from draftsmith.data.files import PARTIAL, fingerprint, publish, storage, write_json, write_text
from draftsmith.data.mixture import check_mixture, local_files
from draftsmith.data.processes import is_main, launched_processes
from draftsmith.data.progress import say
from draftsmith.data.traces import TraceStore
from draftsmith.distill.logs import LOGS
from draftsmith.errors import RequestError
from draftsmith.recipes.loading import to_plain
from draftsmith.recipes.schema import Recipe

if TYPE_CHECKING:
    from draftsmith.distill.teacher import Teacher
    from draftsmith.prune.budget import Budget
    from draftsmith.prune.text import MixtureText

_KEY = "stage-key"
_STATE = "state"
MASKS = "masks.json"
SHARES = "shares.json"
SCORE = "score.json"


@dataclass(frozen=True)
class Stage:
    """One step of the road.

    Attributes:
        name: of the command and in messages.
        folder: below the run's folder.
        settings: recipe keys on which the result depends.
        inputs: the files from outside on which it depends, by their names in the recipe.
        needs: folders of the stages that it reads.
        work: fills the folder.
        many_processes: whether a launcher's processes can do it together.
    """

    name: str
    folder: str
    settings: tuple[str, ...]
    inputs: "Callable[[Run], dict[str, Path]]"
    needs: tuple[str, ...]
    work: "Callable[[Run, Path], None]"
    many_processes: bool = False


@dataclass
class Run:
    """A recipe, where its outputs go, and the models that are in memory already."""

    recipe: Recipe
    out: Path
    allow_pickle: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def target(self) -> ModelRef:
        """The target, found but not loaded."""
        return self.find(self.recipe.target)

    @cached_property
    def source(self) -> ModelRef:
        """The model to prune."""
        if self.recipe.source is None:
            return self.target
        return self.find(self.recipe.source)

    def find(self, spec: str) -> ModelRef:
        """A model of the recipe."""
        return resolve(spec, self.allow_pickle)

    @cached_property
    def source_model(self) -> Any:
        """The source, loaded exactly."""
        return load_model(self.source)

    @cached_property
    def target_model(self) -> Any:
        """The target, loaded exactly."""
        return self.source_model if self.source == self.target else load_model(self.target)

    def forget_models(self) -> None:
        """Free what is loaded; whoever needs it loads it again."""
        for name in ("source_model", "target_model"):
            self.__dict__.pop(name, None)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's."""
        return load_tokenizer(self.target)

    def folder(self, stage: str) -> Path:
        """Where a stage's output is when it has been made."""
        return self.out / stage

    @property
    def dtype(self) -> Any:
        """Of work where exactness is not at stake."""
        return compute_dtype(self.recipe.dtype, default_device())

    def data_files(self) -> dict[str, Path]:
        """Files of prompts or corpus that the traces are made from."""
        data = self.recipe.data
        if data.source == "corpus":
            return {str(p): p for p in corpus_files(data.path)}
        if data.source == "prompts":
            return {n: f for p in data.path for n, f in prompt_inputs(p).items()}
        return {}

    def prune_files(self) -> dict[str, Path]:
        """Files that masks learn from, or are measured by."""
        settings = self.recipe.prune
        found = {} if settings.latency is None else {settings.latency: Path(settings.latency)}
        if missing := [name for name, path in found.items() if not path.exists()]:
            raise RequestError(
                f"recipe.prune.latency: {missing[0]}: there is no such file; `draftsmith profile` "
                "on the source writes it"
            )
        if settings.mixture is not None:
            for path in local_files(settings.mixture):
                found[str(path)] = path
        return found


def check(run: Run) -> Shape:
    """Refuse what can't work before any weight is loaded; returns the drafter's shape.

    Raises:
        RequestError: the model is missing or of an unknown family, the shape is impossible,
            tokenizers differ, prompts can't be had, or an export is impossible.
    """
    from draftsmith.accept.pairing import prompts_for
    from draftsmith.accept.runtimes import FORMATS, check_runtime
    from draftsmith.accept.samples import check_samples
    from draftsmith.accept.verify import Verification
    from draftsmith.checkpoints.export import preflight
    from draftsmith.checkpoints.export.base import Candidate
    from draftsmith.prune.baselines import check_method

    config = load_config(run.source)
    family, source = describe(config, run.source)
    _check_block(run, config, family)
    if family.has_encoder:
        _check_encoder_decoder(run, family)
    elif run.recipe.distill.train == "decoder":
        raise RequestError(
            f"recipe.distill.train: decoder: {run.source.spec} has no encoder to leave as it is; "
            "set layers or all"
        )
    prune = run.recipe.prune
    _, shape = goal_of(run, family, source)
    check_method(prune.method, source, shape)
    _check_encoder(run, family, source, shape)
    shape = replace(shape, encoder_layers=shape.encoder_layers * prune.encoder_repeat)
    target = load_configs(run.target)
    target_family, target_shape = describe(target.config, run.target)
    rows = tokenizer_rows(target.config, target_family, target_shape.vocab)
    check_tokenizer_rows(run.tokenizer, rows, run.recipe.target)
    if run.source != run.target:
        check_pair(run.target, run.source)
        check_tokenizer_rows(
            run.tokenizer, tokenizer_rows(config, family, source.vocab), run.source.spec
        )
        _check_places(
            run, family, context_of(config, family), context_of(target.config, target_family)
        )
    if run.recipe.data.source == "self":
        user_turn(run.tokenizer)
    if (beams := run.recipe.trace.beams) > 1 and not target_family.has_encoder:
        raise RequestError(
            f"recipe.trace.beams: {beams}: {run.target.spec} is no encoder–decoder, and only those "
            "search beams; leave it out"
        )
    _check_distill(run, config, family, target.config, target_family)
    score = run.recipe.score
    prompts = prompts_for(run.target, target, run.tokenizer, score)
    if score.samples:
        asked = Verification.of(score, run.recipe.seed)
        check_samples(len(prompts[: score.decode_prompts]), asked, score.samples)
    candidate = Candidate(config, family, shape, run.target)
    for note in preflight(candidate, run.recipe.export):
        say(f"note: {note}")
    if score.runtime != "torch":
        check_runtime(score.runtime, run.target)
        preflight(candidate, replace(run.recipe.export, to=(FORMATS[score.runtime],)))
    return shape


def _check_encoder_decoder(run: Run, family: Family) -> None:
    """Refuse what only decoders alone can do.

    Raises:
        RequestError: naming the key.
    """
    recipe = run.recipe
    asked = {
        "data.source: self": recipe.data.source == "self",
        "trace.engine: vllm": recipe.trace.engine == "vllm",
        "prune.mixture": recipe.prune.mixture is not None,
        "prune.apart": recipe.prune.apart,
        "prune.draft_ms": recipe.prune.draft_ms is not None,
        "distill.on_policy": recipe.distill.on_policy > 0,
        f"score.runtime: {recipe.score.runtime}": recipe.score.runtime != "torch",
    }
    if found := next((key for key, there in asked.items() if there), None):
        raise RequestError(
            f"recipe.{found}: {run.source.spec} is an encoder–decoder ({family.name}), for which "
            "there is no such thing yet; leave it out (data.source: corpus or prompts gives texts)"
        )


def _check_places(run: Run, family: Family, own: int | None, target: int | None) -> None:
    """Refuse a source that can't learn all that its target reads and writes.

    Decoders alone have no table of places that could end.
    """
    if family.has_encoder and own is not None and (target is None or own < target):
        raise RequestError(
            f"recipe.source: {run.source.spec} tells {own} positions apart and {run.target.spec} "
            f"{target or 'any number'}, so it can't learn from all of its texts; give a source "
            "with as many"
        )


def _check_encoder(run: Run, family: Family, source: Shape, shape: Shape) -> None:
    """Refuse another encoder that is none, or that would never learn.

    Raises:
        RequestError: naming the key.
    """
    times, place = run.recipe.prune.encoder_repeat, "recipe.prune.encoder_repeat"
    if times > 1 and not family.has_encoder:
        raise RequestError(f"{place}: {times}: {run.source.spec} has no encoder; leave it out")
    if run.recipe.distill.train != "decoder":
        return
    if times > 1:
        raise RequestError(
            f"{place}: {times}: with distill.train: decoder the encoder is the target's, which has "
            "each layer once; set distill.train: all, or leave it out"
        )
    asked = run.recipe.prune.shape
    encoders: tuple[Axis, ...] = ("encoder_layers", "encoder_heads", "encoder_ffn", "hidden")
    for axis in encoders:
        if getattr(shape, axis) != getattr(source, axis):
            # Some families have one width for both stacks.
            names = (axis, *family.tied_with(axis), "heads")
            key = next((n for n in names if getattr(asked, n, None) is not None), axis)
            raise RequestError(
                f"recipe.prune.shape.{key}: {getattr(asked, key, None)}: it cuts the encoder too, "
                "which would never learn with distill.train: decoder; set distill.train: all, or "
                "leave it out"
            )


def _check_block(run: Run, config: Any, family: Family) -> None:
    """Refuse blocks that have no room, or that nothing could use.

    Raises:
        RequestError: naming the key.
    """
    recipe = run.recipe
    if (block := recipe.distill.block) is None:
        return
    if (most := max(recipe.score.lookahead)) > block.size:
        raise RequestError(
            f"recipe.score.lookahead: {most}: blocks have {block.size} tokens; make it at most that"
        )
    context = context_of(config, family)
    if context is not None and recipe.distill.max_length + block.size > context:
        raise RequestError(
            f"recipe.distill.max_length: {recipe.distill.max_length}: with the {block.size} masks "
            f"of a block that is more than the {context} positions of {run.source.spec}; make it "
            f"at most {context - block.size}"
        )
    if (window := narrowest_window(config, family)) is not None:
        raise RequestError(
            f"recipe.distill.block: {run.source.spec} attends within windows of {window} tokens, "
            "which blocks can't respect; leave block out"
        )
    if other := [to for to in recipe.export.to if to != "hf"]:
        raise RequestError(
            f"recipe.export.to: {other[0]}: it drafts token by token, and this drafter in blocks; "
            "leave hf alone"
        )


def _check_distill(
    run: Run, config: Any, family: Family, target: Any, target_family: Family
) -> None:
    """Refuse what distillation can't do with these models and traces."""
    settings = run.recipe.distill
    if settings.hidden_matching and run.source != run.target:
        raise RequestError(
            f"recipe.distill.hidden_matching: {settings.hidden_matching}: the drafter is cut from "
            f"{run.source.spec}, whose layers are not those of {run.target.spec}; leave it out"
        )
    windows = [narrowest_window(*both) for both in ((config, family), (target, target_family))]
    window = min((w for w in windows if w is not None), default=None)
    longest = settings.max_length + settings.lookahead
    if settings.on_policy and window is not None and window < longest:
        raise RequestError(
            f"recipe.distill.max_length: {settings.max_length}: with on_policy a row must lie "
            f"within the attention window of {window} tokens; make it at most "
            f"{window - settings.lookahead}, or leave on_policy out"
        )
    _check_domains(run)


def _check_mixture(run: Run) -> None:
    """Refuse a mixture that lacks text, or has sequences longer than the source takes."""
    settings = run.recipe.prune
    if (mixture := settings.mixture) is None or settings.method != "masks":
        return
    config = load_config(run.source)
    family, _ = describe(config, run.source)
    context = getattr(config, family.config.context or "", None)
    if context is not None and mixture.sequence > context:
        raise RequestError(
            f"recipe.prune.mixture.sequence: {mixture.sequence}: {run.source.spec} tells "
            f"{context} positions apart; make it at most that"
        )
    tokens = settings.steps * settings.accumulate * settings.batch * mixture.sequence
    if is_main():
        check_mixture(mixture, run.tokenizer, tokens)


def _check_domains(run: Run) -> None:
    """Refuse weights of domains that finished traces don't have."""
    weights, folder = run.recipe.distill.domain_weights, run.folder("traces")
    if weights and provenance.read_key(folder) == stage_keys(run)["traces"]:
        known = TraceStore(folder).domains
        if unknown := sorted(set(weights) - set(known)):
            raise RequestError(
                f"recipe.distill.domain_weights: no trace is of {', '.join(unknown)}; the traces "
                f"have {', '.join(map(repr, known))}"
            )


def goal_of(run: Run, family: Family, source: Shape) -> "tuple[Shape | Budget, Shape]":
    """What pruning is to reach, and the largest shape that may come out.

    Raises:
        RequestError: the shape is impossible, or the budget.
    """
    settings = run.recipe.prune
    if settings.latency is None:
        shape = resolve_shape(source, asdict(settings.shape), family, settings.axes)
        return shape, shape
    from draftsmith.accept.latency_table import LatencyTable
    from draftsmith.prune.budget import Budget

    budget = Budget.of(settings, source, family, LatencyTable.read(Path(settings.latency)))
    return budget, budget.start


def run_stages(run: Run, names: tuple[str, ...] | None = None) -> bool:
    """Do the named stages (default: all) in order; returns whether anything was left to do."""
    chosen = [s for s in STAGES if names is None or s.name in names]
    _join_processes(run, chosen)
    keys = stage_keys(run)
    due = [s for s in chosen if provenance.read_key(run.out / s.folder) != keys[s.folder]]
    # None may have made it while another has not yet looked.
    wait_for_all()
    if not due:
        return False
    _check_needs(run, due, keys)
    _set_up_torch(run.recipe.threads)
    shape = check(run)
    if "trace" in {stage.name for stage in due}:
        from draftsmith.distill.trace import check_engine

        check_engine(run.recipe.trace, run.target)
    if "prune" in {stage.name for stage in due}:
        _check_mixture(run)
    limit = run.recipe.prune.draft_ms
    say(f"drafter: {shape}" if limit is None else f"drafter: at most {limit:g} ms of {shape}")
    with storage(run.out):
        run.out.mkdir(parents=True, exist_ok=True)
    for stage in due:
        start = time.monotonic()
        _do(run, stage, keys[stage.folder])
        run.seconds[stage.name] = time.monotonic() - start
        say(f"{stage.name}: {run.seconds[stage.name]:.0f} s → {run.out / stage.folder}")
    return True


def _join_processes(run: Run, stages: Sequence[Stage]) -> None:
    """Let the processes that a launcher started for a stage find one another.

    Raises:
        RequestError: not all of these stages can be done by many processes.
    """
    if (processes := launched_processes()) == 1:
        return
    if alone := [s.name for s in stages if not s.many_processes]:
        raise RequestError(
            f"{', '.join(alone)}: done by one process, and {processes} were launched; run "
            f"`draftsmith {alone[0]}` without the launcher, and launch `draftsmith prune` or "
            "`draftsmith distill` alone"
        )
    for name in (stage.name for stage in stages):
        if (parts := getattr(run.recipe, name).accumulate) % processes:
            raise RequestError(
                f"recipe.{name}.accumulate: {parts} micro-batches a step can't be shared by "
                f"{processes} processes; make it a multiple of {processes}"
            )
    from draftsmith.distill.deepspeed_engine import start_processes

    start_processes()


def wait_for_all() -> None:
    """Until every process has come this far."""
    if launched_processes() > 1:
        from draftsmith.distill.engine import Ranks

        Ranks().barrier()


def _set_up_torch(threads: int) -> None:
    import torch

    quiet_transformers()
    if threads:
        torch.set_num_threads(threads)


def _check_needs(run: Run, due: Sequence[Stage], keys: Mapping[str, str]) -> None:
    """Refuse a stage whose inputs are neither there nor about to be made."""
    coming = {stage.folder for stage in due}
    for needed in (folder for stage in due for folder in stage.needs):
        if needed not in coming and provenance.read_key(run.out / needed) != keys[needed]:
            command = next(s.name for s in STAGES if s.folder == needed)
            raise RequestError(
                f"{run.out / needed}: missing, or made with other settings; run "
                f"`draftsmith {command}` with the same recipe first, or `draftsmith run`"
            )


def stage_keys(run: Run) -> dict[str, str]:
    """Folder -> digest of all that its content depends on, through the stages before it."""
    plain = to_plain(run.recipe)
    keys: dict[str, str] = {}
    for stage in STAGES:
        settings = {name: plain[name] for name in stage.settings}
        # The number of workers changes who writes, not what.
        settings.get("trace", {}).pop("workers", None)
        before = [keys[folder] for folder in stage.needs]
        keys[stage.folder] = provenance.key_of(
            [stage.name, settings, _fingerprints(run, stage), before]
        )
    return keys


def _fingerprints(run: Run, stage: Stage) -> dict[str, str]:
    return {name: fingerprint(path) for name, path in stage.inputs(run).items()}


def _do(run: Run, stage: Stage, key: str) -> None:
    """Fill a folder, which gets its name when all went well.

    What an interrupted run with the same settings left is kept, so that the stage can go on; if
    it was killed after the work itself, only the name is missing.
    """
    final = run.out / stage.folder
    partial = final.with_name(final.name + PARTIAL)
    worked = provenance.read_key(partial) == key
    wait_for_all()
    if not worked:
        if is_main():
            with storage(partial):
                _prepare(partial, key)
        wait_for_all()
        stage.work(run, partial)
    if is_main():
        _finish(run, stage, key, worked)
    wait_for_all()


def _finish(run: Run, stage: Stage, key: str, worked: bool) -> None:
    """Say how a folder came about, and give it its name."""
    final = run.out / stage.folder
    partial = final.with_name(final.name + PARTIAL)
    if not worked:
        with storage(partial):
            provenance.write(
                partial,
                key=key,
                settings=to_plain(run.recipe),
                inputs=_fingerprints(run, stage),
                seed=run.recipe.seed,
                passing=(_KEY, _STATE, LOGS),
            )
    with storage(final):
        shutil.rmtree(partial / _STATE, ignore_errors=True)
        (partial / _KEY).unlink(missing_ok=True)
        publish(partial, final)


def _prepare(partial: Path, key: str) -> None:
    """Keep what belongs to `key`; clear away anything else."""
    mark = partial / _KEY
    if not mark.is_file() or mark.read_text(encoding="utf-8") != key:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_text(mark, key)


def _traces(run: Run, folder: Path) -> None:
    from draftsmith.distill.trace import write_traces

    write_traces(run.recipe, run.target, folder)


def _prune(run: Run, folder: Path) -> None:
    import torch

    from draftsmith.checkpoints.growing import repeat_encoder
    from draftsmith.checkpoints.slicing import compact_model
    from draftsmith.prune import plots, trajectory
    from draftsmith.prune.baselines import (
        select_at_random,
        select_by_activations,
        select_by_position,
    )
    from draftsmith.prune.race import Track
    from draftsmith.prune.train import Pruning, learn_masks

    settings = run.recipe.prune
    # Weights that learn are not those by which the target is scored, and are float32 everywhere.
    learning = load_model(run.source, dtype=torch.float32) if settings.weights_lr else None
    model = run.source_model if learning is None else learning
    family, source = describe(model.config, run.source)
    goal, shape = goal_of(run, family, source)
    store, seed = TraceStore(run.folder("traces")), run.recipe.seed
    rows = store.rows("train")
    if settings.method == "masks":
        state = folder / _STATE
        result = learn_masks(
            model,
            family,
            source,
            goal,
            rows,
            settings,
            seed=seed,
            state=state,
            dtype=run.dtype,
            teacher=_mask_teacher(run),
            text=_mixture(run),
            track=Track.of(rows, store.rows("validation"), settings, seed, run.dtype),
        )
    elif settings.method in ("block-influence", "importance"):
        chosen = select_by_activations(
            settings.method,
            model,
            family,
            source,
            shape,
            rows,
            batch=settings.batch,
            max_length=settings.max_length,
            seed=seed,
        )
        result = Pruning(chosen, {})
    elif settings.method == "random":
        result = Pruning(select_at_random(source, shape, seed), {})
    else:
        result = Pruning(select_by_position(settings.method, source, shape), {})
    if result.exchanged is not None:
        say(f"exchange: loss {result.exchanged.before:.2f} → {result.exchanged.after:.2f}")
    say(f"kept layers: {', '.join(map(str, result.selection.layers))}")
    if not is_main():
        return
    compact = compact_model(model, family, result.selection)
    save_model(repeat_encoder(compact, family, settings.encoder_repeat), run.target, folder)
    if result.trajectory is not None:
        result.trajectory.write(folder / trajectory.FILE)
        plots.plot_trajectory(result.trajectory, folder / plots.FILE, result.selection)
    if result.shares:
        write_json(folder / SHARES, list(result.shares))
    write_json(
        folder / MASKS,
        {
            "source": run.source.spec,
            "family": family.name,
            "source_shape": asdict(source),
            "method": settings.method,
            "selection": result.selection.to_plain(),
            "expected": result.expected,
            "decided": {} if result.trajectory is None else result.trajectory.decided(),
            "snapped": None if result.snapped is None else asdict(result.snapped),
            "exchanged": None if result.exchanged is None else asdict(result.exchanged),
            "raced": [asdict(entrant) for entrant in result.raced],
        },
    )


def _mixture(run: Run) -> "MixtureText | None":
    """The text that masks learn from, if it is not the traces'."""
    from draftsmith.prune.text import MixtureText

    settings = run.recipe.prune
    if settings.mixture is None:
        return None
    return MixtureText(settings.mixture, run.tokenizer, settings, run.recipe.seed)


def _mask_teacher(run: Run) -> "Teacher | None":
    """The target, if masks are to learn from it in memory."""
    from draftsmith.distill.teacher import Teacher

    settings = run.recipe.prune
    if settings.teacher == "traces":
        return None
    # Its own copy where the source is changed, by weights that learn or by how it runs.
    alone = settings.weights_lr or settings.checkpoint_activations
    model = load_model(run.target, dtype=run.dtype) if alone else run.target_model
    return Teacher(model)


def _distill(run: Run, folder: Path) -> None:
    import torch

    from draftsmith.checkpoints.growing import start_block_drafting
    from draftsmith.distill.train import distill

    store = TraceStore(run.folder("traces"))
    # Weights that learn are float32 everywhere; only products may be in less.
    model = load_model(resolve(str(run.folder("pruned"))), dtype=torch.float32)
    family, _ = describe(model.config, run.source)
    if (block := run.recipe.distill.block) is not None:
        model = start_block_drafting(model, family, block.size, written_ids(run))
    _, target_shape = describe(load_config(run.target), run.target)
    curve = distill(
        model,
        family,
        store.rows("train"),
        store.rows("validation"),
        run.recipe.distill,
        seed=run.recipe.seed,
        state=folder / _STATE,
        dtype=run.dtype,
        teacher=_teacher(run),
        target_layers=target_shape.layers,
    )
    if is_main():
        save_model(model, run.target, folder)
        write_json(folder / "curve.json", curve)


def written_ids(run: Run) -> set[int]:
    """The ids that the target's decoder may write: those with a string, or all."""
    config = load_config(run.target)
    family, shape = describe(config, run.target)
    if family.says_unnamed(config):
        return set(range(shape.vocab))
    return set(run.tokenizer.get_vocab().values())


def _teacher(run: Run) -> "Teacher | None":
    """The target, if the recipe wants it in memory."""
    import torch

    from draftsmith.distill.teacher import Teacher
    from draftsmith.prune.compact import read_masks

    settings = run.recipe.distill
    if settings.teacher == "traces":
        return None
    kept = None
    if settings.hidden_matching:
        kept = read_masks(run.folder("pruned") / MASKS).selection
    if settings.shard_teacher or run.dtype != torch.float32:
        # One copy of the target is enough.
        run.forget_models()
        model = load_model(run.target, dtype=run.dtype)
    else:
        model = run.target_model
    return Teacher(model, kept=kept, shard=settings.shard_teacher)


def _score(run: Run, folder: Path) -> None:
    from draftsmith.accept.score import score_drafter

    score = score_drafter(
        run.target,
        resolve(str(run.folder("distilled"))),
        run.recipe.score,
        seed=run.recipe.seed,
        target_model=run.target_model,
    )
    write_json(folder / SCORE, score.to_plain())


def _export(run: Run, folder: Path) -> None:
    from draftsmith.checkpoints.export import export_drafter

    export_drafter(
        resolve(str(run.folder("distilled"))),
        run.target,
        folder,
        run.recipe.export,
        recipe=run.out.name,
        score=read_score(run),
    )


def read_score(run: Run) -> dict[str, Any]:
    """The finished run's score."""
    path = run.folder("scores") / SCORE
    plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return plain


def _no_files(run: Run) -> dict[str, Path]:
    return {}


STAGES: tuple[Stage, ...] = (
    Stage(
        "trace",
        "traces",
        settings=("seed", "dtype", "data", "trace"),
        inputs=lambda run: {run.target.spec: run.target.path, **run.data_files()},
        needs=(),
        work=_traces,
    ),
    Stage(
        "prune",
        "pruned",
        settings=("seed", "dtype", "prune"),
        inputs=lambda run: {run.source.spec: run.source.path, **run.prune_files()},
        needs=("traces",),
        work=_prune,
        many_processes=True,
    ),
    Stage(
        "distill",
        "distilled",
        settings=("seed", "dtype", "distill"),
        inputs=_no_files,
        needs=("traces", "pruned"),
        work=_distill,
        many_processes=True,
    ),
    Stage(
        "score",
        "scores",
        settings=("seed", "score"),
        inputs=lambda run: prompt_inputs(run.recipe.score.prompts),
        needs=("distilled",),
        work=_score,
    ),
    Stage(
        "export",
        "export",
        settings=("export",),
        inputs=_no_files,
        # The model card tells the scores.
        needs=("distilled", "scores"),
        work=_export,
    ),
)
