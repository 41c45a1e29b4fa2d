"""A drafter with a cut vocabulary speaks the target's ids through a map.

A smaller head is quicker, and rare tokens are seldom drafted anyway. The drafter's rows are the
kept tokens; from outside it takes and gives the target's ids, so decoding and scoring need not
know of it. Runtimes that know nothing of the map can't use such a drafter.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.generation import renumber_tokens
from draftsmith.data.files import write_json
from draftsmith.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

FILE = "token_map.json"


@dataclass(frozen=True)
class TokenMap:
    """Which of the target's tokens a drafter has.

    Attributes:
        target_vocab: rows of the target's head.
        target_ids: the target's id of each row, ascending.
        fallback: the row that stands for a token which was cut, where the text holds one.
    """

    target_vocab: int
    target_ids: tuple[int, ...]
    fallback: int

    @classmethod
    def of(cls, kept: tuple[int, ...], target_vocab: int, tokenizer: Any) -> "TokenMap":
        """The map of the kept tokens; a cut token is read as the unknown one, if that was kept."""
        unknown = tokenizer.unk_token_id
        return cls(target_vocab, kept, kept.index(unknown) if unknown in kept else 0)

    def save(self, folder: Path) -> None:
        """Write it beside the weights."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path, rows: int) -> "TokenMap | None":
        """The map of a checkpoint; None if it has none.

        Args:
            folder: of the checkpoint.
            rows: of its head.

        Raises:
            RequestError: the file is damaged, or does not fit the head.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            found = cls(**_checked(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise RequestError(f"{path}: damaged ({error!r}); get the checkpoint again") from None
        if len(found.target_ids) != rows:
            raise RequestError(
                f"{path}: maps {len(found.target_ids)} tokens, but the head has {rows} rows; "
                "get the checkpoint again"
            )
        return found

    def after(self, kept: tuple[int, ...] | None) -> "TokenMap":
        """The map of what is left when a drafter that has this map is cut once more."""
        if kept is None:
            return self
        fallback = kept.index(self.fallback) if self.fallback in kept else 0
        return TokenMap(self.target_vocab, tuple(self.target_ids[i] for i in kept), fallback)

    def rows(self) -> "Tensor":
        """The row as which each of the target's ids is read, [V]."""
        import torch

        rows = torch.full((self.target_vocab,), self.fallback)
        rows[list(self.target_ids)] = torch.arange(len(self.target_ids))
        return rows

    def attach(self, model: Any, family: Family) -> None:
        """Let a loaded model take and give the target's ids, its special ids included.

        Args:
            model: is changed; it can't be saved or cut any more.
            family: its table, which names the embeddings of the cut vocabulary.
        """
        import torch

        rows = self.rows().to(model.device)
        columns = torch.tensor(self.target_ids, device=model.device)

        def to_rows(module: Any, args: Any) -> Any:
            return (rows[args[0]], *args[1:])

        def to_ids(module: Any, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (widened(output[0]), *output[1:])
            output["logits"] = widened(output.logits)
            return output

        def widened(logits: Any) -> Any:
            wide = logits.new_full((*logits.shape[:-1], self.target_vocab), -math.inf)
            wide[..., columns] = logits
            return wide

        for embedding in _embeddings(model, family):
            embedding.register_forward_pre_hook(to_rows)
        model.register_forward_hook(to_ids)
        for config in (model.config, model.generation_config):
            if config is not None:
                renumber_tokens(config, dict(enumerate(self.target_ids)))


def cut_tensors(model: Any, family: Family) -> dict[str, int]:
    """Names of the tensors that have the vocabulary which can be cut -> in which dimension.

    A tensor is there under all names that the model has for it.
    """
    cut = {"vocab", "source_vocab"} if family.one_vocabulary(model.config) else {"vocab"}
    state, axes = model.state_dict(keep_vars=True), {}
    for name, tensor in state.items():
        for axis, dimension in enumerate(family.tensors.get(name, ())):
            if dimension in cut:
                axes[id(tensor)] = axis
    return {name: axes[id(tensor)] for name, tensor in state.items() if id(tensor) in axes}


def _embeddings(model: Any, family: Family) -> list[Any]:
    """The embeddings whose rows are the vocabulary that can be cut."""
    from torch import nn

    owners = {name.rpartition(".")[0] for name in cut_tensors(model, family)}
    modules = {id(m): m for m in map(model.get_submodule, sorted(owners))}
    return [m for m in modules.values() if isinstance(m, nn.Embedding)]


def _checked(plain: Mapping[str, Any]) -> dict[str, Any]:
    ids = tuple(map(int, plain["target_ids"]))
    vocab, fallback = int(plain["target_vocab"]), int(plain["fallback"])
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= vocab:
        raise ValueError("target_ids are not ascending ids of the target")
    if not 0 <= fallback < len(ids):
        raise ValueError(f"fallback {fallback} is no row")
    return {"target_vocab": vocab, "target_ids": ids, "fallback": fallback}
