"""What all exporters have in common: a check before any work, a folder, and a report.

An exporter is a module of this package with two functions, `preflight` and `export`. The first is
asked before anything is trained, so it sees no weights; the second writes what the runtime loads,
has it read back, and compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftsmith.checkpoints.export.parity import Parity
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.layout import layout_of
from draftsmith.checkpoints.pair import PairCheck
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import ExportSettings

# The folder that `hf` writes; other runtimes load it too.
HF = "hf"


@dataclass(frozen=True)
class Candidate:
    """A drafter by its numbers alone; it need not be trained yet.

    Attributes:
        config: transformers' config, of the drafter or of the source that it is cut from. Counts
            come from `shape`, the rest from here.
        family: its table.
        shape: the drafter's.
        target: whose tokenizer is exported; for a target's own export, itself.
        token_map: of a drafter with a cut vocabulary.
    """

    config: Any
    family: Family
    shape: Shape
    target: ModelRef
    token_map: TokenMap | None = None


@dataclass(frozen=True)
class Job(Candidate):
    """A drafter that is exported.

    Attributes:
        model: transformers' model in float32 on the CPU, as it is stored (a cut vocabulary is not
            widened), and the config is its.
        pair: what it has in common with the target.
    """

    model: Any = field(kw_only=True)
    pair: PairCheck = field(kw_only=True)


@dataclass(frozen=True)
class Report:
    """What an exporter did; goes into `export.json`.

    Attributes:
        files: what was written, relative to the export's folder.
        launch: how the pair is started in the runtime: commands or lines of Python, with TARGET
            where the target's path goes and the drafter's files relative to the export's folder.
        parity: how what was written compares with what was meant; None: there is nothing that could
            read it (a configuration for a runtime that is not installed).
        notes: what is worth knowing though it works.
    """

    files: tuple[str, ...]
    launch: str
    parity: Parity | None = None
    notes: tuple[str, ...] = ()


def check_uniform(runtime: str, job: Job) -> None:
    """Compare every tensor with the shape that the config states (case A17).

    Raises:
        DraftsmithError: naming the first that has another, as where layers differ.
    """
    expected = layout_of(job.config, job.family).shapes
    for name, tensor in job.model.state_dict().items():
        if tuple(tensor.shape) != expected.get(name):
            raise DraftsmithError(
                f"export {runtime}: {name} is {tuple(tensor.shape)}, but the config says "
                f"{expected.get(name)}; the format needs the same shape in every layer"
            )


class Exporter(Protocol):
    """A module of this package."""

    def preflight(self, candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
        """Refuse what this runtime can't serve; returns notes on what it serves badly.

        Looks at numbers, tokenizer files and installed packages; loads no weights.

        Raises:
            RequestError: `export NAME: ` what and why; the cure.
        """

    def export(self, job: Job, folder: Path, settings: ExportSettings) -> Report:
        """Write into `folder`, have it read back, compare.

        Args:
            job: what is exported; `preflight` has passed.
            folder: of the whole export, which exists. An exporter keeps to files or folders of its
                own name within it; the one written by `hf` is in `folder / HF`.
            settings: the recipe's `export`.

        Raises:
            DraftsmithError: it reads back wrong, or the runtime's converter failed.
        """
