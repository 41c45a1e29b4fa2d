"""What the prune stage needs, from configs, tokenizers and recipe alone: nothing is loaded."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftsmith.checkpoints.devices import working_dtype
from draftsmith.checkpoints.families.base import AXES, Axis, Family
from draftsmith.checkpoints.loading import describe, load_config, load_tokenizer
from draftsmith.checkpoints.pair import context_of
from draftsmith.checkpoints.shape import Shape, changed_axes
from draftsmith.data.mixture import FilePart, check_mixture, domain_parts, initial_shares
from draftsmith.distill.estimate import (
    Counts,
    Teacher,
    Work,
    masked_counts,
    peak,
    teacher_of,
)
from draftsmith.errors import RequestError
from draftsmith.recipes.fits import Device, Fit, Text, gb, plain_fit, that_fit, way_name
from draftsmith.recipes.run import Run
from draftsmith.recipes.schema import DomainSettings, MixtureSettings, PruneSettings

# Bytes of a domain's files up to which they are read; of more, only the size is told.
_CHEAP = 32 * 2**20
# As for distillation: past so many times a text teaches little.
_MOST_EPOCHS = 4


@dataclass(frozen=True)
class DomainText:
    """What a mixture has of one domain.

    Attributes:
        name: of the domain.
        asked: tokens that the recipe's steps take, by the first shares.
        tokens: that are there, or as many as are asked for; none: not counted.
        note: why not, and what is known.
        here: whether it is there, as far as was looked.
    """

    name: str
    asked: int
    tokens: int | None
    note: str
    here: bool = True


@dataclass(frozen=True)
class PrunePlan:
    """What learning the masks needs.

    Attributes:
        source: the model that is masked.
        axes: that have masks.
        counts: of the source.
        settings: the recipe's.
        length: tokens of the longest row.
        text: of the traces; none where a mixture is read.
        domains: of that mixture.
        fits: ways to run the stage.
        changes: what would fit, where the recipe's own way does not.
        warnings: in words.
    """

    source: str
    axes: tuple[Axis, ...]
    counts: Counts
    settings: PruneSettings
    length: int
    text: Text | None
    domains: tuple[DomainText, ...]
    fits: tuple[Fit, ...]
    changes: tuple[Fit, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> Fit:
        """The recipe's own way."""
        return next(fit for fit in self.fits if fit.chosen)

    @property
    def asked_tokens(self) -> int:
        """Tokens that the recipe's steps take."""
        if self.text is not None:
            return self.text.asked_tokens
        return _rows_of(self.settings) * self.length

    def to_plain(self) -> dict[str, Any]:
        """For JSON: bytes and counts."""
        return {
            "source": self.source,
            "axes": list(self.axes),
            "parameters": self.counts.parameters,
            "masks": self.counts.adapters,
            "learning": self.counts.learning,
            "batch": {"rows": self.settings.batch, "tokens_of_a_row": self.length},
            "asked_tokens": self.asked_tokens,
            "text": None if self.text is None else asdict(self.text),
            "domains": [asdict(domain) for domain in self.domains],
            "memory": [plain_fit(fit) for fit in self.fits],
            "changes": [plain_fit(fit) for fit in self.changes],
        }


def plan_prune(
    run: Run, shape: Shape, device: Device, processes: int, text: Text
) -> PrunePlan | None:
    """Say what the prune stage needs; none where it learns nothing.

    Args:
        run: of the recipe.
        shape: what is kept of the source.
        device: what there is.
        processes: that would share it.
        text: of the traces, as this stage reads them.
    """
    settings = run.recipe.prune
    config = load_config(run.source)
    family, source = describe(config, run.source)
    axes = _axes(settings, family, source, shape)
    if settings.method != "masks" or not axes:
        return None
    shared = processes if settings.accumulate % processes == 0 else 1
    case = _Case(run, config, family, axes, text, device)
    # Only weights that learn are cut into parts.
    own = (settings.zero if shared > 1 and settings.weights_lr else 0, shared)
    fits = tuple(case.fit(settings, *way, chosen=way == own) for way in _ways(*own))
    mixture = settings.mixture
    planned = PrunePlan(
        run.source.spec,
        axes,
        case.counts(settings),
        settings,
        case.length(settings),
        None if mixture else text,
        domains_of(mixture, run, _rows_of(settings) * mixture.sequence) if mixture else (),
        fits,
    )
    if not planned.chosen.fits or planned.chosen.tight:
        planned = replace(planned, changes=that_fit(case.changes(*own)))
    context = context_of(config, family)
    return replace(planned, warnings=tuple(_warnings(planned, processes, context)))


