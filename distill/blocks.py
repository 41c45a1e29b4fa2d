"""What a drafter of blocks learns from: masks after random beginnings of the target's texts.

Xia et al. 2022, section 3.2: of each text a beginning of random length is given, a block of masks
follows, and each mask learns the token of its own place. Glancing (Qian et al. 2021) shows the
drafter some of the tokens that it would get wrong, fewer as it learns, so that it need not guess
all of a block at once from nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.checkpoints.blocks import Block
from draftsmith.distill.batches import Batch
from draftsmith.recipes.schema import BlockSettings

# Tells these draws from others of the same seed.
_BLOCKS = 11


@dataclass(frozen=True)
class Blocks:
    """Turns batches of texts into batches of masked blocks.

    Attributes:
        propose: the drafter's likeliest ids at a batch's positions, [A].
        block: of the drafter.
        settings: the recipe's `distill.block`.
        seed: of all that is drawn.
    """

    propose: Callable[[Batch], Tensor]
    block: Block
    settings: BlockSettings
    seed: int

    def of(self, batch: Batch, number: int, progress: float) -> Batch:
        """The blocks that a batch teaches.

        Args:
            batch: B texts.
            number: of the batch since the start of training.
            progress: share of the training that is done, 0 … 1.
        """
        rng = np.random.default_rng((self.seed, number, _BLOCKS))
        first, last = self.settings.glancing, self.settings.glancing_end
        return self.glance(self.mask(batch, rng), first + (last - first) * progress, rng)

    def mask(self, batch: Batch, rng: np.random.Generator) -> Batch:
        """Random beginnings, with masks for what follows: [B · prefixes, T'].

        A position's state gives the token of its own place, not of the next. Sources stay [B, S]:
        the beginnings of one text stand side by side.
        """
        width = batch.ids.shape[1]
        rows_A, columns_A = np.divmod(batch.positions.cpu().numpy(), width)
        chosen: list[NDArray[np.int64]] = []
        for row in range(len(batch.ids)):
            own = np.flatnonzero(rows_A == row)
            starts = rng.integers(len(own), size=self.settings.prefixes)
            chosen += [own[start : start + self.block.size] for start in starts]
        lengths = np.array([columns_A[places[0]] + 1 for places in chosen])
        ids, mask = self._rows(batch, torch.from_numpy(lengths))
        index = torch.from_numpy(np.concatenate(chosen)).to(batch.ids.device)
        positions = np.concatenate(
            [
                row * ids.shape[1] + length + np.arange(len(places))
                for row, (length, places) in enumerate(zip(lengths, chosen, strict=True))
            ]
        )
        return replace(
            batch,
            ids=ids,
            mask=mask,
            positions=torch.from_numpy(positions).to(index.device),
            labels=batch.labels[index],
            traces=batch.traces[index],
            weights=None if batch.weights is None else batch.weights[index],
        )

    def glance(self, batch: Batch, share: float, rng: np.random.Generator) -> Batch:
        """Show some of the tokens that the drafter gets wrong; no loss is taken there.

        Args:
            batch: masked blocks.
            share: of a block's mistakes; as many of its masks, drawn among all, are revealed.
            rng: of the draw.
        """
        if not share:
            return batch
        wrong_A = (self.propose(batch) != batch.labels).cpu().numpy()
        rows_A = (batch.positions // batch.ids.shape[1]).cpu().numpy()
        hidden_A = np.ones(len(rows_A), bool)
        for row in np.unique(rows_A):
            own = np.flatnonzero(rows_A == row)
            shown = round(share * int(wrong_A[own].sum()))
            hidden_A[rng.choice(own, shown, replace=False)] = False
        hidden = torch.from_numpy(hidden_A).to(batch.ids.device)
        ids = batch.ids.flatten().clone()
        ids[batch.positions[~hidden]] = batch.labels[~hidden]
        return replace(
            batch,
            ids=ids.view_as(batch.ids),
            positions=batch.positions[hidden],
            labels=batch.labels[hidden],
            traces=batch.traces[hidden],
            weights=None if batch.weights is None else batch.weights[hidden],
        )

    def _rows(self, batch: Batch, lengths_R: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [R, T'] of beginnings with masks after them, and what each token sees [R, 1, T', T'].

        Beginnings are read causally; the masks of a block see it whole, and all before it.
        """
        size, device = self.block.size, batch.ids.device
        lengths_R1 = lengths_R.to(device)[:, None]
        texts_RT = batch.ids.repeat_interleave(self.settings.prefixes, 0)
        columns = torch.arange(int(lengths_R.max()) + size, device=device)
        room = torch.zeros(len(texts_RT), size, dtype=torch.long, device=device)
        longer_RT = torch.cat([texts_RT, room], 1)[:, : len(columns)]
        ends_R1 = lengths_R1 + size
        masked_RT = (columns >= lengths_R1) & (columns < ends_R1)
        ids_RT = longer_RT.where(columns < lengths_R1, 0).masked_fill(masked_RT, self.block.mask_id)
        before = columns <= columns[:, None]
        sees_RTT = torch.where(masked_RT[:, :, None], (columns < ends_R1)[:, None], before)
        return ids_RT, sees_RTT[:, None]
