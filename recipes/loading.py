"""Strict loading of recipes: YAML 1.2 in, a frozen `Recipe` or one clear `RequestError` out."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from draftsmith.errors import RequestError
from draftsmith.recipes.schema import Recipe

T = TypeVar("T")
REFERENCE_MARK = "## Every key"


@cache
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def shipped() -> dict[str, Path]:
    """Names and files of the recipes that come with the package."""
    folder = Path(str(files("draftsmith.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def locate(recipe: str) -> Path:
    """The file of a recipe, given its path or the name of a shipped one."""
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise RequestError(f"recipe {recipe}: there is no such file")
    names = shipped()
    if recipe not in names:
        raise RequestError(
            f"recipe {recipe!r}: neither a .yaml file nor a shipped recipe"
            f"{_suggest(recipe, names)} (`draftsmith recipes list` shows them)"
        )
    return names[recipe]


def load(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides.

    Raises:
        RequestError: naming the key, its value and what would be right.
    """
    data = _read(locate(recipe))
    for override in overrides:
        _override(data, override)
    return validate(data)


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's keys, on top of those of the recipe that its `base` names.

    Args:
        path: of the recipe.
        above: recipes that led here, by their `base`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: a recipe is UTF-8 text ({error})") from None
    data = _parse(text, place=str(path))
    if not isinstance(data, dict):
        raise RequestError(f"{path}: a recipe is a mapping of keys, not {type(data).__name__}")
    if (base := data.pop("base", None)) is None:
        return data
    if not isinstance(base, str):
        raise RequestError(f"{path}: base: {base!r}: give a recipe's name or file")
    beside = path.parent / base
    below = beside if beside.suffix in {".yaml", ".yml"} and beside.is_file() else locate(base)
    if below.resolve() in [p.resolve() for p in (*above, path)]:
        raise RequestError(f"{path}: base: {base}: leads back to a recipe that builds on this one")
    return _merged(_read(below, (*above, path)), data)


def _merged(base: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """`keys` on top of `base`, group by group; a list replaces a list."""
    merged = dict(base)
    for name, value in keys.items():
        group = merged.get(name)
        # A group without keys is written as nothing in YAML.
        if isinstance(group, dict) and (value is None or isinstance(value, dict)):
            merged[name] = _merged(group, value or {})
        else:
            merged[name] = value
    return merged


def validate(data: Mapping[str, Any]) -> Recipe:
    """Check plain data against the schema."""
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"recipe: {error}; keys are words, values are numbers, words and lists"
        ) from None
    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        raise RequestError("\n".join(_explain(error, data))) from None


def settings(stage: type[T], options: Mapping[str, Any]) -> T:
    """The settings of one stage from a command's options, checked as a recipe's would be.

    Raises:
        RequestError: naming the option, its value and what would be right.
    """
    try:
        return stage(**options)
    except ValidationError as error:
        raise RequestError("\n".join(map(_as_option, _explain(error, options)))) from None


def _as_option(problem: str) -> str:
    """What is wrong with a recipe's key, said of the option of that name."""
    place, _, rest = problem.partition(": ")
    name = place.removeprefix("recipe").removeprefix(".").replace("_", "-")
    return f"--{name}: {rest}" if name else rest


def description(stage: type[Any], name: str) -> str:
    """What a setting is for, as in docs/recipes.md."""
    return next(_description(f) for f in fields(stage) if f.name == name)


def choices(stage: type[Any], name: str) -> tuple[str, ...]:
    """The words that a setting can be; none if it is no such setting."""
    kinds = (get_args(f.type)[0] for f in fields(stage) if f.name == name and get_args(f.type))
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain data, for provenance and fingerprints."""
    plain: dict[str, Any] = _adapter().dump_python(recipe, mode="json")
    return plain


def _parse(text: str, place: str) -> Any:
    # The pure safe loader speaks YAML 1.2: 1e-5 is a number, and `on` a string.
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise RequestError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from None


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise RequestError(f"-s {override}: write it as key=value, e.g. -s distill.lr=3e-5")
    *parents, last = key.split(".")
    node = data
    for depth, parent in enumerate(parents, start=1):
        # A group without keys is written as nothing in YAML.
        if node.get(parent) is None:
            node[parent] = {}
        child = node[parent]
        if not isinstance(child, dict):
            place = ".".join(["recipe", *parents[:depth]])
            raise RequestError(f"-s {override}: {place} is a value, not a group of keys")
        node = child
    node[last] = _parse(value, place=f"-s {override}")


def _explain(error: ValidationError, data: Mapping[str, Any]) -> Iterator[str]:
    for item in error.errors():
        path = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
        place = ".".join(["recipe", *path])
        if item["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
            known = [name for name, _, _ in _children(path[:-1])]
            yield f"{place}: unknown key{_suggest(path[-1], known)}; known here: {', '.join(known)}"
        elif item["type"] in {"missing", "missing_argument"}:
            yield f"{place}: missing; a recipe must have it"
        elif item["type"] == "value_error":
            yield f"{place}: {item['ctx']['error']}"
        else:
            yield f"{place}: {_short(item['input'])}: {_lower(item['msg'])}"


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _suggest(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _children(path: Sequence[str]) -> list[tuple[str, Any, str]]:
    """(name, default, description) of the keys below `path`."""
    node: Any = Recipe
    for part in path:
        node = next((_settings_type(f.type) for f in fields(node) if f.name == part), None)
        if node is None:
            return []
    return [(f.name, f.default, _description(f)) for f in fields(node)]


def _settings_type(annotation: Any) -> Any:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and is_dataclass(c)), None)


def _description(field: Any) -> str:
    for meta in get_args(field.type)[1:]:
        if isinstance(meta, FieldInfo) and meta.description:
            return meta.description
    return ""


def reference() -> str:
    """Every key, its default and its meaning as Markdown; docs/recipes.md is made from it."""
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]

    def walk(node: Any, prefix: str) -> None:
        for f in fields(node):
            child = _settings_type(f.type)
            if child is not None:
                walk(child, f"{prefix}{f.name}.")
                continue
            value = f.default if f.default_factory is MISSING else f.default_factory()
            default = "required" if f.name == "target" else f"`{json.dumps(_plain(value))}`"
            lines.append(f"| `{prefix}{f.name}` | {default} | {_description(f)} |")

    walk(Recipe, "")
    return "\n".join(lines) + "\n"


def write_reference(path: str) -> None:
    """Write docs/recipes.md: the text before the table stays, the table is made anew."""
    file = Path(path)
    before, mark, _ = file.read_text(encoding="utf-8").partition(REFERENCE_MARK)
    if not mark:
        raise RequestError(f"{path}: the line {REFERENCE_MARK!r} is missing")
    file.write_text(f"{before}{mark}\n\n{reference()}", encoding="utf-8")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
