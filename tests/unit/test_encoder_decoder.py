"""Encoder–decoders decode, draft and are replayed as decoders alone are; blocks of masks too."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.cache import CachedEncoderDecoder, CachedModel, Source, cached
from draftsmith.accept.decode import (
    Generation,
    Limits,
    decode_batch,
    greedy_decode,
    plain_decode,
    speculative_decode,
)
from draftsmith.accept.drafters import AutoregressiveDrafter, BlockDrafter, Drafter, PromptLookup
from draftsmith.accept.replay import (
    RoundCounts,
    greedy_matches,
    replay,
    replay_starts,
    sampling_acceptance,
    text_logprobs,
)
from draftsmith.accept.verify import Greedy, Sampling
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.generation import decoder_start, stop_ids
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.errors import RequestError
from tests.conftest import TINY_COUNTS, TINY_VOCAB, make_model
from tests.unit.test_decode import perturbed, prompts

ALL = SharedVocabulary(TINY_VOCAB)
TIED = {name: family.tied for name, family in families().items()}
SEQ2SEQ = sorted(name for name, family in families().items() if family.has_encoder)
TEXT = [name for name in SEQ2SEQ if not families()[name].config.mel_bins]
START = [1]


def sources(family: str, lengths: Sequence[int], seed: int = 0) -> list[Source]:
    """Token sources of these lengths; for a family that hears, as many sounds."""
    if not families()[family].config.mel_bins:
        return list(prompts(lengths, seed))
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), TINY_COUNTS["mel_bins"], 2 * TINY_COUNTS["frames"])
    return list(torch.randn(shape, generator=generator))


def drafter_of(model: Any, limits: Limits, **settings: Any) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(cached(model), ALL, limits.stop_ids, **settings)


def together(
    target: Any, drafter: Drafter, read: Sequence[Source], k: int, limits: Limits
) -> list[Generation]:
    return decode_batch(
        cached(target),
        drafter,
        [START] * len(read),
        k,
        limits,
        ALL,
        verifiers=[Greedy()] * len(read),
        seeds=list(range(len(read))),
        sources=read,
    )


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_plain_decoding_is_transformers_own(family: str) -> None:
    model = make_model(family)
    assert decoder_start(model) == START
    for source in sources(family, [3, 11]):
        ours = greedy_decode(cached(model), START, Limits(12, frozenset({2})), ALL, source)
        given_ = source if isinstance(source, torch.Tensor) else torch.tensor(list(source))
        inputs = {"input_features" if given_.dim() == 2 else "input_ids": given_[None]}
        # T5's own cache counts the layers of the encoder; without one, nothing is counted.
        theirs = model.generate(
            **inputs, max_new_tokens=12, min_new_tokens=0, do_sample=False, use_cache=False
        )[0].tolist()
        begun = theirs[: len(START)] == START
        assert (theirs[len(START) :] if begun else theirs)[: len(ours.tokens)] == ours.tokens


def test_what_a_decoder_reads_first() -> None:
    """Its start, then what is forced: by places, or as a first word; without a start, an error."""
    model = make_model("bart")
    config = model.generation_config
    config.forced_bos_token_id = 7
    assert decoder_start(model) == [1, 7]
    config.forced_decoder_ids = [[2, 9], [1, 8]]
    assert decoder_start(model) == [1, 8, 9]
    for place in (config, model.config):
        place.decoder_start_token_id = place.bos_token_id = None
    with pytest.raises(RequestError, match="decoder_start_token_id is missing"):
        decoder_start(model)


def differ(values: Iterable[int]) -> bool:
    return len(set(values)) > 1


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_A10_ragged_batches_are_those_alone(family: str) -> None:
    """Sources of 3, 9, 17 and 1 tokens; rows accept different amounts and end at other times.

    The EOS is the padding, and the sources hold it as well as end with it.
    """
    # Other seeds make models that say one word for ever, whatever they read.
    target = make_model(family, seed={"bart": 2, "marian": 1}.get(family, 0))
    drafter = perturbed(target, 0.05)
    assert target.config.pad_token_id == target.config.eos_token_id == 2
    read = [s if isinstance(s, torch.Tensor) else (*s, 2) for s in sources(family, [3, 9, 17, 1])]
    free = [greedy_decode(cached(target), START, Limits(24), ALL, s).tokens for s in read]
    early = next(i for text in free for i in text[1:] if differ([*t, i].index(i) for t in free))
    limits = Limits(24, stop_ids(target) | {early})
    accepted, lengths = set(), set()
    for k in (1, 4):
        batch = together(target, drafter_of(drafter, limits), read, k, limits)
        for source, row in zip(read, batch, strict=True):
            plain = greedy_decode(cached(target), START, limits, ALL, source)
            assert row.tokens == plain.tokens
            alone = speculative_decode(
                cached(target),
                drafter_of(drafter, limits),
                START,
                k,
                limits,
                ALL,
                source=source,
            )
            assert [(r.proposed, r.accepted) for r in row.rounds] == [
                (r.proposed, r.accepted) for r in alone.rounds
            ]
            accepted |= {r.accepted for r in row.rounds}
            lengths.add(len(row.tokens))
    assert differ(lengths), "no row finishes first"
    assert len(accepted) > 2, "the drafter is too good or too bad to show anything"


@settings(max_examples=20, deadline=None)
@given(
    family=st.sampled_from(SEQ2SEQ),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    k=st.integers(1, 6),
    new=st.integers(1, 20),
    scale=st.sampled_from([0.0, 0.05, 0.3]),
    stops=st.sets(st.integers(3, TINY_VOCAB - 1), max_size=12),
    seed=st.integers(0, 9),
)
def test_any_lookahead_is_exact(
    family: str, lengths: list[int], k: int, new: int, scale: float, stops: set[int], seed: int
) -> None:
    target = make_model(family, seed=seed % 3)
    limits = Limits(new, frozenset(stops))
    read = sources(family, lengths, seed)
    batch = together(target, drafter_of(perturbed(target, scale), limits), read, k, limits)
    for source, row in zip(read, batch, strict=True):
        assert row.tokens == greedy_decode(cached(target), START, limits, ALL, source).tokens


def scripted(family: str, script: Sequence[int]) -> Any:
    """A model that says START, then `script`, whatever it has read: ids follow one another."""
    model = make_model(family, **{TIED[family]: False})
    head = model.get_output_embeddings()
    follows = dict(itertools.pairwise([*START, *script]))
    assert len(follows) == len(script), "an id is said twice"

    def say(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        said = torch.zeros_like(logits)
        for row, ids in enumerate(model.last_ids):
            for place, token in enumerate(ids.tolist()[-logits.shape[1] :]):
                said[row, place, follows.get(token, 3)] = 9.0
        return said

    model.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(model, "last_ids", kwargs["decoder_input_ids"]),
        with_kwargs=True,
    )
    head.register_forward_hook(say)
    return model


def spoken(family: str, script: Sequence[int], k: int, limits: Limits) -> Generation:
    """What a pair that agrees on a script emits; the drafter doesn't know what ends a text."""
    model = scripted(family, script)
    (source,) = sources(family, [6])
    draft = drafter_of(model, Limits(limits.max_new_tokens))
    return speculative_decode(cached(model), draft, START, k, limits, ALL, source=source)


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize("eos", [40, 50])
def test_A8_nothing_after_an_eos_counts_in_a_decoder(family: str, eos: int) -> None:
    """The pair agrees on [a, EOS, b, c], and the EOS is a list of two ids."""
    ends = stop_ids(make_model(family, eos_token_id=[40, 50]))
    assert ends == {40, 50}
    row = spoken(family, [7, eos, 8, 9], 4, Limits(12, ends))
    assert row.tokens == [7, eos]
    assert [(r.proposed, r.accepted, r.emitted) for r in row.rounds] == [(4, 2, 2)]


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize(
    ("k", "rounds"), [(5, 1), (2, 1), (1, 2)], ids=["mid-block", "its last", "over two blocks"]
)
def test_A9_a_stop_string_ends_a_decoders_text(family: str, k: int, rounds: int) -> None:
    """'##' of two tokens '#', which stand at positions 1 and 2 of a block of 5, or in two."""
    strings = {7: "a", 9: "#", 10: "#", 11: "b", 12: "c"}
    limits = Limits(
        12, stop_strings=("##",), decode=lambda ids: "".join(strings.get(i, "x") for i in ids)
    )
    row = spoken(family, [7, 9, 10, 11, 12], k, limits)
    assert row.tokens == [7, 9, 10]
    assert len(row.rounds) == rounds
    assert sum(r.emitted for r in row.rounds) == 3


