"""Hidden states at the positions from which answers are predicted."""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.distill.batches import Batch


def hidden_at_answers(model: Any, batch: Batch) -> Tensor:
    """Final hidden states from which the answer tokens are predicted, [A, H]."""
    return states_at_answers(model.base_model, batch)[0]


def states_at_answers(
    body: nn.Module, batch: Batch, layers: tuple[int, ...] = ()
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Final hidden states at the answer positions, [A, H], and what some layers read there.

    Args:
        body: a model without its head.
        batch: padded or packed rows; with sources, of an encoder–decoder.
        layers: whose inputs are wanted, of the decoder.
    """
    output = _read(body, batch, states=bool(layers))

    def at_answers(states_BTH: Tensor) -> Tensor:
        return states_BTH.flatten(0, 1)[batch.positions]

    reads = tuple(at_answers(output.hidden_states[layer]) for layer in layers)
    return at_answers(output.last_hidden_state), reads


def _read(body: Any, batch: Batch, *, states: bool) -> Any:
    """The decoder's output."""
    if batch.sources is None:
        ids, position_ids = _rows_for(body, batch)
        return body(
            input_ids=ids,
            attention_mask=_fitting(batch.mask, body),
            position_ids=position_ids,
            use_cache=False,
            output_hidden_states=states,
        )
    encoded_BSH = _encoded(body.get_encoder(), batch.sources, batch.source_mask)
    # Rows that share a source stand side by side.
    times = len(batch.ids) // len(batch.sources)
    masks = {}
    # Decoders of sound, which is never padded, don't know this one.
    if batch.source_mask is not None:
        masks["encoder_attention_mask"] = _repeated(batch.source_mask, times)
    return body.get_decoder()(
        input_ids=batch.ids,
        attention_mask=_fitting(batch.mask, body),
        encoder_hidden_states=_repeated(encoded_BSH, times),
        use_cache=False,
        output_hidden_states=states,
        **masks,
    )


def _encoded(encoder: Any, sources: Tensor, mask: Tensor | None) -> Tensor:
    """The encoder's states [B, S, H] of ids [B, S], or of features [B, bands, frames]."""
    if sources.is_floating_point():
        output = encoder(input_features=sources.to(next(encoder.parameters()).dtype))
    else:
        output = encoder(input_ids=sources, attention_mask=mask)
    states: Tensor = output.last_hidden_state
    return states


def _repeated(rows: Tensor, times: int) -> Tensor:
    """Each row so many times."""
    return rows if times == 1 else rows.repeat_interleave(times, 0)


def _rows_for(body: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Ids and positions, [B, T]; for flash attention packed rows become one, [1, B·T].

    Its kernels look for documents in a single row alone, where every row begins one.
    """
    config = getattr(body, "config", None)
    flash = str(getattr(config, "_attn_implementation", "")).startswith("flash")
    if batch.mask is None and batch.position_ids is not None and flash:
        return batch.ids.reshape(1, -1), batch.position_ids.reshape(1, -1)
    return batch.ids, batch.position_ids


def _fitting(mask: Tensor | None, body: nn.Module) -> Tensor | None:
    """What transformers takes: 1 for tokens, or a mask in the dtype of the scores it is added to.

    Attention of any kind takes the latter.
    """
    if mask is None or mask.dim() == 2:
        return mask
    dtype, device = next(body.parameters()).dtype, mask.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def distance_of_reads(own: tuple[Tensor, ...], target: tuple[Tensor, ...]) -> Tensor:
    """‖s − t‖² / ‖t‖² at each position, its mean over layers: [A].

    Over the norm, since residual streams grow with depth.

    Args:
        own: what the drafter's layers read, [A, H] each.
        target: what they should read.
    """
    ratios = [
        (s.float() - t.float()).square().sum(-1) / t.float().square().sum(-1).clamp_min(1e-6)
        for s, t in zip(own, target, strict=True)
    ]
    return torch.stack(ratios).mean(0)
