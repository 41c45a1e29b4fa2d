"""The text that masks learn from: the target's own, or a mixture of a corpus' domains."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from draftsmith.data.progress import say
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, BatchStream, MixtureStream, collate
from draftsmith.distill.engine import Ranks
from draftsmith.prune.domains import Proportions
from draftsmith.prune.masks import LearnableMasks
from draftsmith.prune.objective import Objective
from draftsmith.recipes.schema import MixtureSettings, PruneSettings

# Rows on which choices are compared.
SAMPLE_ROWS = 12


class Text(Protocol):
    """Micro-batches without end, the same in every process."""

    def of_step(self, step: int, ranks: Ranks) -> Sequence[Batch]:
        """Those of a step that are this process's; steps are asked for in their order."""

    def sample(self) -> Sequence[Batch]:
        """Fixed rows, on which choices are compared."""

    def after(self, step: int, masks: LearnableMasks, objective: Objective, ranks: Ranks) -> None:
        """Look at what a step made of the masks; what comes next may depend on it."""

    def history(self) -> Sequence[Mapping[str, Any]]:
        """How the shares of domains changed; empty where there are none."""

    def state(self) -> dict[str, Any]:
        """All that the batches to come depend on, beside the step."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""


class TraceText:
    """The target's own texts, in an order that depends on seed and step alone."""

    def __init__(self, rows: Sequence[TraceRow], settings: PruneSettings, seed: int) -> None:
        """Take the rows; arguments as for `learn_masks`."""
        self._stream = BatchStream(rows, settings.batch, settings.max_length, seed)
        self._micro = settings.accumulate

    def of_step(self, step: int, ranks: Ranks) -> Sequence[Batch]:
        """Those of a step that are this process's."""
        first = step * self._micro
        return [self._stream[number] for number in ranks.share(range(first, first + self._micro))]

    def sample(self) -> Sequence[Batch]:
        """The first rows."""
        return [collate(self._stream.rows[:SAMPLE_ROWS], self._stream.max_length)]

    def after(self, step: int, masks: LearnableMasks, objective: Objective, ranks: Ranks) -> None:
        """Nothing changes."""

    def history(self) -> Sequence[Mapping[str, Any]]:
        """There are no shares."""
        return []

    def state(self) -> dict[str, Any]:
        """Nothing: the step says it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to go back to."""


class MixtureText:
    """Packed sequences of a mixture, whose shares may follow what masks do to each domain."""

    def __init__(
        self,
        mixture: MixtureSettings,
        tokenizer: Any,
        settings: PruneSettings,
        seed: int,
    ) -> None:
        """Read what is held out, and begin after it.

        Args:
            mixture: the recipe's.
            tokenizer: of the source.
            settings: the recipe's `prune`.
            seed: of every order.

        Raises:
            RequestError: a domain is missing or has too few texts.
        """
        self._stream = MixtureStream(mixture, tokenizer, settings.batch, seed)
        self._proportions = Proportions.of(mixture)
        self._micro = settings.accumulate

    def of_step(self, step: int, ranks: Ranks) -> Sequence[Batch]:
        """Those of a step that are this process's; every process reads all."""
        return ranks.share(self._stream.step(self._micro))

    def sample(self) -> Sequence[Batch]:
        """The first held-out sequences of each domain."""
        return [batches[0] for batches in self._stream.held_out.values()]

    def after(self, step: int, masks: LearnableMasks, objective: Objective, ranks: Ranks) -> None:
        """Measure every domain if it is time, and change the shares."""
        done = step + 1
        if not self._proportions.is_due(done):
            return
        losses = {
            name: objective.under(masks.gates(), [b.to(objective.device) for b in batches])
            for name, batches in self._stream.held_out.items()
        }
        # Ties may fall otherwise elsewhere; what one rank sees counts for all.
        measured = ranks.gather(losses)[0]
        if self._proportions.settings.update == "acceptance":
            measured = {name: 1.0 - loss for name, loss in measured.items()}
        self._proportions = self._proportions.updated(done, measured)
        self._stream.shares = self._proportions.shares
        told = ", ".join(f"{name} {share:.3f}" for name, share in self._stream.shares.items())
        say(f"step {done}: shares {told}")

    def history(self) -> Sequence[Mapping[str, Any]]:
        """Step, shares and what was measured, at the start and at every update."""
        return self._proportions.history

    def state(self) -> dict[str, Any]:
        """Place in every domain, shares and their history."""
        return {
            "stream": self._stream.state_dict(),
            "proportions": self._proportions.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._stream.load_state_dict(state["stream"])
        self._proportions = self._proportions.restored(state["proportions"])