# --- encoders


def test_A31_a_drafter_with_another_encoder_reads_for_itself() -> None:
    """T5 of width 32 with a drafter of width 16, in a ragged batch."""
    target, drafter = make_model("t5"), make_model("t5", seed=1, d_model=16, d_ff=24)
    model = cached(drafter)
    assert not model.borrow_encoder(cached(target))
    limits = Limits(16, frozenset({2}))
    read = sources("t5", [3, 9, 17])
    draft = AutoregressiveDrafter(model, ALL, limits.stop_ids)
    for source, row in zip(read, together(target, draft, read, 4, limits), strict=True):
        assert row.tokens == greedy_decode(cached(target), START, limits, ALL, source).tokens
        # What was proposed is what the drafter says to this source, not to the target's states.
        own = greedy_decode(cached(drafter), START, Limits(1), ALL, source).tokens
        assert (row.rounds[0].accepted > 0) == (own == row.tokens[:1])


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_A31_equal_encoders_read_once(family: str) -> None:
    from draftsmith.checkpoints.shape import shape_of
    from draftsmith.checkpoints.slicing import Selection, compact_model

    target_model = make_model(family)
    table = families()[family]
    shape = shape_of(target_model.config, table)
    small = compact_model(target_model, table, Selection.of_layers(shape, [0, 2]))
    target, model = cached(target_model), cached(small)
    assert model.borrow_encoder(target)
    assert small.get_encoder() is target_model.get_encoder()
    passes = []
    small.get_encoder().register_forward_hook(lambda *_: passes.append(1))
    limits = Limits(10)
    draft = AutoregressiveDrafter(model, ALL, limits.stop_ids)
    read = sources(family, [4, 9])
    rows = decode_batch(
        target,
        draft,
        [START] * 2,
        3,
        limits,
        ALL,
        verifiers=[Greedy()] * 2,
        seeds=[0, 1],
        sources=read,
    )
    assert len(passes) == 1
    for source, row in zip(read, rows, strict=True):
        assert row.tokens == greedy_decode(cached(target_model), START, limits, ALL, source).tokens
    # Alone, or with other sources, it reads for itself.
    model.reset(1, sources(family, [5], seed=3))
    own = model.feed_list(START)
    fresh = cached(small)
    fresh.reset(1, sources(family, [5], seed=3))
    assert own.equal(fresh.feed_list(START))


