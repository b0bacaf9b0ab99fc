"""Texts: from captions to token ids.

b: samples of a micro-batch, t: its texts, c: captions that each sample shows, L: tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from data.batching.draws import caption_numbers
from data.modalities.modality import Loaded, Memory, Modality
from data.modalities.tokenizer import batch_tokens_counted

if TYPE_CHECKING:
    from data.batching.sampler import MicroBatchRequest
    from data.index.sources import Source


class TextModality(Modality):
    """input_ids and attention_mask int64 [t, L]: c texts of each sample, or those that were dealt
    by themselves. `length_multiple`: of L."""

    name = "text"
    count_names = ("truncated_texts", "text_tokens", "padded_text_tokens")
    decodes = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_text_tokens: int, length_multiple: int = 1
    ) -> None:
        self.tokenizer, self.max_text_tokens, self.length_multiple = (
            tokenizer,
            max_text_tokens,
            length_multiple,
        )

    def load(
        self, source: Source, request: MicroBatchRequest, seed: int, memory: Memory | None = None
    ) -> Loaded:
        index, position, number = request.texts()  # [t] each
        texts, absent = [], []
        for i, k in zip(index.tolist(), number.tolist()):
            captions = source.captions(i)
            if not captions:
                absent.append(i)
            shown = (
                caption_numbers(seed, request.epoch, i, len(captions), k + 1)[k]
                if request.training and captions
                else 0
            )
            texts.append(captions[shown] if captions else "")
        tokens, num_truncated = batch_tokens_counted(
            self.tokenizer, texts, self.max_text_tokens, self.length_multiple
        )  # [t, L]
        mask = tokens["attention_mask"]
        counts = {
            "truncated_texts": num_truncated,
            "text_tokens": int(mask.sum()),
            "padded_text_tokens": mask.numel(),
        }
        return Loaded(tokens, position, index, request.text_weight(), [], absent, counts)
