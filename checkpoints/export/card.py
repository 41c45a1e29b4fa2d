"""The model card of an export: what it drafts for, how it is started, how well it was written."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.checkpoints.export.base import Job, Report
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.gguf_files import open_gguf
from draftsmith.checkpoints.provenance import versions
from draftsmith.data.files import write_text

FILE = "README.md"
_TAGS = ["speculative-decoding", "draft-model", "draftsmith"]
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = "https://huggingface.co/"
# Fields of the front matter that say what may be done with a model.
_LICENSE = ("license", "license_name", "license_link")
_UNKNOWN = (
    "The target states no license in its files. **Check the target's license before you pass this "
    "drafter on**, and state it here: a drafter is made of its target's weights."
)


@dataclass(frozen=True)
class Made:
    """How a drafter was made and measured, as far as is known.

    Attributes:
        recipe: name of the recipe.
        score: content of a `score.json`.
    """

    recipe: str | None = None
    score: Mapping[str, Any] | None = None


def write_card(folder: Path, job: Job, reports: Mapping[str, Report], made: Made) -> None:
    """Write `README.md`, as the Hugging Face hub shows it.

    Args:
        folder: of the whole export, or of the HF folder within it.
        job: what was exported.
        reports: of the runtimes that it was written for, in their order.
        made: how.
    """
    write_text(folder / FILE, str(card_of(job, reports, made)))


def card_of(job: Job, reports: Mapping[str, Report], made: Made) -> Any:
    """The card; its front matter holds what is certain, and the license of the target."""
    terms = terms_of(job.target)
    data = ModelCardData(
        base_model=(base := _hub_id(job.target)),
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        pipeline_tag=_TASKS.get(job.family.auto),
        tags=_TAGS,
        **(terms or {"license": "other"}),
    )
    parts = [
        *_head(job, made),
        *_measured(made.score),
        *_launches(reports),
        *_parities(reports),
        *_origin(terms is not None),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def terms_of(target: ModelRef) -> dict[str, str] | None:
    """The license that a target's own files state; None: they state none."""
    if target.gguf:
        fields = open_gguf(target.path).fields
        found = {
            ours: str(fields[theirs].contents())
            for ours, theirs in (
                ("license", "general.license"),
                ("license_name", "general.license.name"),
                ("license_link", "general.license.link"),
            )
            if theirs in fields
        }
    elif (card := target.folder / FILE).is_file():
        data = ModelCard.load(card, ignore_metadata_errors=True).data
        found = {name: value for name in _LICENSE if (value := data.get(name))}
    else:
        found = {}
    return found if "license" in found else None


def _hub_id(target: ModelRef) -> str | None:
    """Where the target lies on the hub; None: nowhere that is known."""
    if target.gguf:
        fields = open_gguf(target.path).fields
        url = next(
            (
                str(fields[name].contents())
                for name in ("general.repo_url", "general.source.repo_url")
                if name in fields
            ),
            "",
        )
        return url.removeprefix(_HUB) if url.startswith(_HUB) else None
    local = Path(target.spec).expanduser().exists()
    return target.spec if _HUB_ID.fullmatch(target.spec) and not local else None


def target_name(target: ModelRef) -> str:
    """The target's name, without the folders of the machine that it lay on."""
    return _hub_id(target) or target.spec.rstrip("/").rpartition("/")[2]


def _head(job: Job, made: Made) -> Iterator[str]:
    target = target_name(job.target)
    yield f"# A drafter for {target}"
    yield (
        f"A small model that proposes tokens to {target} in speculative decoding. The target "
        "checks every proposal, so its own text comes out; the drafter decides only how fast. It "
        "is not meant to be used alone."
    )
    facts = {
        "target": target,
        "recipe": made.recipe,
        "shape": str(job.shape),
        "parameters": f"{sum(p.numel() for p in job.model.parameters()):,}",
        "tokens it can propose": f"{job.pair.tokens:,}",
        "positions it knows": job.pair.drafter_context,
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    yield _table("| | |", rows)
    for note in job.pair.notes:
        yield f"Note: {note}."


def _measured(score: Mapping[str, Any] | None) -> Iterator[str]:
    if score is None:
        return
    machine = score["machine"]
    where = machine["gpu"] if machine["gpu"] != "none" else machine["cpu"]
    yield "## Measured"
    yield (
        f"By real decoding of the prompts `{score['prompts']}` in {score['runtime']} on {where}, "
        f"with {score['verify']} verification"
        + (": the text was the target's own." if score["lossless"] else ".")
    )
    yield _table(
        "| lookahead | accepted per round | emitted per round | proposals accepted | speed-up |",
        [
            f"| {row['lookahead']} | {_number(row['accepted_per_round'])} "
            f"| {_number(row['emitted_per_round'])} | {_number(row['acceptance_rate'])} "
            f"| {_number(row['speedup_measured'])} |"
            for row in score["decode"]
        ],
    )
    if verdict := score.get("verdict"):
        yield verdict["text"]


def _launches(reports: Mapping[str, Report]) -> Iterator[str]:
    yield "## Start"
    yield "TARGET stands for the target's path; other paths are relative to the export's folder."
    for runtime, report in reports.items():
        yield f"### {runtime}"
        yield f"```\n{report.launch}\n```"
        yield from (f"Note: {note}." for note in report.notes)


def _parities(reports: Mapping[str, Report]) -> Iterator[str]:
    rows = [
        f"| {runtime} | {found.reader} | {_number(found.max_difference)} | {_number(found.scale)} "
        f"| {_number(found.top1_agreement)} "
        f"| {_of(found.greedy_identical, found.greedy_compared)} "
        f"| {_number(found.strings_compared)} |"
        for runtime, report in reports.items()
        if (found := report.parity) is not None
    ]
    if not rows:
        return
    yield "## Read back"
    yield (
        "Each file was read by its runtime and compared with the model that was trained: logits "
        "of one text, a greedy text, and how strings are split into tokens."
    )
    yield _table(
        "| runtime | read by | largest difference | largest logit | same arg max | greedy text "
        "| strings |",
        rows,
    )


def _origin(stated: bool) -> Iterator[str]:
    yield "## Made with"
    yield ", ".join(f"{name} {version}" for name, version in versions().items()) + "."
    yield "The license is the target's." if stated else _UNKNOWN
    yield "`export.json` in the export's folder holds the same figures."


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, re.sub(r"[^|]+", " --- ", head), *rows])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _of(part: int | None, whole: int | None) -> str:
    return "–" if part is None else f"{part} of {whole}"
