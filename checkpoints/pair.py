"""Do a target and a drafter belong together? One check, used before any weight is loaded."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.loading import describe, load_config, load_tokenizer
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import RequestError

if TYPE_CHECKING:
    # A finished run is recognised without importing torch.
    from torch import Tensor


@dataclass(frozen=True)
class SharedVocabulary:
    """The ids that target and drafter both mean, the same string for each.

    Model vocabularies are padded to round sizes; padding ids have logits but no string, and
    must never be proposed, accepted or emitted (case A1).

    Attributes:
        size: ids 0 … size - 1 may be shared.
        holes: those of them that stand for no string.
    """

    size: int
    holes: tuple[int, ...] = ()

    def restrict(self, logits_V: "Tensor") -> "Tensor":
        """Logits [..., V] -> [..., size], with -inf at the holes."""
        logits = logits_V[..., : self.size]
        if self.holes:
            logits = logits.clone()
            logits[..., list(self.holes)] = -math.inf
        return logits

    def has(self, token: int) -> bool:
        """Whether an id is one of them."""
        return 0 <= token < self.size and token not in self.holes

    def without(self, ids: Iterable[int]) -> "SharedVocabulary":
        """The same but for some ids that must not be said."""
        gone = {i for i in ids if i < self.size}
        return SharedVocabulary(self.size, tuple(sorted(gone.union(self.holes))))


def own_vocabulary(tokenizer: Any, model_vocab: int) -> SharedVocabulary:
    """The ids of one model that its tokenizer knows."""
    return _shared(set(_strings(tokenizer)), model_vocab)


def said_vocabulary(tokenizer: Any, config: Any, family: Family, rows: int) -> SharedVocabulary:
    """The ids that a model may say; its tokenizer may not know all of them."""
    if family.says_unnamed(config):
        return SharedVocabulary(rows)
    return own_vocabulary(tokenizer, rows)


@dataclass(frozen=True)
class PairCheck:
    """What a target and a drafter have in common.

    Attributes:
        target: as the user named it.
        drafter: likewise.
        shared: ids that can be drafted.
        target_rows: rows of the target's head, padding included.
        drafter_rows: those of the drafter's.
        target_context: positions that the target can tell apart; None: any number.
        drafter_context: those of the drafter.
        notes: what is worth knowing though the pair can draft.
    """

    target: str
    drafter: str
    shared: SharedVocabulary
    target_rows: int
    drafter_rows: int
    target_context: int | None
    drafter_context: int | None
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens that can be drafted."""
        return self.shared.size - len(self.shared.holes)

    @property
    def verdict(self) -> str:
        """One sentence."""
        kept = f"{self.tokens} of the target's tokens can be drafted"
        return f"{self.drafter} can draft for {self.target}: {kept}"


def check_pair(target: ModelRef, drafter: ModelRef) -> PairCheck:
    """Whether a drafter can draft for a target, from their configs and tokenizers alone.

    Any two models with the same kind of input and the same tokenizer are a pair: a drafter cut
    from another member of the family, or reused for a newer or fine-tuned target.

    Raises:
        RequestError: they can't, and why: the first reason found.
    """
    target_config, drafter_config = load_config(target), load_config(drafter)
    target_family, target_shape = describe(target_config, target)
    drafter_family, drafter_shape = describe(drafter_config, drafter)
    _check_inputs(target, target_family, target_config, drafter, drafter_family, drafter_config)
    token_map = TokenMap.read(drafter.folder, drafter_shape.vocab)
    drafter_rows = token_map.target_vocab if token_map else drafter_shape.vocab
    shared = shared_vocabulary(
        load_checked_tokenizer(target, target_config, target_family, target_shape.vocab),
        load_checked_tokenizer(drafter, drafter_config, drafter_family, drafter_rows),
        tokenizer_rows(target_config, target_family, target_shape.vocab),
        tokenizer_rows(drafter_config, drafter_family, drafter_rows),
    )
    if target_family.says_unnamed(target_config):
        # The tokenizers agree on what they name; what is written has ids beyond that.
        block = Block.of(drafter_config)
        # A mask behind all tokens is not written.
        own = drafter_rows - (block is not None and block.mask_id == drafter_rows - 1)
        _check_written(target, target_shape.vocab, drafter, own)
        shared = SharedVocabulary(target_shape.vocab)
    if token_map is not None:
        shared = _shared(set(token_map.target_ids) - set(shared.holes), shared.size)
    contexts = (
        context_of(target_config, target_family),
        context_of(drafter_config, drafter_family),
    )
    return PairCheck(
        target.spec,
        drafter.spec,
        shared,
        target_shape.vocab,
        drafter_shape.vocab,
        *contexts,
        notes=tuple(_notes(*contexts, target_shape.vocab, drafter_shape.vocab, token_map)),
    )


def tokenizer_rows(config: Any, family: Family, rows: int) -> int:
    """Rows of the embedding that a tokenizer's ids index: the encoder's where it has its own."""
    return rows if family.one_vocabulary(config) else int(config.vocab_size)


