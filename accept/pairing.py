"""From names to a loaded target and drafter, and to prompts that both can read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.accept.cache import CachedModel, cached
from draftsmith.accept.decode import Limits
from draftsmith.accept.heads import HeadsConfig, HeadsDrafter, ParallelHeads, is_heads
from draftsmith.accept.trial import Pair, Proposing
from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.formats import ModelRef, local_path
from draftsmith.checkpoints.generation import banned_ids, decoder_start, never_first, stop_ids
from draftsmith.checkpoints.loading import (
    Configs,
    describe,
    load_config,
    load_configs,
    load_model,
    load_tokenizer,
)
from draftsmith.checkpoints.pair import (
    PairCheck,
    SharedVocabulary,
    check_pair,
    context_of,
    said_vocabulary,
)
from draftsmith.data.chat import Prompt, read_prompts
from draftsmith.data.progress import say
from draftsmith.data.sound import Sound
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings

# A drafter that is no model: it copies from the text.
PROMPT_LOOKUP = "prompt-lookup"
# A drafter that is some layers of the target, as skip-layers:0,1,28,29.
SKIP_LAYERS = "skip-layers:"


@dataclass(frozen=True)
class Request:
    """A pair that was checked before any weight is loaded.

    Attributes:
        target: the target.
        drafter: a model; or `PROMPT_LOOKUP`, `SKIP_LAYERS` and numbers, or a folder of heads.
        check: what they have in common.
        tokenizer: the target's.
        configs: the target's.
    """

    target: ModelRef
    drafter: ModelRef | str
    check: PairCheck
    tokenizer: Any
    configs: Configs

    @classmethod
    def of(cls, target: ModelRef, drafter: ModelRef | str) -> "Request":
        """Check that they belong together.

        Raises:
            RequestError: they don't, a layer is asked for that the target lacks, or heads don't
                fit it.
        """
        check = check_pair(target, target if isinstance(drafter, str) else drafter)
        if isinstance(drafter, str):
            _check_own(drafter, target)
        for note in check.notes:
            say(f"note: {note}")
        return cls(target, drafter, check, load_tokenizer(target), load_configs(target))

    @property
    def names(self) -> dict[str, str]:
        """How the user named them."""
        drafter = self.drafter
        return {
            "target": self.target.spec,
            "drafter": drafter if isinstance(drafter, str) else drafter.spec,
        }

    @property
    def most(self) -> int | None:
        """Proposals that a round can have; None: any number."""
        if isinstance(self.drafter, ModelRef):
            block = Block.of(load_config(self.drafter))
            return None if block is None else block.size
        return HeadsConfig.read(local_path(self.drafter)).heads if is_heads(self.drafter) else None

    def load(self, settings: ScoreSettings, target_model: Any = None) -> Pair:
        """Load both.

        Args:
            settings: limits of the texts and how sure a draft must be.
            target_model: the target, if it is loaded already.
        """
        model = target_model if target_model is not None else load_model(self.target)
        target, drafter = cached(model), self._drafter(model)
        if drafter is not None:
            drafter.borrow_encoder(target)
        proposing = self._proposing(drafter, settings)
        if isinstance(self.drafter, str) and is_heads(self.drafter):
            heads = ParallelHeads.load(local_path(self.drafter))
            own = HeadsDrafter(target, heads, proposing.vocabulary, proposing.stop_ids)
            proposing = replace(proposing, heads=own)
        decode = self.tokenizer.decode
        return Pair(
            target,
            proposing,
            allowed=self._own_vocabulary().without(banned_ids(model)),
            limits=Limits(
                settings.max_new_tokens,
                stop_ids(model),
                min_new_tokens=settings.min_new_tokens,
                stop_strings=settings.stop,
                decode=decode if settings.stop else None,
                never_first=never_first(model),
            ),
            text=lambda ids: str(decode(list(ids))),
        )

    def _proposing(self, drafter: CachedModel | None, settings: ScoreSettings) -> Proposing:
        return Proposing(
            drafter,
            self.check.shared.without(banned_ids(self.configs)),
            stop_ids(self.configs),
            settings.confidence,
            None if drafter is None else Block.of(drafter.model.config),
            self._one_vocabulary,
        )

    @property
    def _one_vocabulary(self) -> bool:
        family, _ = describe(self.configs.config, self.target)
        return family.one_vocabulary(self.configs.config)

    def _own_vocabulary(self) -> SharedVocabulary:
        """What the target can say."""
        config = self.configs.config
        family, _ = describe(config, self.target)
        return said_vocabulary(self.tokenizer, config, family, self.check.target_rows)

    def load_drafter(self, settings: ScoreSettings) -> Proposing:
        """Load the drafter alone.

        Raises:
            RequestError: it drafts with the target.
        """
        if isinstance(self.drafter, str) and self.drafter != PROMPT_LOOKUP:
            raise RequestError(
                f"{self.drafter}: this drafts with the target, which a replay of traces alone does "
                "not load; leave the traces out"
            )
        model = None if isinstance(self.drafter, str) else cached(load_model(self.drafter))
        return self._proposing(model, settings)

    def prompts(self, settings: ScoreSettings) -> list[Prompt]:
        """The prompts of a score.

        Raises:
            RequestError: a prompt can't be used, or leaves no room for an answer.
        """
        prompts = prompts_for(self.target, self.configs, self.tokenizer, settings)
        if prompts[0].source is not None and isinstance(self.drafter, ModelRef):
            check_lengths(prompts, self.check.drafter_context, "drafter")
        return prompts

    def _drafter(self, target_model: Any) -> CachedModel | None:
        if not isinstance(self.drafter, str):
            return cached(load_model(self.drafter))
        if is_heads(self.drafter):
            return None
        family = family_of(target_model.config.model_type, self.drafter)
        kept = kept_layers(self.drafter, getattr(target_model.config, family.config.layers))
        if not kept:
            return None
        from draftsmith.checkpoints.slicing import layers_of

        return cached(layers_of(target_model, family, kept))


def prompts_for(
    target: ModelRef, configs: Configs, tokenizer: Any, settings: ScoreSettings
) -> list[Prompt]:
    """Prompts as a target reads them: as its own text, or with its encoder.

    Raises:
        RequestError: a prompt can't be used, or leaves no room for an answer.
    """
    family, _ = describe(configs.config, target)
    start = decoder_start(configs) if family.has_encoder else None
    listener = target.folder if family.config.mel_bins else None
    prompts = read_prompts(settings.prompts, tokenizer, settings.limit, start, listener)
    check_lengths(prompts, context_of(configs.config, family))
    return prompts


def is_model(spec: str) -> bool:
    """Whether a drafter's name is that of a model, and not of a way to draft without another."""
    return not (spec == PROMPT_LOOKUP or spec.startswith(SKIP_LAYERS) or is_heads(spec))


