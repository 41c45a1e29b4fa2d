"""The command line as a user meets it: help, exit codes, one line for a wrong request."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith import __version__
from draftsmith.cli import app
from draftsmith.recipes.loading import shipped

Done = subprocess.CompletedProcess[str]
Cli = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the command line in an empty folder, which is `cli.folder`."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def run(*arguments: object) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "draftsmith.cli", *map(str, arguments)],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            cwd=folder,
        )

    run.folder = folder  # type: ignore[attr-defined]
    return run


def refused(cli: Any, *arguments: object) -> str:
    """What a wrong request says: one line on stderr, exit code 2, and nothing written."""
    before = sorted(cli.folder.rglob("*"))
    done = cli(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("draftsmith: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert sorted(cli.folder.rglob("*")) == before
    return done.stderr


def commands() -> Iterator[tuple[str, ...]]:
    """Every command, as the words after `draftsmith`."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        children = getattr(command, "commands", {})
        if not children:
            yield words
        for name, child in children.items():
            yield from walk(child, (*words, name))

    yield from walk(typer.main.get_command(app), ())


# --- help


def test_help_names_every_command_and_a_beginning(cli: Cli) -> None:
    done = cli("--help")
    assert done.returncode == 0
    assert "draftsmith run quickstart" in done.stdout
    for words in commands():
        assert re.search(rf"^\W*{words[0]}  ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_help_of_a_command_shows_an_example(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words, "--help")
    assert done.returncode == 0
    assert f"draftsmith {' '.join(words)}" in " ".join(done.stdout.split())


def test_help_of_run_tells_where_the_output_goes(cli: Cli) -> None:
    """Brackets in a help text are not markup."""
    assert "runs/NAME" in cli("run", "--help").stdout


@pytest.mark.parametrize("words", [(), ("recipes",)])
def test_no_command_shows_the_help(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words)
    assert "Usage:" in done.stdout + done.stderr


def test_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.returncode, done.stdout) == (0, f"draftsmith {__version__}\n")


# --- wrong requests


def test_an_unknown_recipe(cli: Cli) -> None:
    assert "did you mean 'quickstart'?" in refused(cli, "run", "quikstart")
    assert "there is no such file" in refused(cli, "run", "mine.yaml")


def test_a_wrong_recipe_is_refused_before_anything_heavy_is_imported(cli: Any) -> None:
    code = (
        "import atexit, sys; from draftsmith.cli import main\n"
        "atexit.register(lambda: print({'torch', 'transformers'} & set(sys.modules)))\n"
        "sys.argv = ['draftsmith', 'run', 'quickstart', '-s', 'seed=x']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cli.folder
    )
    assert (done.returncode, done.stdout) == (2, "set()\n")


def test_an_unknown_key(cli: Cli) -> None:
    message = refused(cli, "run", "quickstart", "-s", "distill.stepz=5")
    assert "recipe.distill.stepz: unknown key (did you mean 'steps'?)" in message


def test_a_wrong_value(cli: Cli) -> None:
    assert "recipe.distill.lr: 0" in refused(cli, "distill", "quickstart", "-s", "distill.lr=0")


@pytest.mark.parametrize("k", ["0", "x", "3:1", "1:2:3", "", "1,,2", "1.5"])
def test_bad_lookaheads(cli: Cli, k: str) -> None:
    message = refused(cli, "score", "a", "--target", "b", "-k", k)
    assert f"-k {k}: give a number from 1" in message


def test_a_method_of_pruning_is_a_recipes(cli: Cli) -> None:
    message = refused(cli, "prune", "quickstart", "--method", "magic")
    assert 'recipe.prune.method: "magic": ' in message
    assert "'block-influence'" in message


