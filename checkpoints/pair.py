"""Do a target and a drafter belong together? One check, used before any weight is loaded."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def own_vocabulary(tokenizer: Any, model_vocab: int) -> SharedVocabulary:
    """The ids of one model that its tokenizer knows."""
    return _shared(set(_strings(tokenizer)), model_vocab)


def check_pair(
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


def _strings(tokenizer: Any) -> dict[int, str]:
    return {token_id: string for string, token_id in tokenizer.get_vocab().items()}


def _shared(ids: set[int], rows: int) -> SharedVocabulary:
    usable = {i for i in ids if 0 <= i < rows}
    size = max(usable, default=-1) + 1
    return SharedVocabulary(size, tuple(sorted(set(range(size)) - usable)))
