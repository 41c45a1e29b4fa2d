"""All handling of transformers' key/value caches; their interface changed between 5.17 and 5.24."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.generation import cache_argument
from draftsmith.checkpoints.pair import context_of
from draftsmith.data.sound import Sound

# What an encoder reads: token ids, a sound, or features [bands, frames] of one.
Source = Sequence[int] | Sound | Tensor


def cached(model: Any) -> "CachedModel":
    """A loaded model with its caches; what has an encoder keeps that one's states as well."""
    if family_of(model.config.model_type, "model").has_encoder:
        return CachedEncoderDecoder(model)
    return CachedModel(model)


class CachedModel:
    """A causal model together with the keys and values of the texts it has seen.

    Rows of a batch are texts of any length. Their slots end together: before new tokens are fed,
    rows that were shortened are moved to the right, so that slots count positions between one
    another, as attention windows do, and positions are given explicitly.
    """

    def __init__(self, model: Any) -> None:
        """Wrap `model`; the cache starts empty, for one text."""
        self.model = model
        self.device = model.device
        self.family = family_of(model.config.model_type, "model")
        # Positions that the model can tell apart; None: any number.
        self.context = context_of(model.config, self.family)
        self._argument = cache_argument(model)
        self.reset()

    def reset(self, rows: int = 1, sources: Sequence[Source] = ()) -> None:
        """Forget everything, and start with so many empty texts.

        Args:
            rows: texts of the batch.
            sources: what the encoder of each reads; none without an encoder.
        """
        self._cache = _new_cache()
        # Of each row: the slot of its first token, and its tokens.
        self._starts = [0] * rows
        self.lengths = [0] * rows
        self._keeps_states = False
        # Of the last pass: its states [B, T, H], and how many tokens of each row went before.
        self._states: Tensor | None = None
        self._before: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

    def keep_states(self) -> None:
        """From now on until `reset`, keep the final hidden states of the last pass."""
        self._keeps_states = True

    def last_states(self) -> list[Tensor | None]:
        """Of each text, the final hidden state at its last token, [H].

        None where the last pass did not read that token, or kept no states.
        """
        if self._states is None:
            return [None] * len(self.lengths)
        places = [known - old - 1 for known, old in zip(self.lengths, self._before, strict=True)]
        return [None if p < 0 else self._states[row, p] for row, p in enumerate(places)]

    def borrow_encoder(self, other: "CachedModel") -> bool:
        """Use another model's encoder if it is equal to the own one; there is none here."""
        return False

    def feed(
        self,
        ids_BT: Tensor,
        *,
        keep: int = 0,
        mask_BS: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Run new tokens of rows that are padded to one length, and remember them.

        Args:
            ids_BT: the new tokens.
            keep: return the logits of the last `keep` positions only; 0 returns all.
            mask_BS: 1 for real slots, 0 for padding, over the old and new slots.
            positions_BT: positions of the new tokens, where padding shifts them.

        Returns:
            Logits [B, keep or T, V].
        """
        rows, width = ids_BT.shape
        if len(self.lengths) != rows and not self.length:
            self._starts, self.lengths = [0] * rows, [0] * rows
        logits = self._pass(ids_BT, keep, mask_BS, positions_BT)
        self.lengths = [length + width for length in self.lengths]
        return logits

    def feed_list(self, ids: Sequence[int], *, keep: int = 0) -> Tensor:
        """`feed` for a single row given as a list; logits [keep or T, V]."""
        return self.feed(torch.tensor([list(ids)], device=self.device), keep=keep)[0]

    def feed_rows(
        self, texts: Sequence[Sequence[int]], *, keep: int = 0, block: int = 0
    ) -> list[Tensor]:
        """Run new tokens of every row, any number of each, and remember them.

        Args:
            texts: new tokens of each row; none for a row that waits.
            keep: return the logits of each row's last `keep` tokens only; 0 returns all.
            block: so many last tokens of each row see one another, and not only what is before
                them.

        Returns:
            Of each row, logits [keep or its number of tokens, V].
        """
        self._align()
        if len(texts) == 1 and not block:
            return [self.feed_list(texts[0], keep=keep)] if texts[0] else [torch.empty(0)]
        counts = list(map(len, texts))
        width = max(counts)
        wanted = [range(n)[-keep:] if keep else range(n) for n in counts]
        places = sorted({place for own in wanted for place in own})
        ids_BT = torch.zeros((len(texts), width), dtype=torch.long)
        for row, text in enumerate(texts):
            ids_BT[row, : len(text)] = torch.tensor(list(text), dtype=torch.long)
        mask_BS, positions_BT = self._mask(counts, block)
        logits_BPV = self._pass(
            ids_BT.to(self.device), torch.tensor(places, device=self.device), mask_BS, positions_BT
        )
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]
        return [
            logits_BPV[row, [places.index(place) for place in own]]
            for row, own in enumerate(wanted)
        ]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row."""
        self.truncate([min(length, own) for own in self.lengths])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each row, so many of each."""
        self.lengths = list(lengths)
        ends = [start + n for start, n in zip(self._starts, self.lengths, strict=True)]
        # Slots that only rejected tokens used.
        surplus = int(self._cache.get_seq_length()) - max(ends)
        if surplus > 0:
            self._cache.crop(-surplus)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows of the batch, in the given order."""
        if int(self._cache.get_seq_length()):
            self._cache.batch_select_indices(torch.tensor(list(rows), device=self.device))
        self._starts = [self._starts[row] for row in rows]
        if self._states is not None:
            self._states = self._states[list(rows)]
            self._before = [self._before[row] for row in rows]
        self.truncate([self.lengths[row] for row in rows])

    def _pass(
        self,
        ids_BT: Tensor,
        keep: int | Tensor,
        mask_BS: Tensor | None,
        positions_BT: Tensor | None,
    ) -> Tensor:
        """`_forward`, of which the final states are kept if they are wanted."""
        if not self._keeps_states:
            return self._forward(ids_BT, keep, mask_BS, positions_BT)
        self._before = list(self.lengths)
        hook = self.model.get_decoder().register_forward_hook(self._keep)
        try:
            return self._forward(ids_BT, keep, mask_BS, positions_BT)
        finally:
            hook.remove()

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._states = output[0]

    def _forward(
        self,
        ids_BT: Tensor,
        keep: int | Tensor,
        mask_BS: Tensor | None,
        positions_BT: Tensor | None,
    ) -> Tensor:
        extra: dict[str, Any] = {}
        if mask_BS is not None:
            extra = {"attention_mask": mask_BS, "position_ids": positions_BT}
        output = self.model(
            input_ids=ids_BT,
            use_cache=True,
            logits_to_keep=keep,
            **{self._argument: self._cache},
            **extra,
        )
        logits: Tensor = output.logits
        return logits

    def _mask(self, counts: Sequence[int], block: int) -> tuple[Tensor | None, Tensor | None]:
        """Mask over old and new slots, and positions of the new; None where rows start together.

        Padding after a row's new tokens needs no mask: no token looks ahead, unless in a block.
        """
        if not any(self._starts) and not block:
            return None, None
        width, old = max(counts), int(self._cache.get_seq_length())
        slots = torch.arange(old + width)
        mask = slots >= torch.tensor(self._starts)[:, None]
        positions = torch.tensor(self.lengths)[:, None] + torch.arange(width)
        if block:
            seen_BTS = mask[:, None] & (slots <= old + torch.arange(width)[:, None])
            for row, count in enumerate(counts):
                first = max(0, count - block)
                seen_BTS[row, first:count, old + first : old + count] = True
            nothing = torch.finfo(self.model.dtype).min
            # Added to scores, which every kind of attention takes.
            mask = torch.zeros(seen_BTS.shape).masked_fill(~seen_BTS, nothing)[:, None]
            mask = mask.to(self.model.dtype)
        else:
            mask = mask.long()
        return mask.to(self.device), positions.to(self.device)

    def _align(self) -> None:
        """Move rows to the right, so that all end in the last slot, and drop slots none needs."""
        ends = [start + n for start, n in zip(self._starts, self.lengths, strict=True)]
        width = self.length
        if not width or (len(set(ends)) == 1 and ends[0] == width):
            return
        shifts = torch.tensor(ends) - width
        index = (torch.arange(width) + shifts[:, None]).clamp_min(0).to(self.device)
        for layer in _own_layers(self._cache):
            layer.keys = _gathered(layer.keys, index)
            layer.values = _gathered(layer.values, index)
        self._starts = [width - n for n in self.lengths]


class CachedEncoderDecoder(CachedModel):
    """An encoder–decoder: the encoder reads a text's source once, the decoder writes and is fed.

    Padding of sources is masked; decoders that learn a state for each position are told where
    each row stands, since they take no positions and would count the slots of the batch.
    """

    def __init__(self, model: Any) -> None:
        """Wrap `model`."""
        # Whose encoder's states are taken where it has read the same sources.
        self._lender: CachedEncoderDecoder | None = None
        self._sources: tuple[Source, ...] = ()
        self._encoded: Tensor = torch.empty(0)
        self._heard: Tensor | None = None
        super().__init__(model)

    def reset(self, rows: int = 1, sources: Sequence[Source] = ()) -> None:
        """Forget everything, and let the encoder read."""
        super().reset(rows)
        self._cache = _new_cache(cross=True)
        self._sources = tuple(sources)
        # Never the states of what was read before.
        self._encoded, self._heard = torch.empty(0), None
        if not sources:
            return
        if len(sources) != rows:
            raise ValueError(f"{rows} texts, but {len(sources)} sources")
        lender = self._lender
        if lender is not None and _same(lender._sources, self._sources):
            self._encoded, self._heard = lender._encoded, lender._heard
        else:
            self._encoded, self._heard = self._encode(self._sources)

    def borrow_encoder(self, other: CachedModel) -> bool:
        """Use another model's encoder, in memory and in time, if it is equal to the own one.

        A drafter with an encoder of its own must read for itself (case A31).

        Returns:
            Whether it was equal.
        """
        if not isinstance(other, CachedEncoderDecoder) or not _equal(
            self.model.get_encoder(), other.model.get_encoder()
        ):
            return False
        if self.model.get_encoder() is not other.model.get_encoder():
            block = next(s.block for s in self.family.stacks if s.layers == "encoder_layers")
            path = block.partition(".{layer}")[0].rpartition(".")[0]
            self.model.set_submodule(path, other.model.get_encoder())
        self._lender = other
        return True

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows of the batch, in the given order."""
        super().select(rows)
        index = torch.tensor(list(rows), device=self.device)
        self._sources = tuple(self._sources[row] for row in rows)
        self._encoded = self._encoded[index]
        self._heard = None if self._heard is None else self._heard[index]

    def search_beams(self, start: Sequence[int], settings: Any) -> list[list[int]]:
        """Beam search by transformers for what the encoder has read; the cache stays as it is.

        Args:
            start: what the decoder of each row reads first.
            settings: a `GenerationConfig` that alone counts, whatever the model's own says, with a
                list of ids that end a text.

        Returns:
            Of each row, the ids after the start, up to an end if there is one.
        """
        from transformers import GenerationMixin
        from transformers.modeling_outputs import BaseModelOutput

        own, rows = self.model.generation_config, len(self._encoded)
        heard = self._heard
        if heard is None:
            heard = torch.ones(self._encoded.shape[:2], dtype=torch.long, device=self.device)
        # What settings leave open would be taken from the model's own.
        self.model.generation_config = settings
        try:
            # Not a model's own way, which cuts sounds into windows.
            found = GenerationMixin.generate(
                self.model,
                encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
                attention_mask=heard,
                decoder_input_ids=torch.tensor([list(start)] * rows, device=self.device),
                # Its own would count the layers of the wrong stack.
                **{self._argument: _new_cache(cross=True)},
            )
        finally:
            self.model.generation_config = own
        ends = settings.eos_token_id or ()
        return [_until(row, ends) for row in found[:, len(start) :].tolist()]

    def _encode(self, sources: Sequence[Source]) -> tuple[Tensor, Tensor | None]:
        """The encoder's states [B, S, H] and, where sources were padded, their mask [B, S]."""
        encoder = self.model.get_encoder()
        features = [_features(s) for s in sources if isinstance(s, Tensor | Sound)]
        if features:
            features_BMF = torch.stack(features).to(self.device, self.model.dtype)
            return encoder(input_features=features_BMF).last_hidden_state, None
        texts = [s for s in sources if not isinstance(s, Tensor | Sound)]
        width = max(map(len, texts))
        ids = torch.zeros((len(texts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, source in enumerate(texts):
            ids[row, : len(source)] = torch.tensor(list(source))
            mask[row, : len(source)] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        encoded = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return encoded, mask

    def _forward(
        self,
        ids_BT: Tensor,
        keep: int | Tensor,
        mask_BS: Tensor | None,
        positions_BT: Tensor | None,
    ) -> Tensor:
        with self._placed(positions_BT):
            output = self.model(
                decoder_input_ids=ids_BT,
                encoder_outputs=(self._encoded,),
                attention_mask=self._heard,
                decoder_attention_mask=mask_BS,
                use_cache=True,
                **{self._argument: self._cache},
            )
        logits: Tensor = output.logits
        return logits[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]

    @contextmanager
    def _placed(self, positions_BT: Tensor | None) -> Iterator[None]:
        """Within, the decoder's table of positions is read at these places."""
        if positions_BT is None or self.family.positions is None:
            yield
            return
        table = self.model.get_submodule(self.family.positions)
        places = positions_BT + getattr(table, "offset", 0)

        def looked_up(*_: Any, **__: Any) -> Tensor:
            # Places of padding may lie past the table; nothing sees them. The weight is whole
            # within the module's own pass alone, where it is cut into the parts of processes.
            states: Tensor = table.weight[places.clamp_max(len(table.weight) - 1)]
            return states

        # In place of its own lookup, which counts slots and may reach past the table.
        table.forward = looked_up
        try:
            yield
        finally:
            del table.forward


def _new_cache(cross: bool = False) -> Any:
    """An empty cache, with room for the keys of an encoder's states if `cross`.

    Without the config every layer keeps all of its keys, sliding windows too (the mask still
    hides them): a windowed layer forgets what a rejected draft makes us go back to, and
    transformers 5.17 builds its mask for fewer keys than it returns while it records. Nor does it
    count the layers of the wrong stack.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if cross else DynamicCache()


def _own_layers(cache: Any) -> Any:
    """The layers whose slots grow with the text."""
    return getattr(cache, "self_attention_cache", cache).layers


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end, after which there is padding."""
    last = next((place for place, i in enumerate(ids) if i in ends), len(ids))
    return ids[: last + 1]


def _features(source: Tensor | Sound) -> Tensor:
    return source.features() if isinstance(source, Sound) else source


def _same(some: Sequence[Source], others: Sequence[Source]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _settings(encoder: Any) -> dict[str, Any]:
    """What an encoder's computation may depend on."""
    plain = encoder.config.to_dict()
    unimportant = ("decoder", "architectures", "version", "dtype", "token", "vocab", "_name")
    return {k: v for k, v in plain.items() if not any(part in k for part in unimportant)}


def _equal(some: Any, other: Any) -> bool:
    """Whether two encoders compute the same."""
    if some is other:
        return True
    if type(some) is not type(other) or _settings(some) != _settings(other):
        return False
    own, others = some.state_dict(), other.state_dict()
    return own.keys() == others.keys() and all(
        own[name].shape == others[name].shape and own[name].equal(others[name]) for name in own
    )


def _gathered(states_BHSD: Tensor, index_BW: Tensor) -> Tensor:
    """Slots of each row in another order, [B, H, W, D]."""
    rows = torch.arange(len(index_BW), device=index_BW.device)[:, None]
    return states_BHSD.transpose(1, 2)[rows, index_BW].transpose(1, 2).contiguous()


def padded_inputs(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad ragged prompts on the left.

    Returns:
        ids, attention mask and positions, all [B, T].
    """
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(list(row))
        mask[i, width - len(row) :] = 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)