def domains_of(settings: MixtureSettings, run: Run, tokens: int) -> tuple[DomainText, ...]:
    """Compare what is asked of each domain with what is there, as far as that is cheap.

    Args:
        settings: the mixture.
        run: of the recipe.
        tokens: of the whole run.

    Raises:
        RequestError: files that were read have too few texts.
    """
    tokenizer, shares = load_tokenizer(run.source), initial_shares(settings)
    return tuple(
        _domain(name, domain, settings, tokenizer, round(shares[name] * tokens))
        for name, domain in settings.domains.items()
    )


def _domain(
    name: str, domain: DomainSettings, settings: MixtureSettings, tokenizer: Any, asked: int
) -> DomainText:
    try:
        parts = domain_parts(name, domain, settings, "recipe.prune.mixture")
    except RequestError as error:
        return DomainText(name, asked, None, str(error), here=False)
    files = [part for part in parts if isinstance(part, FilePart)]
    if len(files) < len(parts):
        return DomainText(name, asked, None, "on the hub, not checked")
    size = sum(part.path.stat().st_size for part in files)
    if size > _CHEAP:
        note = f"{gb(size)} in {len(files)} files, not read"
        return DomainText(name, asked, None, note)
    alone = replace(settings, domains={name: domain}, update="none", reference={})
    with warnings.catch_warnings():
        # The plan has a warning of its own.
        warnings.simplefilter("ignore")
        found = check_mixture(alone, tokenizer, asked)[name]
    return DomainText(name, asked, found.tokens, f"{gb(size)} in {len(files)} files")


