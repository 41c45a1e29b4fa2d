"""How a lossy output is compared with the target's own."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.quality import Quality, bleu, measure_quality, rouge, token_identity

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "off"]
TEXTS = st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), max_size=4)


def decode(ids: Sequence[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_equal_outputs_have_full_marks() -> None:
    ids = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 1]]
    found = measure_quality(ids, ids, decode)
    assert found.bleu_signature is not None
    assert found.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found == Quality(2, 2, 1.0, 1.0, 100.0, found.bleu_signature, 1.0, 1.0)


def test_figures_of_different_outputs() -> None:
    output, reference = [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5]
    found = measure_quality([output, [7]], [reference, [7]], decode)
    assert (found.texts, found.identical_texts) == (2, 1)
    assert found.token_identity == found.identical_prefix == 6 / 7
    # n-grams in common: 6 of 7, 4 of 5, 3 of 4, 2 of 3; the lengths are equal.
    assert found.bleu == pytest.approx(100 * (6 / 7 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert found.rouge_1 == found.rouge_l == pytest.approx((5 / 6 + 1) / 2)
    json.dumps(asdict(found), allow_nan=False)


def test_token_identity() -> None:
    assert token_identity([[1, 2, 9, 4]], [[1, 2, 3, 4]]) == (3 / 4, 2 / 4)
    # What one text lacks differs.
    assert token_identity([[1, 2]], [[1, 2, 3, 4]]) == (2 / 4, 2 / 4)
    assert token_identity([[1, 2, 3, 4]], [[1, 2]]) == (2 / 4, 2 / 4)
    assert token_identity([[]], [[1, 2]]) == (0.0, 0.0)
    # Sums over texts, so a long one weighs more.
    assert token_identity([[5], [1] * 9], [[6], [1] * 9]) == (0.9, 0.9)
    assert token_identity([[]], [[]]) == token_identity([], []) == (None, None)


def test_order_counts_for_rouge_l_alone() -> None:
    assert rouge(["a b c d"], ["d c b a"]) == (1.0, 0.25)
    found = measure_quality([[0, 1, 2, 3]], [[3, 2, 1, 0]], decode)
    assert (found.rouge_1, found.rouge_l) == (1.0, 0.25)


def test_bleu_is_the_outputs_measured_by_the_references() -> None:
    # All of the output is right; a third of the reference is missing.
    score, _ = bleu(["the cat sat on"], ["the cat sat on a mat"])
    assert score == pytest.approx(100 * math.exp(1 - 6 / 4))


def test_rouge_is_the_mean_of_f_measures() -> None:
    # Precision 2/2 and recall 2/4, so 2/3; and nothing in common.
    one, longest = rouge(["a b", "x"], ["a b c d", "y"])
    assert one == longest == pytest.approx(1 / 3)


def test_rouge_of_plain_english_is_that_of_the_library() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    own, text = "The cat's on_it: 3.5 mats, -- OK?", "A cat is on it; 3 mats (ok)!"
    scores = RougeScorer(["rouge1", "rougeL"]).score(own, text)
    assert rouge([text], [own]) == (scores["rouge1"].fmeasure, scores["rougeL"].fmeasure)


@pytest.mark.parametrize("text", ["привет, мир", "こんにちは世界", "你好", "Ünïcödé", "안녕 세상"])
def test_equal_texts_of_any_script_are_equal(text: str) -> None:
    assert rouge([text], [text]) == (1.0, 1.0)


def test_ideographs_are_compared_one_by_one() -> None:
    one, longest = rouge(["我喜欢苹果"], ["我喜欢香蕉"])
    assert one == longest == pytest.approx(3 / 5)
    assert rouge(["GPU卡"], ["gpu"])[0] == pytest.approx(2 / 3)
    # sacrebleu's standard tokenizer takes the whole for one word, of which BLEU tells nothing.
    assert bleu(["我喜欢苹果"], ["我喜欢香蕉"]) == (None, None)
    score, signature = bleu(["我喜欢苹果"], ["我喜欢苹果"], "zh")
    assert score == 100.0
    assert signature is not None
    assert "tok:zh" in signature


def test_no_texts_have_no_figures() -> None:
    assert measure_quality([], [], decode) == Quality(0, 0, None, None, None, None, None, None)
    nothing = Quality(1, 1, None, None, None, None, None, None)
    assert measure_quality([[]], [[]], decode) == nothing


def test_bleu_does_not_exist_without_four_words_in_a_row() -> None:
    assert bleu(["the cat sat"], ["the cat sat"]) == (None, None)
    # In another text there are four.
    assert bleu(["the cat sat", "on a mat and"], ["the cat sat", "on a mat and"])[0] == 100.0


def test_an_output_without_words_is_bad_and_not_unknown() -> None:
    assert bleu([""], ["the cat sat on"])[0] == 0.0
    assert rouge([""], ["the cat"]) == rouge(["the cat"], ["?!"]) == (0.0, 0.0)
    assert rouge(["…", "cat"], ["?!", "cat"]) == (1.0, 1.0)


def test_outputs_and_references_must_pair() -> None:
    with pytest.raises(ValueError, match="zip"):
        measure_quality([[1]], [], decode)


@settings(deadline=None)  # the first example loads the libraries
@given(TEXTS)
def test_figures_are_within_their_range_or_none(pairs: list[tuple[str, str]]) -> None:
    texts, own = [a for a, _ in pairs], [b for _, b in pairs]
    for figure, most in [(bleu(texts, own)[0], 100.0), *((f, 1.0) for f in rouge(texts, own))]:
        assert figure is None or 0.0 <= figure <= most
