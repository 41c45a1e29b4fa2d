"""Writing traces: the target's own text with its top-n log-probabilities, by one or many workers.

Batch `number` of a store depends on the seed and the number alone. Each batch is one shard, so a
killed run loses at most the batches in hand, and the number of workers changes nothing.
"""

import itertools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.accept.cache import CachedEncoderDecoder, cached, padded_inputs
from draftsmith.checkpoints.devices import compute_dtype, default_device
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.generation import (
    banned_ids,
    beam_settings,
    decoder_start,
    never_first,
    stop_ids,
)
from draftsmith.checkpoints.loading import (
    describe,
    load_configs,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from draftsmith.checkpoints.pair import SharedVocabulary, context_of, said_vocabulary
from draftsmith.checkpoints.shape import shape_of
from draftsmith.data.chat import (
    Prompt,
    UserTurn,
    encode_chat,
    encode_source,
    encode_text,
    read_prompts,
    user_turn,
)
from draftsmith.data.corpus import corpus_dataset, corpus_files, count_rows, file_domain
from draftsmith.data.progress import Progress, say
from draftsmith.data.seeds import derived_seed
from draftsmith.data.sound import Sound, feature_extractor
from draftsmith.data.traces import (
    RowKey,
    TraceRow,
    TraceStore,
    id_dtype,
    is_held_out,
    notes_on,
    read_shard,
    shard_name,
    stored,
    write_index,
    write_shard,
)
from draftsmith.distill.vllm_writer import VllmWriter, check_vllm
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import DataSettings, Recipe, TraceSettings

# A self-written batch may give no usable prompt, or none that is new; so many in a row mean that
# none will.
_EMPTY_BATCHES = 10
_POLL_SECONDS = 0.1


@dataclass
class Sample:
    """Tokens being written for one row, and what the target thought of them."""

    prompt: list[int]
    sampled: bool
    domain: str = ""
    source: tuple[int, ...] | Sound | None = None
    beams: int = 1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[Any] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)

    def row(self, id_type: type[np.integer[Any]]) -> TraceRow:
        """As the store keeps it."""
        return TraceRow(
            tokens=np.array([*self.prompt, *self.tokens], np.int32),
            prompt_length=len(self.prompt),
            sampled=self.sampled,
            logprobs=np.array(self.logprobs, np.float32),
            top_ids=np.stack(self.top_ids).astype(id_type),
            top_logprobs=np.stack(self.top_logprobs).astype(np.float16),
            domain=self.domain,
            source=stored(self.source),
            beams=self.beams,
        )


