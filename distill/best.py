"""The best weights of a training run, by what it is for: predicted speedup."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.files import storage, write_file
from draftsmith.distill.engine import Engine

FIGURE = "predicted_speedup"


class Best:
    """Keeps the weights of the best evaluation so far, and says when no better one comes.

    Args:
        folder: where they are kept; all ranks see the same.
        patience: evaluations without a better one before training ends; 0: the last weights count.
    """

    def __init__(self, folder: Path, patience: int) -> None:
        """Nothing is kept yet."""
        self._path, self._patience = folder / "best.pt", patience

    def keep(self, curve: Sequence[dict[str, float]], engine: Engine, model: Any) -> None:
        """Keep the model's weights if the last evaluation of `curve` is the best; all ranks call.

        `curve` decides alone, so a resumed run keeps what an uninterrupted one would.
        """
        if not self._patience or self._since(curve):
            return
        state = engine.full_state(model)
        if engine.ranks.is_main:
            with storage(self._path):
                # The first evaluation may come before the first save.
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_file(self._path, lambda partial: torch.save(state, partial))
        engine.ranks.barrier()

    def is_over(self, curve: Sequence[dict[str, float]]) -> bool:
        """Whether as many evaluations as `patience` brought nothing better."""
        return self._patience > 0 and self._since(curve) >= self._patience

    def restore(self, model: Any) -> None:
        """Give a whole model the best weights, if any were kept."""
        if not self._patience or not self._path.is_file():
            return
        # Tied names share a tensor in the file as in the model.
        model.load_state_dict(torch.load(self._path, map_location="cpu", weights_only=True))

    @staticmethod
    def _since(curve: Sequence[dict[str, float]]) -> int:
        """Evaluations since the best one; the first of equals is the best.

        Where none could be made, since no row was held out, the last is as good as any.
        """
        figures = [row[FIGURE] for row in curve if FIGURE in row]
        return len(figures) - 1 - figures.index(max(figures)) if figures else 0