def test_an_encoder_that_differs_in_one_weight_is_not_borrowed() -> None:
    target, other = make_model("bart"), make_model("bart")
    assert cached(other).borrow_encoder(cached(target))
    other = make_model("bart")
    other.get_encoder().layers[1].fc1.bias.data[3] += 1e-3
    assert not cached(other).borrow_encoder(cached(target))
    other = make_model("bart", activation_function="relu")
    assert not cached(other).borrow_encoder(cached(target))
    assert not cached(make_model("llama")).borrow_encoder(cached(target))


def test_what_was_read_before_is_forgotten() -> None:
    model = cached(make_model("t5"))
    model.reset(1, [[3, 4, 5]])
    model.feed_list(START)
    model.reset(1)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        model.feed_list(START)


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_ragged_rows_reach_the_end_of_the_table(family: str) -> None:
    """32 places, three texts up to the last of them, with drafts that would reach past it."""
    target = make_model(family, max_position_embeddings=32)
    limits, read = Limits(100), sources(family, [3, 9, 17])
    batch = together(target, drafter_of(perturbed(target, 0.05), limits), read, 8, limits)
    for source, row in zip(read, batch, strict=True):
        plain = greedy_decode(cached(target), START, limits, ALL, source)
        assert row.tokens == plain.tokens
        assert len(row.tokens) == 31


