"""How far a lossy output is from the target's own greedy output."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from statistics import fmean

import numpy as np

# For ASCII the words of rouge-score's own tokenizer, which drops all other letters, so that even
# equal Cyrillic texts would score 0. Ideographs and kana stand alone, for no space parts them.
_ALONE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")


@dataclass(frozen=True)
class Quality:
    """Outputs compared with the target's own greedy ones; a figure that does not exist is None.

    Attributes:
        texts: how many were compared.
        identical_texts: those with the same tokens throughout.
        token_identity: 0 … 1, positions with the same token / positions of the longer text,
            both summed over texts.
        identical_prefix: the same, but only positions before a text's first difference count.
        bleu: 0 … 100, corpus BLEU of the decoded texts.
        bleu_signature: how sacrebleu computed it.
        rouge_1: 0 … 1, F-measure of words in common, mean over texts.
        rouge_l: 0 … 1, F-measure of the longest common subsequence of words, mean over texts.
    """

    texts: int
    identical_texts: int
    token_identity: float | None
    identical_prefix: float | None
    bleu: float | None
    bleu_signature: str | None
    rouge_1: float | None
    rouge_l: float | None


def measure_quality(
    outputs: Sequence[Sequence[int]],
    references: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    tokenize: str = "13a",
) -> Quality:
    """Compare outputs with the target's own greedy outputs.

    Args:
        outputs: ids emitted for each prompt.
        references: ids that the target alone emits for it.
        decode: text of ids, without special tokens.
        tokenize: sacrebleu's tokenizer; "13a" needs spaces between words, "zh" and "char" do not.

    Raises:
        ValueError: not as many outputs as references.
    """
    identity, prefix = token_identity(outputs, references)
    texts, own_texts = [decode(ids) for ids in outputs], [decode(ids) for ids in references]
    score, signature = bleu(texts, own_texts, tokenize)
    rouge_1, rouge_l = rouge(texts, own_texts)
    return Quality(
        texts=len(outputs),
        identical_texts=sum(list(a) == list(b) for a, b in zip(outputs, references, strict=True)),
        token_identity=identity,
        identical_prefix=prefix,
        bleu=score,
        bleu_signature=signature,
        rouge_1=rouge_1,
        rouge_l=rouge_l,
    )


def token_identity(
    outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> tuple[float | None, float | None]:
    """(positions with the same token, positions before the first difference) / the longer length.

    Both are summed over texts before dividing; (None, None) if there is no token at all.
    """
    equal = prefix = length = 0
    for output, reference in zip(outputs, references, strict=True):
        shorter = min(len(output), len(reference))
        same_N = np.equal(output[:shorter], reference[:shorter])
        equal += int(same_N.sum())
        prefix += int(np.logical_and.accumulate(same_N).sum())
        length += max(len(output), len(reference))
    return (equal / length, prefix / length) if length else (None, None)


def bleu(
    texts: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> tuple[float | None, str | None]:
    """Corpus BLEU, 0 … 100, and sacrebleu's signature (Post 2018).

    (None, None) unless a reference has four words in a row: sacrebleu gives 0 then, even to texts
    that are the references themselves.
    """
    if not references:
        return None, None
    from sacrebleu import BLEU

    metric = BLEU(tokenize=tokenize, force=True)
    if not metric.corpus_score(references, [references]).totals[-1]:
        return None, None
    # Smoothing and exponentials end a little above 100 for equal texts.
    score = min(100.0, metric.corpus_score(texts, [references]).score)
    return score, str(metric.get_signature())


def rouge(texts: Sequence[str], references: Sequence[str]) -> tuple[float | None, float | None]:
    """F-measures of ROUGE-1 and ROUGE-L, 0 … 1, each the mean over texts (Lin 2004).

    Pairs without a word on either side do not count; (None, None) if no other is left. The
    longest common subsequence takes time and memory in the product of both lengths.
    """
    pairs = [
        (own, text)
        for text, own in zip(texts, references, strict=True)
        if _WORD.search(text) or _WORD.search(own)
    ]
    if not pairs:
        return None, None
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    scorer = RougeScorer(["rouge1", "rougeL"], tokenizer=_Words())
    scores = list(starmap(scorer.score, pairs))
    one, longest = (fmean(s[kind].fmeasure for s in scores) for kind in ("rouge1", "rougeL"))
    return one, longest


class _Words:
    """Words as rouge-score asks for them."""

    def tokenize(self, text: str) -> list[str]:
        """Lower-case words of letters and digits."""
        return _WORD.findall(text.lower())
