"""Parallel heads on the target's own last state: drafts without a pass of any drafter.

Blockwise parallel decoding (Stern et al. 2018): the pass that verifies a round leaves a state for
each token that it read. The state before the round's last token has predicted that one by the
target's own head; further heads predict the tokens after it, which the next round verifies. The
target itself is frozen, so its output stays what it was.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draftsmith.accept.cache import CachedModel, Source
from draftsmith.accept.drafters import Texts, until_end
from draftsmith.accept.verify import Draft
from draftsmith.checkpoints.formats import local_path
from draftsmith.checkpoints.heads import head_logits
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.files import write_file, write_json
from draftsmith.errors import RequestError

FILE = "heads.json"
WEIGHTS = "heads.safetensors"
FORMAT = "draftsmith-heads"
VERSION = 1


@dataclass(frozen=True)
class HeadsConfig:
    """What a folder of heads says of itself.

    Attributes:
        target: the model that they were trained on, as it was named.
        heads: how many there are, the most that they propose.
        hidden: width of the target's decoder.
        ffn: hidden width of each.
        vocabulary: rows of the target's own head, through which all of them speak.
    """

    target: str
    heads: int
    hidden: int
    ffn: int
    vocabulary: int

    def __post_init__(self) -> None:
        """Refuse what are no sizes.

        Raises:
            ValueError: naming it.
        """
        for name in ("heads", "hidden", "ffn", "vocabulary"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}")

    @classmethod
    def of(cls, target: str, shape: Shape, heads: int) -> "HeadsConfig":
        """Heads as wide as the FFN of the target's decoder."""
        return cls(target, heads, shape.hidden, shape.ffn, shape.vocab)

    @classmethod
    def read(cls, folder: Path) -> "HeadsConfig":
        """Read the file of a folder.

        Raises:
            RequestError: it is damaged, or of an unknown version.
        """
        file = folder / FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            kind = found.pop("format"), found.pop("version")
            config = cls(**found) if kind == (FORMAT, VERSION) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{file}: damaged ({error}); train the heads again") from None
        if config is None:
            raise RequestError(
                f"{file}: format {kind[0]!r} version {kind[1]!r}; this draftsmith reads {FORMAT!r} "
                f"version {VERSION}"
            )
        return config

    def check(self, shape: Shape, target: str, folder: Path | str) -> None:
        """Refuse a target on which the heads don't fit.

        Raises:
            RequestError: it has another width or vocabulary.
        """
        for what, own, its in (
            ("width", self.hidden, shape.hidden),
            ("vocabulary", self.vocabulary, shape.vocab),
        ):
            if own != its:
                raise RequestError(
                    f"{folder}: heads for a target of {what} {own}, but {target} has {its}; give "
                    f"their own target, {self.target}, or train heads for this one"
                )


class ParallelHeads(nn.Module):
    """Heads that turn the state at position n into states for the tokens n + 2, n + 3, …

    Each adds what an FFN makes of the state; new ones add nothing, and repeat the target's token.
    """

    def __init__(self, config: HeadsConfig) -> None:
        """Make new heads, drawn from torch's generator."""
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(
            _new_head(config.hidden, config.ffn) for _ in range(config.heads)
        )

    def forward(self, states: Tensor) -> Tensor:
        """States [..., K, H] of K heads for final hidden states [..., H] of the target."""
        return torch.stack([states + head(states) for head in self.heads], dim=-2)

    def save(self, folder: Path) -> None:
        """Write weights and config into an existing folder."""
        from safetensors.torch import save_file

        state = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        write_file(folder / WEIGHTS, lambda partial: save_file(state, partial))
        about = {"format": FORMAT, "version": VERSION, **asdict(self.config)}
        write_json(folder / FILE, about)

    @classmethod
    def load(cls, folder: Path) -> "ParallelHeads":
        """Read them back.

        Raises:
            RequestError: the folder is damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        heads = cls(HeadsConfig.read(folder))
        try:
            heads.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise RequestError(
                f"{folder / WEIGHTS}: damaged, or not of {FILE} ({reason}); train the heads again"
            ) from None
        return heads.eval()


def _new_head(hidden: int, ffn: int) -> nn.Sequential:
    """An FFN that gives 0 as yet."""
    last = nn.Linear(ffn, hidden)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(hidden, ffn), nn.ReLU(), last)


def is_heads(spec: str) -> bool:
    """Whether a drafter's name is that of a folder of heads."""
    return (local_path(spec) / FILE).is_file()


class HeadsDrafter:
    """Proposes what heads say of the state that the target's last pass left.

    Before the target's first pass there is none, so the first round proposes nothing.
    """

    context: int | None = None
    # What is proposed for a place is made of the state at which the round began.
    prefix_alone = False
    deterministic = True

    def __init__(
        self,
        target: CachedModel,
        heads: ParallelHeads,
        vocabulary: SharedVocabulary,
        stop_ids: frozenset[int],
    ) -> None:
        """Draft with heads on `target`, which whoever verifies feeds and truncates.

        Args:
            target: the target, the very one that verifies.
            heads: trained on it.
            vocabulary: ids that can be proposed.
            stop_ids: ids that end a text.
        """
        self.target, self.heads = target, heads.to(target.device, target.model.dtype)
        self.vocabulary, self.stop_ids = vocabulary, stop_ids
        self.most: int | None = heads.config.heads

    def alone(self) -> "HeadsDrafter":
        """The same where nobody verifies: it lets the target read the texts."""
        return _ReadingHeads(self.target, self.heads, self.vocabulary, self.stop_ids)

    def reset(self, rows: int, seeds: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Let the target, which has been reset, keep its states."""
        self.target.keep_states()

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Propose up to so many tokens, as many as there are heads at most."""
        drafts = [Draft([]) for _ in texts]
        states = {
            row: state
            for row, (state, k) in enumerate(
                zip(self.target.last_states(), lookaheads, strict=True)
            )
            if state is not None and k
        }
        if states:
            proposed = self.tokens(torch.stack(list(states.values())))
            for row, tokens in zip(states, proposed, strict=True):
                tokens = until_end(tokens[: lookaheads[row]], self.stop_ids)
                drafts[row] = Draft(tokens, passes=1)
        return drafts

    @torch.inference_mode()
    def tokens(self, states_BH: Tensor) -> list[list[int]]:
        """What all heads say of each state, B lists of K tokens."""
        logits_BKV = head_logits(self.target.model, self.target.family, self.heads(states_BH))
        said: list[list[int]] = self.vocabulary.restrict(logits_BKV).argmax(-1).tolist()
        return said

    def blank_states(self, rows: int) -> Tensor:
        """States [rows, H] to time the heads with."""
        model = self.target.model
        return torch.zeros(rows, self.heads.config.hidden, dtype=model.dtype, device=model.device)

    def rollback(self, lengths: Sequence[int]) -> None:
        """The target is truncated by whoever feeds it."""

    def select(self, rows: Sequence[int]) -> None:
        """Likewise."""


class _ReadingHeads(HeadsDrafter):
    """Feeds the target itself, all of each text but its last token."""

    def reset(self, rows: int, seeds: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Forget the texts."""
        self.target.reset(rows, sources)
        super().reset(rows, seeds, sources)
        self._begun = False

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Read what is new, and propose as where the target verifies."""
        if self._begun:
            known = self.target.lengths
            new = [text[n:-1] for text, n in zip(texts, known, strict=True)]
            self.target.feed_rows(new, keep=1)
        self._begun = True
        return super().propose(texts, lookaheads)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the caches of other texts."""
        self.target.select(rows)