def test_texts_and_sources_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="2 texts, but 1 sources"):
        cached(make_model("t5")).reset(2, [[3, 4]])


def test_prompt_lookup_copies_from_the_source() -> None:
    lookup = PromptLookup(frozenset({9}))
    lookup.reset(2, [0, 0], [[4, 5, 6, 7, 9, 8], [3, 3]])
    first, second = lookup.propose([[1, 4, 5], [1, 2]], [5, 5])
    assert (first.tokens, second.tokens) == ([6, 7, 9], [])
    lookup.select([1])
    assert lookup.propose([[1, 3]], [2])[0].tokens == [1, 3]


@pytest.mark.parametrize("family", TEXT)
def test_prompt_lookup_is_exact_with_an_encoder(family: str) -> None:
    target, limits = make_model(family), Limits(20)
    read = sources(family, [12, 20])
    for source, row in zip(
        read, together(target, PromptLookup(frozenset()), read, 4, limits), strict=True
    ):
        assert row.tokens == greedy_decode(cached(target), START, limits, ALL, source).tokens


# --- replay


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_replay_counts_the_rounds_of_an_encoder_decoder(family: str) -> None:
    target = make_model(family)
    drafter, limits = perturbed(target, 0.05), Limits(20, frozenset({5, 40, 41}))
    for source in sources(family, [3, 9, 17]):
        for k in (1, 3, 8):
            row = speculative_decode(
                cached(target), drafter_of(drafter, limits), START, k, limits, ALL, source=source
            )
            matches = greedy_matches(cached(drafter), START, row.tokens, ALL, source)
            found = replay(matches, k, limit=20)
            real = RoundCounts.of_rounds(row.rounds, k)
            assert (found.rounds, found.accepted) == (real.rounds, real.accepted)
            assert found.at_position == real.at_position


def test_sampled_rounds_of_an_encoder_decoder_are_replayed() -> None:
    """Over many texts, expected and real rounds agree within three standard errors."""
    target, warm = make_model("marian"), Warping(1.0)
    drafter, limits, k = perturbed(target, 0.1), Limits(8), 3
    (source,) = sources("marian", [7])
    expected, real = [], []
    for seed in range(120):
        text = plain_decode(cached(target), START, limits, ALL, warm, seed, source).tokens
        logprobs = text_logprobs(cached(target), START, text, ALL, warm, source)
        w = sampling_acceptance(cached(drafter), START, text, logprobs, ALL, warm, source)
        expected.append(replay(w, k, limit=8).rounds)
        verifier = Sampling(warm, torch.Generator().manual_seed(1000 + seed))
        row = speculative_decode(
            cached(target),
            drafter_of(drafter, limits, warping=warm),
            START,
            k,
            limits,
            ALL,
            verifier,
            seed=seed,
            source=source,
        )
        real.append(float(len(row.rounds)))
    difference = torch.tensor(real) - torch.tensor(expected)
    error = float(difference.std()) / len(real) ** 0.5
    assert abs(float(difference.mean())) < 3 * error + 1e-6


# --- blocks of masks


MASK = TINY_VOCAB - 1
SIZE = 4


def block_of(model: Any, limits: Limits) -> BlockDrafter:
    return BlockDrafter(cached(model), ALL, limits.stop_ids, SIZE, MASK)


