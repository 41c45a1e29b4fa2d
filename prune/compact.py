"""Published masks applied to the model that they were learned on."""

import json
from pathlib import Path

from draftsmith.checkpoints.loading import ModelRef, describe, load_config, load_model
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.slicing import Selection, compact_model
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

    Raises:
        RequestError: the masks are those of another model.
    """
    selection, made_for = read_masks(masks)
    family, shape = describe(load_config(source), source)
    if shape != made_for:
        raise RequestError(f"{masks}: made for {made_for}, but {source.spec} has {shape}")
    save_model(compact_model(load_model(source), family, selection), source, folder)