def test_a_missing_drafter(cli: Cli, save: Any, tiny: Any) -> None:
    target = save(tiny)
    message = refused(cli, "score", "no drafter", "--target", target, "--json", "out.json")
    assert "no drafter: there is no such folder or file" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--verify", "exact"), "--verify: \"exact\": input should be 'greedy', 'sampling'"),
        (("--temperature", "0.7"), "temperature 0.7: only verify sampling draws"),
        (("--top-p", "0"), "--top-p: 0.0: input should be greater than 0"),
        (("--mode", "replay", "--verify", "top_beta"), "what a lossy verifier keeps"),
        (("--samples", "9"), "samples 9: there is nothing to compare unless verify: sampling"),
        (("--traces", "nowhere"), "nowhere: no trace store here"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_score_settings_are_those_of_recipes(
    cli: Cli, save: Any, tiny: Any, options: tuple[str, ...], message: str
) -> None:
    folder = str(save(tiny))
    assert message in refused(cli, "score", folder, "--target", folder, *options)


def test_a_json_file_in_no_folder(cli: Cli) -> None:
    message = refused(cli, "score", "a", "--target", "b", "--json", "none/out.json")
    assert "there is no folder none" in message


@pytest.mark.parametrize(
    "arguments",
    [("export", "a", "--target", "b"), ("compact", "a", "--masks", "masks.json")],
    ids=lambda arguments: arguments[0],
)
def test_an_output_that_exists_is_kept(cli: Any, arguments: tuple[str, ...]) -> None:
    (cli.folder / "mine").mkdir()
    (cli.folder / "mine" / "precious").touch()
    assert "--out mine: is there already" in refused(cli, *arguments, "--out", "mine")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--to", "hf,onxn", "'onxn' is not among hf, gguf"),
        ("--gguf-type", "Q2_K", '"Q2_K": input should'),
    ],
)
def test_an_unknown_format(cli: Cli, option: str, value: str, message: str) -> None:
    assert message in refused(cli, "export", "a", "--target", "b", "--out", "c", option, value)


def test_missing_masks(cli: Cli, save: Any, tiny: Any) -> None:
    message = refused(cli, "compact", save(tiny), "--masks", "none.json", "--out", "deep/c")
    assert "none.json: there is no such file" in message


def test_an_impossible_shape(cli: Cli, tiny_recipe: Path) -> None:
    message = refused(cli, "run", tiny_recipe, "-s", "prune.shape.kv_heads=5")
    assert "recipe.prune.shape.kv_heads: 5 is not among 1, 2" in message


def test_a_missing_target(cli: Cli, tiny_recipe: Path) -> None:
    assert "there is no such folder" in refused(cli, "run", tiny_recipe, "-s", "target=/a/b/c")


@pytest.mark.parametrize("stage", ["prune", "distill"])
def test_a_stage_whose_input_is_missing(cli: Cli, tiny_recipe: Path, stage: str) -> None:
    message = refused(cli, stage, tiny_recipe, "--quiet", "--out", "mine")
    assert "mine/traces: missing" in message


def test_debug_shows_where(cli: Cli) -> None:
    done = cli("run", "quikstart", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "Traceback" not in cli("run", "quikstart").stderr


# --- recipes


def test_recipes_are_listed_with_their_descriptions(cli: Cli) -> None:
    done = cli("recipes", "list")
    assert done.returncode == 0
    for name in shipped():
        assert name in done.stdout
    assert "SmolLM2" in done.stdout


def test_a_recipe_is_shown_as_it_is_written(cli: Cli) -> None:
    assert cli("recipes", "show", "quickstart").stdout == shipped()["quickstart"].read_text()
    assert "shipped recipe" in refused(cli, "recipes", "show", "nothere")


def test_a_recipe_is_copied_once(cli: Any) -> None:
    done = cli("recipes", "copy", "quickstart")
    copy = cli.folder / "quickstart.yaml"
    assert (done.returncode, done.stdout) == (0, "quickstart.yaml\n")
    assert copy.read_bytes() == shipped()["quickstart"].read_bytes()
    copy.write_text("mine")
    assert "is there already" in refused(cli, "recipes", "copy", "quickstart")
    assert copy.read_text() == "mine"
    assert cli("recipes", "copy", "quickstart", "other.yaml").returncode == 0
    assert (cli.folder / "other.yaml").is_file()


def test_a_recipe_is_not_copied_into_a_missing_folder(cli: Cli) -> None:
    assert "none" in refused(cli, "recipes", "copy", "quickstart", "none/mine.yaml")
