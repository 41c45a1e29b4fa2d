"""All handling of transformers' key/value caches; their interface changed between 5.17 and 5.24."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class CachedModel:
    """A causal model together with the keys and values of the tokens it has seen.

    Rows of a batch have the same number of cache slots; ragged prompts are padded on the left.
    """

    def __init__(self, model: Any) -> None:
        """Wrap `model`; the cache starts empty."""
        self.model = model
        self.device = model.device
        parameters = inspect.signature(type(model).forward).parameters
        # `cache` from 5.24 on, `past_key_values` before.
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        from transformers import DynamicCache

        # Without the config every layer keeps all of its keys, sliding windows too (the mask still
        # hides them): a windowed layer forgets what a rejected draft makes us go back to, and
        # transformers 5.17 builds its mask for fewer keys than it returns while it records.
        self._cache = DynamicCache()

    @property
    def length(self) -> int:
        """Cache slots in use."""
        return int(self._cache.get_seq_length())

    @property
    def context(self) -> int:
        """Positions that the model can tell apart."""
        return int(self.model.config.max_position_embeddings)

    def feed(
        self,
        ids_BT: Tensor,
        *,
        keep: int = 0,
        mask_BS: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Run new tokens and remember them.

        Args:
            ids_BT: the new tokens.
            keep: return the logits of the last `keep` positions only; 0 returns all.
            mask_BS: 1 for real slots, 0 for padding, over the old and new slots.
            positions_BT: positions of the new tokens, where padding shifts them.

        Returns:
            Logits [B, keep or T, V].
        """
        extra: dict[str, Any] = {}
        if mask_BS is not None:
            extra = {"attention_mask": mask_BS, "position_ids": positions_BT}
        output = self.model(
            input_ids=ids_BT,
            use_cache=True,
            logits_to_keep=keep,
            **{self._argument: self._cache},
            **extra,
        )
        logits: Tensor = output.logits
        return logits

    def feed_list(self, ids: Sequence[int], *, keep: int = 0) -> Tensor:
        """`feed` for a single row given as a list; logits [keep or T, V]."""
        return self.feed(torch.tensor([list(ids)], device=self.device), keep=keep)[0]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        surplus = self.length - length
        if surplus > 0:
            self._cache.crop(-surplus)

    def select(self, rows: Tensor) -> None:
        """Keep only some rows of the batch, in the given order."""
        self._cache.batch_select_indices(rows)


def padded_inputs(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad ragged prompts on the left.

    Returns:
        ids, attention mask and positions, all [B, T].
    """
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(list(row))
        mask[i, width - len(row) :] = 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)
