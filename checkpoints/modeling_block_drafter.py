"""A drafter that proposes a block of tokens in one pass (Xia et al. 2022, Speculative Decoding).

The text so far is read causally; the masks after it see all of it and one another, and each gives
the token of its own place. This file is saved beside a drafter's weights and needs transformers
alone.
"""

from typing import Any

import torch
import transformers  # noqa: F401  (the class that is saved below this one derives from it)


class BlockDrafting:
    """What `propose` adds to a model whose config has `block_drafting: {size, mask_id}`."""

    config: Any

    @torch.inference_mode()
    def propose(self, text: torch.Tensor, **source: Any) -> torch.Tensor:
        """The likeliest block after each text.

        Args:
            text: [B, T] ids that the decoder has read and written, without padding.
            source: what an encoder reads, as the model's forward takes it: `input_ids` and
                `attention_mask`, or `input_features`; nothing for a model without an encoder.

        Returns:
            [B, size] ids.
        """
        size, mask_id = (self.config.block_drafting[key] for key in ("size", "mask_id"))
        ids = torch.cat([text, text.new_full((len(text), size), mask_id)], 1)
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=text.device).tril()
        seen[-size:] = True
        dtype = next(self.parameters()).dtype  # type: ignore[attr-defined]
        mask = torch.zeros(seen.shape, dtype=dtype, device=text.device)
        mask = mask.masked_fill(~seen, torch.finfo(dtype).min).expand(len(text), 1, -1, -1)
        names = ("input_ids", "attention_mask")
        if self.config.is_encoder_decoder:
            names = ("decoder_input_ids", "decoder_attention_mask")
        inputs = dict(zip(names, (ids, mask), strict=True))
        output = self(**source, **inputs, use_cache=False)  # type: ignore[operator]
        logits = output.logits[:, -size:].clone()
        # A mask is no token, and never proposed.
        logits[..., mask_id] = -torch.inf
        likeliest: torch.Tensor = logits.argmax(-1)
        return likeliest
