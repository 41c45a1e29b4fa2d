"""Is what was written what was meant? Read back by what will run it, and asked the same things.

Three things are compared: logits of 64 tokens, the greedy text that follows some, and how strings
that tokenizers often get wrong are split. A runtime that can't answer one of them leaves it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.pair import context_of
from draftsmith.checkpoints.shape import shape_of
from draftsmith.errors import DraftsmithError

# Largest difference of logits, relative to their scale, that a tensor type explains.
TOLERANCE = {
    "F32": 1e-5,
    "F16": 2e-2,
    "BF16": 5e-2,
    "Q8_0": 0.2,
    "Q5_1": 1.0,
    "Q5_0": 1.0,
    "Q4_1": 1.5,
    "Q4_0": 1.5,
}
_TOKENS = 64
# Of the greedy text, and the tokens that it follows.
_NEW_TOKENS, _PROMPT_TOKENS = 24, 8
# Spaces, line ends, numbers, scripts, signs of several code points, and text that looks special.
HARD_STRINGS = (
    "Hello, world!",
    "  two  spaces   three",
    "\n\n\ttabs\tand\r\nline ends \n",
    " leading and trailing ",
    "how many  apples\n\nare left?",
    "12345 3.14159 1,000,000 0x1F",
    "don't I'LL we've",
    "naïve café Ünïcödé ß",
    "日本語のテキスト 中文 한국어",
    "Привет мир עברית العربية",
    "👩‍👩‍👧 👍🏽 🇩🇪",
    "def f(x):\n    return x**2  # ½",
    "<s></s><unk><|endoftext|><|im_start|>user",
    "a\u0301 \u200b\ufeff\u00a0x",
    "",
)


@dataclass(frozen=True)
class Questions:
    """What is asked of an export and of the model that was meant.

    Attributes:
        inputs: of one forward pass, lists of one text: `input_ids` and, with an encoder,
            `decoder_input_ids` or `input_features`.
        prompt: ids that a greedy text follows.
        new_tokens: of that text, at most.
        strings: to be split into tokens, special ones in text included, nothing added.
    """

    inputs: dict[str, Any]
    prompt: tuple[int, ...]
    new_tokens: int = _NEW_TOKENS
    strings: tuple[str, ...] = HARD_STRINGS


@dataclass(frozen=True)
class Answers:
    """What an export said; None where it can't be asked.

    Attributes:
        reader: who read it, with version.
        logits: at every position of the inputs, [T, V].
        greedy: the text after the prompt.
        strings: ids of each string.
    """

    reader: str
    logits: Tensor | None = None
    greedy: Sequence[int] | None = None
    strings: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True)
class Parity:
    """How an export compares with what was meant; None: not asked.

    Attributes:
        reader: who read it back.
        tolerance: largest allowed difference, relative to `scale`.
        max_difference: largest difference of logits.
        scale: largest logit.
        top1_agreement: share of positions with the same arg max.
        greedy_identical: tokens of the greedy text until the first that differs.
        greedy_compared: tokens of it.
        tie: logits at that first difference were closer than the tolerance explains.
        strings_compared: hard strings that are split alike; those that the target's tokenizer has
            no tokens for are left out.
    """

    reader: str
    tolerance: float
    max_difference: float | None = None
    scale: float | None = None
    top1_agreement: float | None = None
    greedy_identical: int | None = None
    greedy_compared: int | None = None
    tie: bool | None = None
    strings_compared: int | None = None


def example_inputs(config: Any, family: Family, tokens: int) -> dict[str, Any]:
    """Random inputs of one text, always the same: ids [1, T], and what an encoder reads."""
    generator = torch.Generator().manual_seed(0)
    length = min(tokens, context_of(config, family) or tokens)
    ids = torch.randint(shape_of(config, family).vocab, (1, length), generator=generator)
    if not family.has_encoder:
        return {"input_ids": ids}
    if family.config.mel_bins is None:
        source = torch.randint(config.vocab_size, (1, length), generator=generator)
        return {"input_ids": source, "decoder_input_ids": ids}
    bands = getattr(config, family.config.mel_bins)
    frames = 2 * getattr(config, family.config.frames)
    features = torch.randn(1, bands, frames, generator=generator)
    return {"input_features": features, "decoder_input_ids": ids}


def questions_for(config: Any, family: Family) -> Questions:
    """What is asked of a drafter of this config."""
    inputs = example_inputs(config, family, _TOKENS)
    ids = inputs["decoder_input_ids" if family.has_encoder else "input_ids"][0].tolist()
    room = (context_of(config, family) or len(ids) + _NEW_TOKENS) - _PROMPT_TOKENS
    prompt = tuple(ids[:_PROMPT_TOKENS])
    return Questions(inputs, prompt, min(_NEW_TOKENS, max(1, room)))


@torch.inference_mode()
def check_parity(
    answers: Answers,
    meant: Any,
    tokenizer: Any,
    questions: Questions,
    tolerance: float,
    place: str,
) -> Parity:
    """Compare what an export said with what the model that was meant says.

    Args:
        answers: of the export.
        meant: transformers' model.
        tokenizer: the target's; None where strings were not asked.
        questions: what was asked.
        tolerance: largest difference of logits that the format explains, relative to their scale.
        place: names the export in errors.

    Raises:
        DraftsmithError: it says something else by more than the format explains.
    """
    expected = meant.float().cpu()(**questions.inputs).logits[0].float()
    scale = float(expected.abs().max())
    return Parity(
        answers.reader,
        tolerance,
        scale=scale,
        **_logits(answers.logits, expected, tolerance * scale, place),
        **_greedy(answers.greedy, meant, questions, tolerance * scale, place),
        **_strings(answers.strings, tokenizer, questions, place),
    )


def _logits(found: Tensor | None, expected: Tensor, allowed: float, place: str) -> dict[str, Any]:
    if found is None:
        return {}
    found = found.detach().cpu().float()
    if found.shape != expected.shape:
        raise DraftsmithError(
            f"{place}: read back, its logits are {tuple(found.shape)}, not "
            f"{tuple(expected.shape)}; the export is wrong and was not kept"
        )
    difference = float((found - expected).abs().max())
    if not difference <= allowed:
        raise DraftsmithError(
            f"{place}: read back, its logits differ by {difference:.3g} (largest logit "
            f"{float(expected.abs().max()):.3g}); the export is wrong and was not kept"
        )
    agreement = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    return {"max_difference": difference, "top1_agreement": agreement}


def _greedy(
    found: Sequence[int] | None, meant: Any, questions: Questions, allowed: float, place: str
) -> dict[str, Any]:
    """Each token must be the likeliest, or as likely as the format can tell."""
    if found is None:
        return {}
    ids = [*questions.prompt, *found]
    decoder = "decoder_input_ids" if "decoder_input_ids" in questions.inputs else "input_ids"
    inputs = questions.inputs | {decoder: torch.tensor([ids])}
    logits = meant(**inputs).logits[0, len(questions.prompt) - 1 : -1].float()
    said = logits.gather(1, torch.tensor(list(found)).unsqueeze(1)).squeeze(1)
    behind = logits.max(-1).values - said
    same = next((i for i, gap in enumerate(behind.tolist()) if gap > 0), len(found))
    # Both logits of a near tie may be off, in opposite directions.
    if not bool((behind <= 2 * allowed).all()):
        worst = int(behind.argmax())
        raise DraftsmithError(
            f"{place}: read back, its greedy text has at token {worst} an id that is "
            f"{float(behind[worst]):.3g} less likely than the best; the export is wrong and was "
            "not kept"
        )
    tie = None if same == len(found) else True
    return {"greedy_identical": same, "greedy_compared": len(found), "tie": tie}


def _strings(
    found: Sequence[Sequence[int]] | None, tokenizer: Any, questions: Questions, place: str
) -> dict[str, Any]:
    if found is None:
        return {}
    compared = 0
    for string, ids in zip(questions.strings, found, strict=True):
        own: list[int] = tokenizer(string, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id in own:
            # The target can't write it, and what stands for the unknown is each runtime's choice.
            continue
        compared += 1
        if list(ids) != list(own):
            raise DraftsmithError(
                f"{place}: read back, it splits {string!r} into {list(ids)}, the target's "
                f"tokenizer into {own}; the export is wrong and was not kept"
            )
    return {"strings_compared": compared}


@torch.inference_mode()
def answers_of(
    model: Any, questions: Questions, tokenizer: Any = None, reader: str = ""
) -> Answers:
    """What a transformers model says, for exports that transformers reads."""
    import transformers

    strings = None
    if tokenizer is not None:
        strings = [tokenizer(s, add_special_tokens=False)["input_ids"] for s in questions.strings]
    logits = model.float().cpu()(**questions.inputs).logits[0]
    return Answers(f"transformers {transformers.__version__}", logits, None, strings)


def check_readable(
    written: Any,
    meant: Any,
    tensor_type: str,
    place: str,
    tokenizers: tuple[Any, Any],
) -> Parity:
    """Compare two transformers models, and their tokenizers: what was read back, what was meant.

    Raises:
        DraftsmithError: they differ by more than the tensor type explains.
    """
    family = family_of(meant.config.model_type, place)
    questions = questions_for(meant.config, family)
    theirs, ours = tokenizers
    answers = answers_of(written, questions, theirs)
    return check_parity(answers, meant, ours, questions, TOLERANCE[tensor_type], place)