@dataclass(frozen=True)
class _Case:
    """A masked source and its text, under any settings."""

    run: Run
    config: Any
    family: Family
    axes: tuple[Axis, ...]
    text: Text
    device: Device

    def fit(
        self,
        settings: PruneSettings,
        zero: int,
        processes: int,
        *,
        chosen: bool = False,
        name: str | None = None,
    ) -> Fit:
        """Estimate one way."""
        work = self.work(settings, processes)
        return Fit(
            name or way_name(zero, processes),
            zero,
            processes,
            chosen,
            peak(self.counts(settings), work, zero, processes, replays=False),
            0 if settings.mixture else self.text.memory,
            self.device.share(processes),
            self.device.kind == "cpu",
        )

    def counts(self, settings: PruneSettings) -> Counts:
        """Of the source; weights that learn are float32, others as they are loaded."""
        stored: int = working_dtype(self.device.kind).itemsize
        learn = bool(settings.weights_lr)
        return masked_counts(
            self.config,
            self.family,
            self.axes,
            learn=learn,
            width=stored,
            draws=learn or settings.checkpoint_activations,
        )

    def length(self, settings: PruneSettings) -> int:
        """Tokens of the longest row."""
        return settings.mixture.sequence if settings.mixture else self.text.longest

    def work(self, settings: PruneSettings, processes: int) -> Work:
        """What a process does: every row of a batch as long as the longest."""
        length = self.length(settings)
        work = Work(
            rows=settings.batch,
            length=length,
            answers=settings.batch * (length - 1),
            micro_batches=settings.accumulate // processes,
            # Of a mixture the tokens alone are known.
            top_n=1 if settings.mixture else self.run.recipe.trace.top_n,
            width=self.run.dtype.itemsize,
            checkpoint=settings.checkpoint_activations,
            columns=settings.vocab_limit,
            device=self.device.kind,
            source_length=0 if settings.mixture else self.text.longest_source,
        )
        return replace(work, teacher=self._teacher(settings, work))

    def changes(self, zero: int, processes: int) -> Iterator[Fit]:
        """Smaller ways, each by one change, and the last by all of these together."""
        settings = self.run.recipe.prune
        small = settings
        for name, change in self._candidates(settings):
            small = replace(small, **change)
            yield self.fit(replace(settings, **change), zero, processes, name=name)
        if zero and zero != 3:
            yield self.fit(settings, 3, processes, name="prune.zero: 3")
        yield self.fit(small, zero, processes, name="all of these prune settings together")

    def _candidates(self, settings: PruneSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if not settings.checkpoint_activations:
            yield "prune.checkpoint_activations: true", {"checkpoint_activations": True}
        if settings.batch > 1:
            times = settings.batch * settings.accumulate
            name = f"prune.batch: 1, accumulate: {times} (the same step)"
            yield name, {"batch": 1, "accumulate": times}
        if settings.weights_lr:
            yield "prune.weights_lr: 0.0 (masks alone learn)", {"weights_lr": 0.0}

    def _teacher(self, settings: PruneSettings, work: Work) -> Teacher:
        if settings.teacher == "traces":
            return Teacher()
        config = load_config(self.run.target)
        family, _ = describe(config, self.run.target)
        teacher = teacher_of(config, family, work)
        # A source that stays as it is speaks for itself, without its masks.
        alone = settings.weights_lr or settings.checkpoint_activations
        shared = self.run.source == self.run.target and not alone
        return replace(teacher, weights=0) if shared else teacher


def _axes(settings: PruneSettings, family: Family, source: Shape, shape: Shape) -> tuple[Axis, ...]:
    """The axes that have masks: those that the shape shortens, and those that a budget may."""
    named = changed_axes(source, shape)
    if settings.apart:
        named = (*named, "ffn_layers")
    if settings.draft_ms is None:
        return named
    free = settings.axes or ("layers", "kv_heads", "heads_per_group", "ffn", "hidden")
    more = (a for a in AXES if a in family.axes and a in free and a not in named)
    return (*named, *more)


def _ways(zero: int, processes: int) -> list[tuple[int, int]]:
    """The recipe's own way beside others that there are."""
    if processes == 1:
        return [(0, 1)]
    return [(0, 1), *((stage, processes) for stage in ((1, 2, 3) if zero else (0,)))]


def _rows_of(settings: PruneSettings) -> int:
    return settings.steps * settings.accumulate * settings.batch


def _warnings(planned: PrunePlan, processes: int, context: int | None) -> Iterator[str]:
    settings, own = planned.settings, planned.chosen
    if own.processes < processes:
        yield (
            f"recipe.prune.accumulate: {settings.accumulate} micro-batches a step can't be shared "
            f"by {processes} processes; pruning is planned for one"
        )
    if context is not None and planned.length > context:
        yield (
            f"recipe.prune: rows of {planned.length} tokens, but {planned.source} knows {context} "
            "positions; shorten mixture.sequence or max_length"
        )
    if settings.draft_ms is not None:
        yield (
            "recipe.prune.draft_ms: the shape is known after pruning; until then the drafter's "
            "figures are those of the largest that `shape` allows"
        )
    for domain in planned.domains:
        if not domain.here:
            yield domain.note
        elif domain.tokens is not None and domain.asked > _MOST_EPOCHS * domain.tokens:
            yield (
                f"recipe.prune.mixture.domains.{domain.name}: {domain.asked:,} tokens are asked "
                f"for, and {domain.tokens:,} are there: past {_MOST_EPOCHS} times a text teaches "
                "little; give it more text or less weight"
            )
    if own.tight:
        yield "prune fits with little room, and allocators may keep some of what was freed"
    if not own.fits and not planned.changes:
        yield "nothing here makes prune fit; take a smaller source, more processes or larger GPUs"
