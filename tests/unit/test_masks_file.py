"""Masks files: what is published, and what is refused before anything is cut."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection
from draftsmith.errors import RequestError
from draftsmith.prune.compact import compact_from_file, read_masks
from tests.conftest import make_model


@pytest.fixture
def plain(tiny: Any) -> dict[str, Any]:
    """A whole masks file."""
    shape = shape_of(tiny.config, families()["llama"])
    selection = Selection.of_layers(shape, (0, 2))
    return {"selection": selection.to_plain(), "source_shape": vars(shape), "family": "llama"}


def written(plain: Any, tmp_path: Path) -> Path:
    path = tmp_path / "masks.json"
    path.write_text(plain if isinstance(plain, str) else json.dumps(plain))
    return path


def test_it_is_read_as_it_was_written(plain: dict[str, Any], tmp_path: Path) -> None:
    masks = read_masks(written(plain, tmp_path))
    assert masks.selection.layers == (0, 2)
    assert (masks.source.layers, masks.family, masks.method) == (4, "llama", None)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"selection": []}'])
def test_what_is_no_masks_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"masks\.json: not a masks file"):
        read_masks(written(text, tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", ["0", "2"]),
        ("layers", 3),
        ("layers", [0.0, 2.0]),
        ("layers", [True, False]),
        ("layers", [0, 2, 3]),
        ("layers", [2, 0]),
        ("layers", [0, 9]),
        ("hidden", [[0, 1]]),
        ("kv_heads", [0, 1]),
        ("kv_heads", [[0, 1]]),
        ("heads_per_group", [[[0, 1]], [[0, 1]]]),
        ("ffn", [[0, 1]]),
        ("ffn", [[0, 1], []]),
        ("encoder_layers", [0]),
        ("surprise", [0]),
    ],
    ids=str,
)
def test_wrong_indices_are_one_error(
    key: str, value: Any, plain: dict[str, Any], tmp_path: Path
) -> None:
    plain["selection"] |= {key: value}
    with pytest.raises(RequestError, match=r"masks\.json: ") as raised:
        read_masks(written(plain, tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["4", 4.5, None, True])
def test_wrong_source_shapes_are_one_error(
    value: Any, plain: dict[str, Any], tmp_path: Path
) -> None:
    plain["source_shape"] = plain["source_shape"] | {"layers": value}
    with pytest.raises(RequestError, match="not a masks file"):
        read_masks(written(plain, tmp_path))


def test_masks_of_another_family_are_refused(
    plain: dict[str, Any], tmp_path: Path, save: Callable[..., Path]
) -> None:
    """Equal counts don't make the same model."""
    source = resolve(str(save(make_model("mistral"))))
    with pytest.raises(RequestError, match=r"made for llama of 4 layers.* is mistral of 4 layers"):
        compact_from_file(source, written(plain, tmp_path), tmp_path / "out")
