"""All handling of transformers' key/value caches; their interface changed between 5.17 and 5.24."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class CachedModel:
    """A causal model together with the keys and values of the texts it has seen.

    Rows of a batch are texts of any length. Their slots end together: before new tokens are fed,
    rows that were shortened are moved to the right, so that slots count positions between one
    another, as attention windows do, and positions are given explicitly.
    """

    def __init__(self, model: Any) -> None:
        """Wrap `model`; the cache starts empty, for one text."""
        self.model = model
        self.device = model.device
        parameters = inspect.signature(type(model).forward).parameters
        # `cache` from 5.24 on, `past_key_values` before.
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        self.reset()

    def reset(self, rows: int = 1) -> None:
        """Forget everything, and start with so many empty texts."""
        from transformers import DynamicCache

        # Without the config every layer keeps all of its keys, sliding windows too (the mask still
        # hides them): a windowed layer forgets what a rejected draft makes us go back to, and
        # transformers 5.17 builds its mask for fewer keys than it returns while it records.
        self._cache = DynamicCache()
        # Of each row: the slot of its first token, and its tokens.
        self._starts = [0] * rows
        self.lengths = [0] * rows

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

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
        """Run new tokens of rows that are padded to one length, and remember them.

        Args:
            ids_BT: the new tokens.
            keep: return the logits of the last `keep` positions only; 0 returns all.
            mask_BS: 1 for real slots, 0 for padding, over the old and new slots.
            positions_BT: positions of the new tokens, where padding shifts them.

        Returns:
            Logits [B, keep or T, V].
        """
        rows, width = ids_BT.shape
        if len(self.lengths) != rows and not self.length:
            self._starts, self.lengths = [0] * rows, [0] * rows
        logits = self._forward(ids_BT, keep, mask_BS, positions_BT)
        self.lengths = [length + width for length in self.lengths]
        return logits

    def feed_list(self, ids: Sequence[int], *, keep: int = 0) -> Tensor:
        """`feed` for a single row given as a list; logits [keep or T, V]."""
        return self.feed(torch.tensor([list(ids)], device=self.device), keep=keep)[0]

    def feed_rows(self, texts: Sequence[Sequence[int]], *, keep: int = 0) -> list[Tensor]:
        """Run new tokens of every row, any number of each, and remember them.

        Args:
            texts: new tokens of each row; none for a row that waits.
            keep: return the logits of each row's last `keep` tokens only; 0 returns all.

        Returns:
            Of each row, logits [keep or its number of tokens, V].
        """
        self._align()
        if len(texts) == 1:
            return [self.feed_list(texts[0], keep=keep)] if texts[0] else [torch.empty(0)]
        counts = list(map(len, texts))
        width = max(counts)
        wanted = [range(n)[-keep:] if keep else range(n) for n in counts]
        places = sorted({place for own in wanted for place in own})
        ids_BT = torch.zeros((len(texts), width), dtype=torch.long)
        for row, text in enumerate(texts):
            ids_BT[row, : len(text)] = torch.tensor(list(text), dtype=torch.long)
        mask_BS, positions_BT = self._mask(width)
        logits_BPV = self._forward(
            ids_BT.to(self.device), torch.tensor(places, device=self.device), mask_BS, positions_BT
        )
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]
        return [
            logits_BPV[row, [places.index(place) for place in own]]
            for row, own in enumerate(wanted)
        ]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row."""
        self.truncate([min(length, own) for own in self.lengths])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each row, so many of each."""
        self.lengths = list(lengths)
        ends = [start + n for start, n in zip(self._starts, self.lengths, strict=True)]
        # Slots that only rejected tokens used.
        surplus = int(self._cache.get_seq_length()) - max(ends)
        if surplus > 0:
            self._cache.crop(-surplus)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows of the batch, in the given order."""
        if self.length:
            self._cache.batch_select_indices(torch.tensor(list(rows), device=self.device))
        self._starts = [self._starts[row] for row in rows]
        self.truncate([self.lengths[row] for row in rows])

    def _forward(
        self,
        ids_BT: Tensor,
        keep: int | Tensor,
        mask_BS: Tensor | None,
        positions_BT: Tensor | None,
    ) -> Tensor:
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

    def _mask(self, width: int) -> tuple[Tensor | None, Tensor | None]:
        """Mask over old and new slots, and positions of the new; None where rows start together.

        Padding after a row's new tokens needs no mask: no token looks ahead.
        """
        if not any(self._starts):
            return None, None
        slots = torch.arange(int(self._cache.get_seq_length()) + width)
        mask = (slots >= torch.tensor(self._starts)[:, None]).long()
        positions = torch.tensor(self.lengths)[:, None] + torch.arange(width)
        return mask.to(self.device), positions.to(self.device)

    def _align(self) -> None:
        """Move rows to the right, so that all end in the last slot, and drop slots none needs."""
        ends = [start + n for start, n in zip(self._starts, self.lengths, strict=True)]
        width = self.length
        if not width or (len(set(ends)) == 1 and ends[0] == width):
            return
        shifts = torch.tensor(ends) - width
        index = (torch.arange(width) + shifts[:, None]).clamp_min(0).to(self.device)
        for layer in self._cache.layers:
            layer.keys = _gathered(layer.keys, index)
            layer.values = _gathered(layer.values, index)
        self._starts = [width - n for n in self.lengths]


def _gathered(states_BHSD: Tensor, index_BW: Tensor) -> Tensor:
    """Slots of each row in another order, [B, H, W, D]."""
    rows = torch.arange(len(index_BW), device=index_BW.device)[:, None]
    return states_BHSD.transpose(1, 2)[rows, index_BW].transpose(1, 2).contiguous()


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