def _check_own(spec: str, target: ModelRef) -> None:
    """Refuse what a target can't draft with by itself. Raises as `Request.of`."""
    _, shape = describe(load_config(target), target)
    if not is_heads(spec):
        kept_layers(spec, shape.layers)
        return
    heads = HeadsConfig.read(local_path(spec))
    heads.check(shape, target.spec, spec)
    if heads.target != target.spec:
        say(f"note: the heads were trained on {heads.target}, not on {target.spec}")


def kept_layers(spec: str, layers: int) -> tuple[int, ...]:
    """The layers of the target that a drafter's name asks for; none for prompt lookup.

    Raises:
        RequestError: no ascending numbers of its layers.
    """
    if spec == PROMPT_LOOKUP:
        return ()
    try:
        kept = tuple(map(int, spec.removeprefix(SKIP_LAYERS).split(",")))
    except ValueError:
        kept = ()
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < layers:
        raise RequestError(
            f"{spec}: write the layers that draft as {SKIP_LAYERS}0,1,{layers - 1}, ascending "
            f"numbers from 0 to {layers - 1}"
        )
    return kept


def check_lengths(prompts: Sequence[Prompt], context: int | None, whose: str = "target") -> None:
    """Refuse prompts that fill a model's context, or sources that its encoder can't hold.

    Raises:
        RequestError: naming the longest one.
    """
    # How long a sound may be was checked when it was read.
    texts = [p for p in prompts if not isinstance(p.source, Sound)]
    if not texts:
        return
    longest = max(texts, key=lambda p: len(p.source or p.ids))
    length = len(longest.source or longest.ids)
    # An encoder needs no room for an answer, which stands in the decoder.
    if context is not None and length >= context + (longest.source is not None):
        raise RequestError(
            f"prompt {longest.name}: {length} tokens leave no room in the {whose}'s "
            f"context of {context}; shorten or remove it"
        )
