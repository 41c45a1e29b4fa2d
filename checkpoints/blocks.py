"""Checkpoints of drafters that propose a whole block in one pass (Xia et al. 2022).

Such a drafter is an ordinary model of its family: `block_drafting` in its config says how many
masks follow a text and which id they have. It is saved with a modelling file of its own, so that
`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)` gives a model with `propose()`.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.files import write_text
from draftsmith.errors import RequestError

# Of the modelling file beside the weights.
MODULE = "modeling_block_drafter"
_CLASS = "BlockDrafter"


@dataclass(frozen=True)
class Block:
    """How a drafter that proposes blocks was trained.

    Attributes:
        size: masks in a block.
        mask_id: their id.
    """

    size: int
    mask_id: int

    @classmethod
    def of(cls, config: Any) -> "Block | None":
        """From the key `block_drafting` of a drafter's config; None: it drafts token by token.

        Raises:
            RequestError: the key holds something else.
        """
        found = getattr(config, "block_drafting", None)
        if found is None:
            return None
        try:
            block = cls(**found)
        except TypeError:
            block = cls(0, 0)
        if not (isinstance(block.size, int) and block.size > 0 and isinstance(block.mask_id, int)):
            raise RequestError(
                f"config.json: block_drafting is {found!r}; it holds size, the masks in a block, "
                "and mask_id, their id"
            )
        return block


def describe_block_drafting(model: Any, folder: Path) -> None:
    """Write the modelling file of a drafter of blocks, and name it in the model's config."""
    from draftsmith.checkpoints import modeling_block_drafter

    base = type(model).__name__
    own = f"class {_CLASS}(BlockDrafting, transformers.{base}):\n"
    about = f'    """A {base} that proposes blocks."""\n'
    source = inspect.getsource(modeling_block_drafter)
    write_text(folder / f"{MODULE}.py", f"{source}\n\n{own}{about}")
    model.config.auto_map = {"AutoModel": f"{MODULE}.{_CLASS}"}