class TextWriter(Protocol):
    """What writes text: `Writer`, or `VllmWriter`.

    Attributes:
        vocabulary: ids that may be said.
        stop_ids: ids that end an answer.
        context: most tokens of prompt and answer; None: any number.
        device: of the generator of the draws.
    """

    vocabulary: SharedVocabulary
    stop_ids: frozenset[int]

    @property
    def context(self) -> int | None:
        """See above."""

    @property
    def device(self) -> torch.device:
        """See above."""

    def write(
        self,
        samples: Sequence[Sample],
        max_new_tokens: int,
        *,
        temperature: float,
        generator: torch.Generator,
        end: frozenset[int],
        top_n: int = 0,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """As `Writer.write`."""


class Writer:
    """A target that writes text in transformers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Take a loaded target."""
        self.model, config = cached(model), model.config
        family = self.model.family
        rows = shape_of(config, family).vocab
        self.vocabulary: SharedVocabulary = said_vocabulary(
            tokenizer, config, family, rows
        ).without(banned_ids(model))
        self.stop_ids, self.never_first = stop_ids(model), sorted(never_first(model))
        self.pad_id = tokenizer.pad_token_id or 0
        self.context, self.device = self.model.context, self.model.device

    @torch.inference_mode()
    def write(
        self,
        samples: Sequence[Sample],
        max_new_tokens: int,
        *,
        temperature: float,
        generator: torch.Generator,
        end: frozenset[int],
        top_n: int = 0,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Continue every sample in place until an id of `end` or `max_new_tokens`.

        Args:
            samples: rows with prompts; `sampled` rows draw at `temperature`, those with `beams` are
                searched, the others are greedy.
            max_new_tokens: most tokens of a row.
            temperature: of the sampled rows.
            generator: source of the draws, on the model's device.
            end: ids that end a row; the id is part of it.
            top_n: likeliest tokens to keep at each position; 0 keeps none.
            on_step: told how many tokens each step wrote.
        """
        device = self.device
        if searched := [s for s in samples if s.beams > 1]:
            self._search(searched, max_new_tokens, end, top_n, on_step)
        active = [s for s in samples if s.beams == 1]
        if not active:
            return
        sources = [s.source for s in active if s.source is not None]
        self.model.reset(len(active) if sources else 1, sources)
        ids, mask, positions = (t.to(device) for t in self._padded(active))
        for _ in range(max_new_tokens):
            logits_BV = self.vocabulary.restrict(
                self.model.feed(ids, keep=1, mask_BS=mask, positions_BT=positions)[:, -1]
            ).float()
            if not active[0].tokens:
                logits_BV[:, [i for i in self.never_first if i < logits_BV.shape[-1]]] = -torch.inf
            tokens = _choose(logits_BV, [s.sampled for s in active], temperature, generator)
            _record(active, logits_BV, tokens, temperature, top_n)
            on_step(len(active))
            going = [i for i, s in enumerate(active) if s.tokens[-1] not in end]
            if not going:
                return
            if len(going) < len(active):
                # Finished rows leave the batch, so that no work goes into padding.
                rows = torch.tensor(going, device=device)
                self.model.select(going)
                tokens, mask, positions = tokens[rows], mask[rows], positions[rows]
                active = [active[i] for i in going]
            ids = tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], -1)
            positions = positions[:, -1:] + 1

    def _search(
        self,
        samples: Sequence[Sample],
        max_new_tokens: int,
        end: frozenset[int],
        top_n: int,
        on_step: Callable[[int], None],
    ) -> None:
        """Answer sources by beam search, then ask what the target thinks of each token."""
        assert isinstance(self.model, CachedEncoderDecoder)
        start = samples[0].prompt
        settings = beam_settings(
            self.model.model,
            samples[0].beams,
            max_new_tokens,
            said=set(range(self.vocabulary.size)).difference(self.vocabulary.holes),
            start=start,
            end=end,
        )
        self.model.reset(len(samples), [s.source for s in samples if s.source is not None])
        answers = self.model.search_beams(start, settings)
        said = self.model.feed_rows([[*start, *answer[:-1]] for answer in answers])
        for sample, answer, logits_TV in zip(samples, answers, said, strict=True):
            logits = self.vocabulary.restrict(logits_TV[len(start) - 1 :]).float()
            logits[0, [i for i in self.never_first if i < logits.shape[-1]]] = -torch.inf
            tokens = torch.tensor(answer, device=logits.device)
            _record([sample] * len(answer), logits, tokens, 1.0, top_n)
            on_step(len(answer))

    def _padded(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        return padded_inputs([s.prompt for s in samples], self.pad_id)


def _choose(
    logits_BV: Tensor, sampled: Sequence[bool], temperature: float, generator: torch.Generator
) -> Tensor:
    tokens = logits_BV.argmax(-1)
    if any(sampled):
        rows = torch.tensor([i for i, s in enumerate(sampled) if s], device=tokens.device)
        tokens[rows] = _draw((logits_BV[rows] / temperature).softmax(-1), generator)
    return tokens


def _draw(probabilities_BV: Tensor, generator: torch.Generator) -> Tensor:
    """One draw a row by inverting the distribution function.

    On a CPU, `multinomial` takes a fifth of a whole decoding step at 50,000 tokens.
    """
    cumulative = probabilities_BV.double().cumsum(-1)
    total = cumulative[:, -1:]
    u = torch.rand(total.shape, generator=generator, device=total.device, dtype=total.dtype)
    if not torch.isfinite(total).all():
        raise DraftsmithError("the target's logits are not numbers; its weights are damaged")
    # right: tokens of probability 0 are stepped over.
    index = torch.searchsorted(cumulative, u * total, right=True)[:, 0]
    return index.clamp_max(probabilities_BV.shape[-1] - 1)


def _record(
    samples: Sequence[Sample], logits_BV: Tensor, tokens: Tensor, temperature: float, top_n: int
) -> None:
    """Append the chosen tokens, and what is kept of the distributions they came from."""
    for sample, token in zip(samples, tokens.tolist(), strict=True):
        sample.tokens.append(token)
    if not top_n:
        return
    logprobs_BV = logits_BV.log_softmax(-1)
    usable = int(torch.isfinite(logits_BV[0]).sum())
    top = logprobs_BV.topk(min(top_n, usable))
    chosen = logprobs_BV.gather(-1, tokens[:, None])[:, 0].tolist()
    warped = chosen
    if temperature != 1.0:
        warped_BV = (logits_BV / temperature).log_softmax(-1)
        warped = warped_BV.gather(-1, tokens[:, None])[:, 0].tolist()
    top_ids, top_logprobs = top.indices.cpu().numpy(), top.values.cpu().numpy()
    for i, sample in enumerate(samples):
        sample.logprobs.append(warped[i] if sample.sampled else chosen[i])
        sample.top_ids.append(top_ids[i])
        sample.top_logprobs.append(top_logprobs[i])


class Prompts:
    """Prompts by batch number.

    Attributes:
        longest: tokens of the longest prompt, or a bound of it.
        left_out: sources that were passed over so far, by why: `too_long` for the encoder, or
            `empty`.
    """

    def __init__(
        self,
        data: DataSettings,
        batch: int,
        tokenizer: Any,
        seed: int,
        reads: "Reads | None" = None,
    ) -> None:
        """Check that prompts can be had at all.

        Args:
            data: the recipe's `data`.
            batch: prompts asked for at a time.
            tokenizer: the target's.
            seed: of their order.
            reads: of an encoder–decoder, whose prompts are what its encoder reads.

        Raises:
            RequestError: the source can't give any.
        """
        if reads is not None and data.source == "self":
            raise RequestError(
                "recipe.data.source: self: an encoder–decoder writes no prompts for itself; give "
                "texts for its encoder by corpus or prompts, with path"
            )
        listener = None if reads is None else reads.listener
        if listener is not None and data.source == "corpus":
            raise RequestError(
                "recipe.data.source: corpus: the target hears sound; set prompts, with path: "
                "JSONL with rows of `audio`, or a folder of sounds"
            )
        self.data, self.batch, self.tokenizer, self.reads = data, batch, tokenizer, reads
        self.turn: UserTurn | None = user_turn(tokenizer) if data.source == "self" else None
        self._rows: Iterator[Prompt] = iter(())
        self.left_out = {"too_long": 0, "empty": 0}
        self.longest = data.prompt_tokens
        if data.source == "corpus":
            self._rows = self._beginnings(seed)
        elif data.source == "prompts":
            start = None if reads is None else reads.start
            prompts = [
                prompt
                for path in data.path
                for prompt in read_prompts(path, tokenizer, start=start, listener=listener)
            ]
            self._rows = self._fitting(prompts)
            self.longest = max(len(p.ids) for p in prompts)
        else:
            self.longest = self._longest_turn()
        self._next = 0

    def get(self, number: int, writer: TextWriter, generator: torch.Generator) -> list[Prompt]:
        """Prompts of a batch; batches are asked for in ascending order. Empty at the end."""
        if self.turn is not None:
            return self._self_written(number, writer, generator)
        skipped = (number - self._next) * self.batch
        self._next = number + 1
        return list(itertools.islice(self._rows, skipped, skipped + self.batch))

    def pass_over(self, batches: int | None) -> None:
        """Read the first batches, or all there are, for what is left out on the way."""
        most = None if batches is None else batches * self.batch
        deque(itertools.islice(self._rows, most), maxlen=0)

    def _longest_turn(self) -> int:
        """A bound of self-written prompts: in the template, and cut into other tokens again."""
        begun = [[{"role": "user", "content": opening}] for opening in self.data.openings]
        turns = (encode_chat(self.tokenizer, messages) for messages in begun)
        # A byte that is no text becomes a sign of three.
        return max(map(len, turns)) + 4 * self.data.prompt_tokens

    def _self_written(
        self, number: int, writer: TextWriter, generator: torch.Generator
    ) -> list[Prompt]:
        """User turns that the target writes itself, through its chat template."""
        assert self.turn is not None
        turn, openings = self.turn, self.data.openings
        starts = [openings[(number * self.batch + i) % len(openings)] for i in range(self.batch)]
        encoded = [self.tokenizer(s, add_special_tokens=False)["input_ids"] for s in starts]
        samples = [Sample([*turn.opening, *ids], sampled=True) for ids in encoded]
        end = writer.stop_ids | {turn.end}
        special = set(self.tokenizer.all_special_ids)
        writer.write(
            samples,
            self.data.prompt_tokens,
            temperature=self.data.prompt_temperature,
            generator=generator,
            end=end,
        )
        prompts = []
        for start, sample in zip(starts, samples, strict=True):
            begun = sample.prompt[len(turn.opening) :]
            written = [t for t in sample.tokens if t not in end]
            # Decoded together: on their own, some tokenizers' first tokens lose their space.
            text = self.tokenizer.decode([*begun, *written]).strip()
            # Control tokens that the target wrote would end the turn when it is encoded again.
            if written and not special & set(written) and text != start.strip():
                prompts.append(encode_chat(self.tokenizer, [{"role": "user", "content": text}]))
        # Equal prompts would be answered equally.
        return [Prompt("", ids, domain="") for ids in dict.fromkeys(map(tuple, prompts))]

    def _beginnings(self, seed: int) -> Iterator[Prompt]:
        """The first tokens of shuffled texts, the files in turn."""
        from datasets import interleave_datasets

        files, encoder = corpus_files(self.data.path), self.reads is not None
        texts = interleave_datasets(
            [
                corpus_dataset([f], self.data.text_key, blank=encoder).map(
                    _with_domain, fn_kwargs={"domain": file_domain(f)}
                )
                for f in files
            ],
            stopping_strategy="all_exhausted_without_replacement",
        ).shuffle(seed=seed, buffer_size=256)
        if self.reads is not None:
            yield from self._fitting(self._sources(texts, self.reads.start))
            return
        for row in texts:
            # No token is longer than its text: enough characters for any tokenizer.
            ids = encode_text(self.tokenizer, row["text"][: 32 * self.data.prompt_tokens])
            yield Prompt("", tuple(ids[: self.data.prompt_tokens]), row["domain"])

    def _sources(self, texts: Iterable[Any], start: Sequence[int]) -> Iterator[Prompt]:
        """Whole texts, for an encoder."""
        for row in texts:
            ids = encode_source(self.tokenizer, row["text"])
            yield Prompt("", tuple(start), row["domain"], tuple(ids))

    def _fitting(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Those whose source is no more than the encoder holds, and more than nothing.

        A text that is cut would be another one.
        """
        most = None if self.reads is None else self.reads.most
        for prompt in prompts:
            if prompt.source == ():
                self.left_out["empty"] += 1
            elif most is not None and len(prompt.source or ()) > most:
                self.left_out["too_long"] += 1
            else:
                yield prompt


@dataclass(frozen=True)
class Reads:
    """How an encoder–decoder is asked.

    Attributes:
        start: ids that its decoder reads before it writes.
        most: tokens of the longest source that its encoder holds; None: any number.
        listener: the folder of the feature extractor through which it hears; None: it reads text.
    """

    start: tuple[int, ...]
    most: int | None
    listener: Path | None = None

    @classmethod
    def of(cls, target: ModelRef) -> "Reads | None":
        """Of a target; None: it has no encoder.

        Raises:
            RequestError: it doesn't say how its decoder begins.
        """
        configs = load_configs(target)
        family, _ = describe(configs.config, target)
        if not family.has_encoder:
            return None
        if family.config.mel_bins:
            # Its positions are the decoder's; how long sounds may be the feature extractor says.
            return cls(tuple(decoder_start(configs)), None, target.folder)
        return cls(tuple(decoder_start(configs)), context_of(configs.config, family))


def _with_domain(row: dict[str, str], domain: str) -> dict[str, str]:
    return row | {"domain": domain}


@dataclass(frozen=True)
class Job:
    """What a worker needs; it can be sent to another process."""

    target: ModelRef
    data: DataSettings
    trace: TraceSettings
    seed: int
    folder: Path
    dtype: str = "auto"

    @classmethod
    def of(cls, recipe: Recipe, target: ModelRef, folder: Path) -> "Job":
        """The trace stage of a recipe."""
        return cls(target, recipe.data, recipe.trace, recipe.seed, folder, recipe.dtype)

    def prompts(self, tokenizer: Any) -> Prompts:
        """The prompts that the target answers.

        Raises:
            RequestError: there are none.
        """
        return Prompts(self.data, self.trace.batch, tokenizer, self.seed, Reads.of(self.target))


def write_batch(
    writer: TextWriter,
    prompts: Prompts,
    job: Job,
    number: int,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> list[TraceRow]:
    """The rows of one batch; empty when prompts have run out."""
    generator = torch.Generator(writer.device)
    generator.manual_seed(derived_seed(job.seed, number))
    usable = prompts.get(number, writer, generator)
    settings = job.trace
    # Past its context the target does not speak as it will be served.
    limit = settings.max_new_tokens
    if (context := writer.context) is not None:
        usable = [p for p in usable if len(p.ids) < context]
        limit = min(limit, context - max((len(p.ids) for p in usable), default=0))
    if not usable:
        return []
    samples = [
        _sample(p, _share(number * settings.batch + i, settings.sampled_share), settings)
        for i, p in enumerate(usable)
    ]
    writer.write(
        samples,
        limit,
        temperature=settings.temperature,
        generator=generator,
        end=writer.stop_ids,
        top_n=settings.top_n,
        on_step=on_step,
    )
    id_type = id_dtype(writer.vocabulary.size)
    return [s.row(id_type) for s in samples]


def _sample(prompt: Prompt, sampled: bool, settings: TraceSettings) -> Sample:
    """A row to write; what will be held out is greedy, for replay holds for no searched text."""
    sample = Sample(list(prompt.ids), sampled, prompt.domain, prompt.source)
    if settings.beams > 1 and not sampled and (content := stored(prompt.source)) is not None:
        sample.beams = 1 if is_held_out(content, settings.validation_share) else settings.beams
    return sample


def _share(number: int, share: float) -> bool:
    """Whether row `number` is in a share of the rows, spread evenly."""
    return int((number + 1) * share) > int(number * share)


def check_engine(settings: TraceSettings, target: ModelRef) -> None:
    """Refuse an engine that can't write with a target, before any work.

    Raises:
        RequestError: it is not installed, or can't load the target.
    """
    _ENGINES[settings.engine].check(target)


def write_traces(recipe: Recipe, target: ModelRef, folder: Path) -> None:
    """Fill `folder` with a store of at least `trace.tokens` answer tokens.

    Raises:
        DraftsmithError: no text came out, or a worker failed.
        RequestError: the prompts can't be had.
    """
    job = Job.of(recipe, target, folder)
    check_engine(job.trace, target)
    engine = _ENGINES[job.trace.engine]
    tokenizer = load_tokenizer(target)
    # Here rather than in the workers, so that a wrong request is told at once.
    job.prompts(tokenizer)
    done = _finished(folder)
    have = sum(key.answer_tokens for keys in done.values() for key in keys)
    with Progress("traces", job.trace.tokens, "tokens", done=have) as progress:
        if not _enough(done, job):
            engine.run(job, done, progress)
    numbers, total, _ = _needed(done, job)
    ran_out = total < job.trace.tokens
    # Read once more: neither a stop nor the number of workers changes what is counted.
    prompts = job.prompts(tokenizer)
    if encoder := prompts.reads is not None:
        prompts.pass_over(None if ran_out else len(numbers))
    if not total:
        raise DraftsmithError(
            f"{target.spec}: no trace could be written; the target's answers were empty"
            if job.data.source == "self"
            else f"{', '.join(job.data.path)}: no usable text ({_skipped(job, prompts)})"
        )
    if ran_out:
        say(f"traces: the prompts ran out at {total} of {job.trace.tokens} tokens")
    numbers, duplicates = _without_duplicates(folder, [n for n in numbers if done[n]])
    if duplicates:
        say(f"traces: {duplicates} texts had been written before and are left out")
    for path in folder.glob("shard-*"):
        if path.name not in map(shard_name, numbers):
            path.unlink()
    if (reads := Reads.of(target)) is not None and reads.listener is not None:
        feature_extractor(reads.listener).save_pretrained(folder)
    write_index(
        folder,
        numbers,
        {
            "target": target.spec,
            "vocabulary": len(tokenizer.get_vocab()),
            "top_n": job.trace.top_n,
            "max_new_tokens": job.trace.max_new_tokens,
            "temperature": job.trace.temperature,
            "beams": job.trace.beams,
            "validation_share": job.trace.validation_share,
        }
        | (_of_encoder(job, prompts) if encoder else {}),
    )
    store = TraceStore(folder)
    for note in notes_on(store.about):
        say(f"traces: {note}")
    say(f"traces: {store.answer_tokens:,} answer tokens, {store.bytes_per_token:.0f} bytes each")


def _of_encoder(job: Job, prompts: Prompts) -> dict[str, Any]:
    """What the index says of sources and answers of an encoder–decoder."""
    ends = sorted(stop_ids(load_configs(job.target)))
    return {"left_out": prompts.left_out, "stop_ids": ends}


def _skipped(job: Job, prompts: Prompts) -> str:
    """Why texts are not used."""
    data, left_out = job.data, prompts.left_out
    if any(left_out.values()):
        most = None if prompts.reads is None else prompts.reads.most
        return (
            f"{left_out['too_long']} sources are longer than the {most} tokens that the encoder of "
            f"{job.target.spec} holds, {left_out['empty']} are empty; give others"
        )
    if data.source != "corpus":
        return "no prompt"
    counts = count_rows(corpus_files(data.path), data.text_key)
    return ", ".join(f"{reason}: {n}" for reason, n in counts.items()) or "the files are empty"


def _finished(folder: Path) -> dict[int, list[RowKey]]:
    """Batch number -> rows of the whole shards in `folder`; damaged ones are removed."""
    done = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        try:
            rows = read_shard(path)
        except DraftsmithError:
            path.unlink()
            continue
        done[int(path.stem.removeprefix("shard-"))] = [RowKey.of(row) for row in rows]
    return done


def _needed(done: dict[int, list[RowKey]], job: Job) -> tuple[list[int], int, bool]:
    """The first batches, without a gap, that reach the wanted tokens.

    All batches if they don't reach them. Texts that were written before count once. A target that
    writes its own prompts never runs out of them; it has said all where many batches bring
    nothing new.

    Returns:
        Their numbers, the tokens that they have, and whether no more are needed.
    """
    numbers: list[int] = []
    seen: set[RowKey] = set()
    total = idle = 0
    most_idle = _EMPTY_BATCHES if job.data.source == "self" else None
    while len(numbers) in done and total < job.trace.tokens and idle != most_idle:
        new = set(done[len(numbers)]) - seen
        numbers.append(len(numbers))
        seen |= new
        total += sum(key.answer_tokens for key in new)
        idle = 0 if new else idle + 1
    return numbers, total, total >= job.trace.tokens or idle == most_idle


def _enough(done: dict[int, list[RowKey]], job: Job) -> bool:
    return _needed(done, job)[2]


def _without_duplicates(folder: Path, numbers: Sequence[int]) -> tuple[list[int], int]:
    """Drop every text that stands in the store before; returns the shards left, and how many went.

    A second time it finds nothing, so it may be interrupted.
    """
    seen: set[RowKey] = set()
    kept, dropped = [], 0
    for number in numbers:
        rows = read_shard(folder / shard_name(number))
        new = []
        for row in rows:
            if (key := RowKey.of(row)) not in seen:
                seen.add(key)
                new.append(row)
        dropped += len(rows) - len(new)
        if new:
            kept.append(number)
            if len(new) < len(rows):
                write_shard(folder, number, new)
    return kept, dropped


def worker_count(settings: TraceSettings) -> int:
    """Processes that write: one on an accelerator, one a core on a CPU."""
    if settings.workers:
        return settings.workers
    return 1 if default_device() != "cpu" else len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class _Engine:
    """What runs the target.

    Attributes:
        check: refuses a target that it can't write with.
        run: writes batches that are not done until there are enough.
    """

    check: Callable[[ModelRef], None]
    run: Callable[[Job, dict[int, list[RowKey]], Progress], None]


class _Team:
    """Worker processes, and what they tell: tokens as they come, batches when they are done."""

    def __init__(self, job: Job, done: Sequence[int]) -> None:
        """Start them. Spawned, not forked: a fork after torch has used its threads can hang."""
        context = torch.multiprocessing.get_context("spawn")
        self.finished, self.stop = context.SimpleQueue(), context.Event()
        self.written = context.Value("q", 0)
        workers = worker_count(job.trace)
        self.processes = [
            context.Process(
                target=_worker,
                args=(job, i, workers, done, self.finished, self.written, self.stop),
                daemon=True,
            )
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()

    def active(self) -> bool:
        """Whether there is still something to hear."""
        return any(p.is_alive() for p in self.processes) or not self.finished.empty()

    def check(self) -> None:
        """Raise if a worker was ended from outside: its batches would be missed for ever."""
        if failed := [p.exitcode for p in self.processes if p.exitcode]:
            raise DraftsmithError(
                f"a trace worker was ended from outside (exit code {failed[0]}; out of memory?); "
                "lower trace.batch or trace.workers, then start the same command again"
            )

    def end(self) -> None:
        """End all of them, whatever they are doing."""
        self.stop.set()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def _batches(
    writer: TextWriter,
    prompts: Prompts,
    job: Job,
    numbers: Iterable[int],
    done: Container[int],
    on_step: Callable[[int], None],
) -> Iterator[tuple[int, list[RowKey]]]:
    """Write those of `numbers` that are not done until prompts run out; what each holds."""
    empty = 0
    for number in numbers:
        if number in done:
            continue
        rows = write_batch(writer, prompts, job, number, on_step)
        if rows:
            write_shard(job.folder, number, rows)
        yield number, [RowKey.of(row) for row in rows]
        empty = 0 if rows else empty + 1
        if empty and (job.data.source != "self" or empty == _EMPTY_BATCHES):
            return


def _run_vllm(job: Job, done: dict[int, list[RowKey]], progress: Progress) -> None:
    """Write with vLLM, which has its own processes, until there are enough; fills `done`."""
    tokenizer = load_tokenizer(job.target)
    prompts = job.prompts(tokenizer)
    writer = VllmWriter(
        job.target,
        tokenizer,
        job.trace,
        dtype=compute_dtype(job.dtype, default_device()),
        seed=job.seed,
        longest_prompt=prompts.longest,
    )
    with closing(writer):
        _write_here(writer, prompts, job, done, progress)


def _write_here(
    writer: TextWriter,
    prompts: Prompts,
    job: Job,
    done: dict[int, list[RowKey]],
    progress: Progress,
) -> None:
    """Write in this process until the store has its tokens or prompts run out; fills `done`."""
    for number, keys in _batches(writer, prompts, job, itertools.count(), done, progress.update):
        done[number] = keys
        if _enough(done, job):
            return


def _run_transformers(job: Job, done: dict[int, list[RowKey]], progress: Progress) -> None:
    """Write with transformers; a single worker on a CPU needs no process of its own.

    On an accelerator it has one, which gives back all memory that it took.
    """
    if worker_count(job.trace) > 1 or default_device() != "cpu":
        _run_workers(job, done, progress)
        return
    threads = torch.get_num_threads()
    try:
        _write_here(*_tools(job), job, done, progress)
    except DraftsmithError:
        raise
    except Exception as error:  # as those of workers are told
        raise DraftsmithError(_failed(job, f"{type(error).__name__}: {error}")) from error
    finally:
        torch.set_num_threads(threads)


def _tools(job: Job) -> tuple[Writer, Prompts]:
    """What a worker writes with, and from.

    One thread each: several small processes do better than threads that wait for each other.
    """
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(job.target)
    prompts = job.prompts(tokenizer)
    dtype = compute_dtype(job.dtype, default_device())
    return Writer(load_model(job.target, dtype=dtype), tokenizer), prompts


def _failed(job: Job, problem: str) -> str:
    return f"{job.target.spec}: a trace worker failed: {problem}"


def _run_workers(job: Job, done: dict[int, list[RowKey]], progress: Progress) -> None:
    """Run workers until the store has its tokens or prompts run out; fills `done`."""
    team, shown = _Team(job, sorted(done)), 0
    try:
        while team.active():
            progress.update(team.written.value - shown)
            shown = team.written.value
            if team.finished.empty():
                team.check()
                time.sleep(_POLL_SECONDS)
                continue
            number, keys, problem = team.finished.get()
            if problem:
                raise DraftsmithError(_failed(job, problem))
            done[number] = keys
            if _enough(done, job):
                # What is in hand would be thrown away.
                return
        team.check()
    finally:
        team.end()


def _worker(
    job: Job,
    worker: int,
    workers: int,
    done: Sequence[int],
    finished: Any,
    written: Any,
    stop: Event,
) -> None:
    """Write every `workers`-th batch that is not done yet.

    Reports number and keys of each, or a problem.
    """
    # Ctrl-C is the parent's business; it ends the workers, which then tidy up behind themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parent = os.getppid()

    def count(tokens: int) -> None:
        # A parent that was killed can't say stop.
        if os.getppid() != parent:
            os._exit(1)
        with written.get_lock():
            written.value += tokens

    try:
        quiet_transformers()
        numbers = itertools.count(worker, workers)
        for number, keys in _batches(*_tools(job), job, numbers, done, count):
            finished.put((number, keys, ""))
            if stop.is_set():
                return
    except Exception as error:  # told to the parent, which raises it
        name = "" if isinstance(error, DraftsmithError) else f"{type(error).__name__}: "
        finished.put((-1, [], f"{name}{error}"))
    finally:
        # Python prints what is raised while it ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_ENGINES = {
    "transformers": _Engine(check=lambda target: None, run=_run_transformers),
    "vllm": _Engine(check=check_vllm, run=_run_vllm),
}
