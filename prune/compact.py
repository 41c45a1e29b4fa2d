"""Published masks applied to the model that they were learned on."""

import json
from pathlib import Path

from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.loading import describe, load_config, load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.slicing import Selection
from draftsmith.checkpoints.streaming import compact_checkpoint
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import RequestError


def read_masks(path: Path) -> tuple[Selection, Shape]:
    """The selection of a `masks.json`, and the shape of the model that it was made for.

    Raises:
        RequestError: it is not there, or not such a file.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return Selection.from_plain(plain["selection"]), Shape(**plain["source_shape"])
    except FileNotFoundError:
        raise RequestError(f"{path}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: not a masks file ({error!r}); give a masks.json") from None


def compact_from_file(source: ModelRef, masks: Path, folder: Path) -> None:
    """Cut the compact model of a masks file out of `source` and save it in `folder`.

    The source is read tensor by tensor, so it may be larger than memory.

    Raises:
        RequestError: the masks are those of another model.
    """
    selection, made_for = read_masks(masks)
    _, shape = describe(load_config(source), source)
    if shape != made_for:
        raise RequestError(f"{masks}: made for {made_for}, but {source.spec} has {shape}")
    token_map = None
    if selection.vocab is not None:
        token_map = TokenMap.of(selection.vocab, shape.vocab, load_tokenizer(source))
    save_model(compact_checkpoint(source, selection), source, folder, token_map)
