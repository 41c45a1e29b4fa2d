"""Published masks applied to the model that they were learned on."""

import json
from pathlib import Path

from draftsmith.checkpoints.loading import ModelRef, describe, load_model
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.errors import RequestError


def read_masks(path: Path) -> Selection:
    """The selection of a `masks.json`.

    Raises:
        RequestError: it is not there, or not such a file.
    """
    try:
        return Selection.from_plain(json.loads(path.read_text(encoding="utf-8"))["selection"])
    except FileNotFoundError:
        raise RequestError(f"{path}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: not a masks file ({error!r}); give a masks.json") from None


def compact_from_file(source: ModelRef, masks: Path, folder: Path) -> None:
    """Cut the compact model of a masks file out of `source` and save it in `folder`.

    Raises:
        RequestError: the masks are those of a larger model.
    """
    selection = read_masks(masks)
    model = load_model(source)
    family, shape = describe(model.config, source)
    beyond = max(selection.layers, default=0) >= shape.layers
    if beyond or max(selection.hidden, default=0) >= shape.hidden:
        raise RequestError(f"{masks}: made for another model than {source.spec} ({shape})")
    save_model(compact_model(model, family, selection), source, folder)