def in_one_pass(model: Any, text: Sequence[int], source: Source | None) -> list[int]:
    """What a block says, by one uncached forward with the mask written out."""
    ids = torch.tensor([[*text, *[MASK] * SIZE]])
    n = len(text)
    seen = torch.ones(n + SIZE, n + SIZE).tril().bool()
    seen[n:] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    if source is None:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    else:
        logits = model(
            input_ids=torch.tensor([list(source)]),
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            use_cache=False,
        ).logits
    return logits[0, n:].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *TEXT])
def test_a_block_is_read_in_one_pass_with_a_cache_of_the_text(family: str) -> None:
    model = make_model(family, **({"sliding_window": None} if "gemma" in family else {}))
    encoder = families()[family].has_encoder
    read = sources(family, [6, 11]) if encoder else []
    drafter = block_of(model, Limits(1))
    drafter.reset(2, [0, 0], read)
    texts = [[1, 7, 8], [1]]
    for grown in ([], [9, 10], [11]):
        texts = [[*text, *grown] for text in texts]
        drafts = drafter.propose(texts, [SIZE, SIZE])
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            assert draft.tokens == in_one_pass(model, text, read[row] if encoder else None)
            assert draft.q is None
        drafter.rollback([len(text) for text in texts])
    # Rows that wait, and drafts that are asked to be shorter, change nothing for the others.
    waiting, short = drafter.propose(texts, [0, 2])
    assert waiting.tokens == []
    assert short.tokens == in_one_pass(model, texts[1], read[1] if encoder else None)[:2]


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(["llama", "t5", "marian"]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    k=st.integers(1, SIZE),
    new=st.integers(1, 16),
    stops=st.sets(st.integers(3, TINY_VOCAB - 2), max_size=12),
    seed=st.integers(0, 5),
)
def test_blocks_are_exact_and_replayed_from_where_they_begin(
    family: str, lengths: list[int], k: int, new: int, stops: set[int], seed: int
) -> None:
    target, limits = make_model(family, seed=seed), Limits(new, frozenset(stops))
    encoder = families()[family].has_encoder
    given_ = prompts(lengths, seed)
    texts: list[list[int]] = [START] * len(lengths) if encoder else [list(p) for p in given_]
    read = list(given_) if encoder else []
    model = perturbed(target, 0.02)
    rows = decode_batch(
        cached(target),
        block_of(model, limits),
        texts,
        k,
        limits,
        ALL,
        verifiers=[Greedy()] * len(texts),
        seeds=[0] * len(texts),
        sources=read,
    )
    for i, row in enumerate(rows):
        source = read[i] if encoder else None
        assert row.tokens == greedy_decode(cached(target), texts[i], limits, ALL, source).tokens
        room = limits.room(texts[i], cached(target).context)
        found = replay_starts(
            block_of(model, limits), texts[i], row.tokens, [1, k], room, None, source
        )
        assert found[k] == RoundCounts.of_rounds(row.rounds, k)


def test_blocks_need_attention_without_windows_and_room_for_their_masks() -> None:
    with pytest.raises(RequestError, match="its attention has windows"):
        block_of(make_model("mistral", sliding_window=8), Limits(1))
    model = make_model("llama", max_position_embeddings=16)
    assert block_of(model, Limits(1)).context == 16 - SIZE
    target, limits = make_model("llama"), Limits(30)
    row = speculative_decode(
        CachedModel(target), block_of(model, limits), [1, 5], SIZE, limits, ALL
    )
    assert row.tokens == greedy_decode(CachedModel(target), [1, 5], limits, ALL).tokens
    assert row.rounds[-1].proposed == 0


def test_models_are_wrapped_by_what_they_are() -> None:
    assert isinstance(cached(make_model("t5")), CachedEncoderDecoder)
    assert not isinstance(cached(make_model("llama")), CachedEncoderDecoder)
    assert cached(make_model("t5")).context is None
