"""Published masks applied to the model that they were learned on."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.loading import describe, load_config, load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.slicing import Selection
from draftsmith.checkpoints.streaming import compact_checkpoint
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import DraftsmithError, RequestError


@dataclass(frozen=True)
class Masks:
    """A published choice.

    Attributes:
        selection: what is kept.
        source: the shape that it was made for.
        family: the family that it was made for; None: not stated.
        method: how it was chosen.
    """

    selection: Selection
    source: Shape
    family: str | None
    method: str | None


def read_masks(path: Path) -> Masks:
    """Read a `masks.json`.

    Raises:
        RequestError: it is not there, not such a file, or contradicts itself.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        masks = Masks(
            Selection.from_plain(plain["selection"]),
            TypeAdapter(Shape).validate_json(json.dumps(plain["source_shape"]), strict=True),
            plain.get("family"),
            plain.get("method"),
        )
        masks.selection.shape(masks.source)
    except FileNotFoundError:
        raise RequestError(f"{path}: there is no such file") from None
    except DraftsmithError as error:
        raise RequestError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()[:24])
        raise RequestError(f"{path}: not a masks file ({reason}); give a masks.json") from None
    return masks


def compact_from_file(source: ModelRef, path: Path, folder: Path) -> None:
    """Cut the compact model of a masks file out of `source` and save it in `folder`.

    The source is read tensor by tensor, so it may be larger than memory.

    Raises:
        RequestError: the masks are those of another model.
    """
    masks = read_masks(path)
    family, shape = describe(load_config(source), source)
    if shape != masks.source or masks.family not in (None, family.name):
        raise RequestError(
            f"{path}: made for {masks.family or 'a model'} of {masks.source}, but {source.spec} is "
            f"{family.name} of {shape}"
        )
    token_map = _token_map(source, shape, masks.selection)
    save_model(compact_checkpoint(source, masks.selection), source, folder, token_map)


def _token_map(source: ModelRef, shape: Shape, selection: Selection) -> TokenMap | None:
    """The map of the result: that of a source which was cut before, shortened; or a first one."""
    before = TokenMap.read(source.folder, shape.vocab)
    if before is not None:
        return before.after(selection.vocab)
    if selection.vocab is None:
        return None
    return TokenMap.of(selection.vocab, shape.vocab, load_tokenizer(source))