def load_checked_tokenizer(ref: ModelRef, config: Any, family: Family, rows: int) -> Any:
    """The tokenizer of a model that has a row for each of its ids.

    Raises:
        RequestError: naming the first id without a row.
    """
    tokenizer = load_tokenizer(ref)
    check_tokenizer_rows(tokenizer, tokenizer_rows(config, family, rows), ref.spec)
    return tokenizer


def context_of(config: Any, family: Family) -> int | None:
    """Positions that a model can tell apart; None: any number."""
    key = family.config.context
    if key is None:
        return None
    positions = getattr(config, key, None)
    if not isinstance(positions, int) or positions < 1:
        raise RequestError(f"config: {key} is {positions!r}, but a model needs positions")
    return positions


def _check_inputs(
    target: ModelRef,
    target_family: Family,
    target_config: Any,
    drafter: ModelRef,
    drafter_family: Family,
    drafter_config: Any,
) -> None:
    """Refuse models of different kinds, or that hear sound differently."""
    if target_family.auto != drafter_family.auto:
        raise RequestError(
            f"{target.spec} ({target_family.name}) and {drafter.spec} ({drafter_family.name}) "
            "read different inputs; a drafter must read what its target reads"
        )
    if target_family.one_vocabulary(target_config) != drafter_family.one_vocabulary(drafter_config):
        raise RequestError(
            f"of {target.spec} and {drafter.spec}, one writes the tokens that it reads and the "
            "other has a vocabulary for each; cut the drafter from the target or a sibling"
        )
    bins = target_family.config.mel_bins
    if bins and getattr(target_config, bins) != getattr(drafter_config, bins):
        raise RequestError(
            f"{bins}: {target.spec} hears {getattr(target_config, bins)} bands, {drafter.spec} "
            f"{getattr(drafter_config, bins)}; cut the drafter from the target or a sibling that "
            "hears alike"
        )


def _check_written(target: ModelRef, rows: int, drafter: ModelRef, drafter_rows: int) -> None:
    """Refuse vocabularies of what is written that can't be the same."""
    if rows != drafter_rows:
        raise RequestError(
            f"{target.spec} writes in a vocabulary of its own with {rows} tokens, {drafter.spec} "
            f"in one of {drafter_rows}; cut the drafter from the target or a sibling that writes "
            "the same"
        )


def _notes(
    target_context: int | None,
    drafter_context: int | None,
    target_rows: int,
    drafter_rows: int,
    token_map: TokenMap | None,
) -> Iterator[str]:
    unbounded = float("inf")
    if (drafter_context or unbounded) < (target_context or unbounded):
        yield (
            f"the drafter knows {drafter_context} positions, the target {target_context or 'any'}: "
            "past them the target decodes alone, and runtimes that need equal contexts refuse the "
            f"pair or must be started with a context of {drafter_context}"
        )
    if token_map is not None:
        yield (
            f"the drafter has {drafter_rows} of the target's {token_map.target_vocab} tokens and a "
            "map to them: for draftsmith alone; `export` expands it for other runtimes"
        )
    elif target_rows != drafter_rows:
        yield (
            f"the target's head is padded to {target_rows} rows, the drafter's to {drafter_rows}: "
            "padding is never drafted, but runtimes that compare sizes refuse the pair"
        )


def shared_vocabulary(
    target_tokenizer: Any, drafter_tokenizer: Any, target_vocab: int, drafter_vocab: int
) -> SharedVocabulary:
    """Compare tokenizers (not padded sizes) and return what can be drafted.

    Args:
        target_tokenizer: the target's.
        drafter_tokenizer: the drafter's.
        target_vocab: rows of the target's head.
        drafter_vocab: rows of the drafter's head.

    Raises:
        RequestError: an id means different strings; the first one is named (case A2).
    """
    target, drafter = _strings(target_tokenizer), _strings(drafter_tokenizer)
    for token_id in sorted(target.keys() & drafter.keys()):
        if target[token_id] != drafter[token_id]:
            raise RequestError(
                f"target and drafter have different tokenizers: id {token_id} is "
                f"{target[token_id]!r} for the target and {drafter[token_id]!r} for the drafter; "
                "a drafter must come from the target's own family and tokenizer"
            )
    shared = _shared(target.keys() & drafter.keys(), min(target_vocab, drafter_vocab))
    if not shared.size:
        raise RequestError("target and drafter share no token")
    return shared


def check_tokenizer_rows(tokenizer: Any, vocab: int, place: str) -> None:
    """Refuse a tokenizer that knows ids for which the model has no row (case A32).

    Raises:
        RequestError: naming the first such id.
    """
    strings = {i: s for s, i in tokenizer.get_vocab().items()}
    if extra := sorted(i for i in strings if i >= vocab):
        raise RequestError(
            f"{place}: the tokenizer has {len(strings)} tokens, but the model only {vocab} rows; "
            f"id {extra[0]} ({strings[extra[0]]!r}) has none: use the target's own tokenizer files"
        )


def _strings(tokenizer: Any) -> dict[int, str]:
    return {token_id: string for string, token_id in tokenizer.get_vocab().items()}


def _shared(ids: set[int], rows: int) -> SharedVocabulary:
    usable = {i for i in ids if 0 <= i < rows}
    size = max(usable, default=-1) + 1
    return SharedVocabulary(size, tuple(sorted(set(range(size)) - usable)))
