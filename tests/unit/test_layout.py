"""The shape of the repository: packages, the direction of imports, family names in one place."""

import ast
import configparser
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.checkpoints.families import families
from draftsmith.recipes.loading import reference

ROOT = Path(__file__).resolve().parents[2]
NO_PACKAGE = {"tests", "benchmarks", "docs", "build", "dist", "runs", "shared"}
# Data goes from top to bottom; a part may import what stands after it.
ORDER = ("cli", "recipes", "prune", "distill", "accept", "checkpoints", "data")
FOR_ALL = {"draftsmith", "draftsmith.errors", "draftsmith.recipes.schema"}
# Names of other projects that contain a family's.
RUNTIMES = re.compile(r"llama[._-]cpp|llama-(server|cli)|xllamacpp|LlamaFileType")
# A table of the names that llama.cpp gave to rules of splitting text, after the first model that
# used each; they are values of a GGUF key and say nothing of the model at hand.
RUNTIME_TABLE = "_PRE_TOKENIZERS"
OTHER_FAMILIES = {"gemma", "gemma2", "gemma3", "t5", "bart", "marian", "whisper", "qwen"}


def folders() -> Iterator[Path]:
    """Folders of the package: those with an `__init__.py`."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if not n.startswith(".") and n not in NO_PACKAGE]
        if "__init__.py" in files:
            yield Path(folder)


def package_files() -> list[Path]:
    return sorted(file for folder in folders() for file in folder.glob("*.py"))


def module_of(file: Path) -> str:
    """`draftsmith.data.files` for data/files.py; a package for its `__init__.py`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("draftsmith", *(p for p in parts if p != "__init__")))


MODULES = {module_of(file): file for file in package_files()}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those in functions and for type checking as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name in MODULES else str(node.module)


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def test_the_package_list_is_that_of_the_folders() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    assert listed == sorted(listed)
    assert listed == sorted(module_of(folder / "__init__.py") for folder in folders())


def test_every_folder_with_code_is_a_package() -> None:
    tops = {module_of(file).split(".")[1] for file in package_files() if file.parent != ROOT}
    for top in tops:
        for file in (ROOT / top).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.parent} lacks __init__.py"


def test_no_stray_files_at_the_root() -> None:
    """Every one would be installed as a part of the package."""
    assert {file.name for file in ROOT.glob("*.py")} == {"__init__.py", "cli.py", "errors.py"}


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part_of(module) for module in MODULES} == {"", "errors", *ORDER}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_only(module: str) -> None:
    own = part_of(module)
    for line, imported in imports(MODULES[module]):
        if imported.split(".")[0] != "draftsmith" or imported in FOR_ALL:
            continue
        place = f"{MODULES[module]}:{line}: {module} imports {imported}"
        assert own in ORDER, place
        assert ORDER.index(part_of(imported)) >= ORDER.index(own), place


def test_the_check_of_imports_sees_functions_and_type_checking(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "if TYPE_CHECKING:\n    from draftsmith.recipes import run\n"
        "def f():\n    import draftsmith.cli\n    from draftsmith.data.files import sha256\n"
    )
    found = {module for _, module in imports(file)}
    assert found == {"draftsmith.recipes.run", "draftsmith.cli", "draftsmith.data.files"}


@pytest.mark.parametrize("module", ["draftsmith", "draftsmith.errors", "draftsmith.recipes.schema"])
def test_what_all_may_import_is_light(module: str) -> None:
    light = {"dataclasses", "typing", "pydantic", "pydantic.dataclasses"}
    assert {imported for _, imported in imports(MODULES[module])} <= light


def code_words(source: str) -> Iterator[tuple[int, str]]:
    """(line, word) of all names and strings in code; docstrings and comments are left out."""
    tree = ast.parse(source)
    texts = {
        node.body[0].lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == RUNTIME_TABLE:
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kinds = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in kinds or (token.type == tokenize.STRING and token.start[0] in texts):
            continue
        text = RUNTIMES.sub("", token.string)
        # LlamaForCausalLM -> Llama For Causal LM; is_llama -> is llama
        for word in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", text):
            yield token.start[0], word.lower()


def family_words() -> set[str]:
    names = set(families()) | OTHER_FAMILIES
    return names | {name.rstrip("0123456789") for name in names if name != "t5"}


OUTSIDE = [f for f in package_files() if "families" not in f.relative_to(ROOT).parts]


@pytest.mark.parametrize("file", OUTSIDE, ids=module_of)
def test_families_are_named_in_their_tables_only(file: Path) -> None:
    named = [
        f"{file}:{line}: {word}"
        for line, word in code_words(file.read_text(encoding="utf-8"))
        if word in family_words()
    ]
    assert not named


@pytest.mark.parametrize("file", OUTSIDE, ids=module_of)
def test_no_code_asks_for_the_family(file: Path) -> None:
    """Neither by the config's `model_type` nor by the model's class."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            assert "model_type" not in ast.unparse(node), f"{file}:{node.lineno}"
        if isinstance(node, ast.Match):
            assert "model_type" not in ast.unparse(node.subject), f"{file}:{node.lineno}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 'llama'", {"llama"}),
        ("isinstance(m, LlamaForCausalLM)", {"llama"}),
        ("if is_qwen2: pass", {"qwen2"}),
        ("f'{x} for a mistral'", {"mistral"}),
        ("T5Model", {"t5"}),
        ('"""Llama in a docstring."""\nx = 1  # bart', set()),
        ("class A:\n    '''As\n    whisper does.'''\n", set()),
        ("_PRE_TOKENIZERS = {\n    ('a',): 'qwen2',\n}\nx = 'mistral'", {"mistral"}),
        ("print('for llama.cpp', gguf.LlamaFileType)", set()),
    ],
)
def test_the_check_of_family_names(source: str, found: set[str]) -> None:
    assert {word for _, word in code_words(source)} & family_words() == found


@pytest.mark.parametrize("file", package_files(), ids=module_of)
def test_no_place_of_one_machine_and_nothing_left_to_do(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert not re.search(r"/(work|tmp|home|root|Users|mnt)/", source)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", source)


def test_data_files_of_the_package_are_shipped() -> None:
    """Recipes and prompt suites match the patterns of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["draftsmith.recipes"].split(",")
    shipped = {p for pattern in patterns for p in (ROOT / "recipes").glob(pattern.strip())}
    there = {p for p in (ROOT / "recipes").rglob("*") if p.is_file() and p.suffix != ".py"}
    assert shipped == {p for p in there if "__pycache__" not in p.parts}


def test_the_recipe_page_holds_the_reference() -> None:
    page = ROOT / "docs" / "recipes.md"
    if not page.is_file():
        pytest.skip("docs/recipes.md is not written yet")
    assert reference() in page.read_text(encoding="utf-8"), "make docs writes it anew"
