"""Texts: from captions to token ids.

b: samples of a micro-batch, t: its texts, c: captions that each sample shows, n: phrases, L:
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data.batching.draws import caption_numbers
from data.keys import caption_key
from data.modalities.modality import Loaded, Modality
from data.modalities.tokenizer import batch_tokens

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.index.sources import Source


@dataclass(frozen=True)
class Languages:
    """The languages that a text tower tells apart: `number` of them, some with `names`; texts of
    which nothing is said are of the language `default`."""

    number: int
    default: int
    names: Mapping[str, int]

    def ids(self, given: list[Any]) -> torch.Tensor:
        """int64 [t], of the languages of so many texts, each a name, a number or None. Raises
        ValueError for one that the tower does not know."""
        return torch.tensor([self._id(language) for language in given])

    def _id(self, language: Any) -> int:
        if language is None:
            return self.default
        found = self.names.get(language, language) if isinstance(language, str) else language
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < self.number:
            names = f" or a name: {', '.join(self.names)}" if self.names else ""
            raise ValueError(
                f"the language {language!r} of a sample is none that the text tower knows; give a "
                f"number from 0 to {self.number - 1}{names}"
            )
        return found


class TextModality(Modality):
    """input_ids and attention_mask int64 [t, L]: c texts of each sample, or those that were packed
    by themselves; with `languages` also language_ids int64 [t]. `length_multiple`: of L.

    Where a pair has annotations, their phrases and negatives follow the texts in these tensors, t +
    n in all, and are the rows `phrase`."""

    name = "text"
    count_names = ("truncated_texts", "text_tokens", "padded_text_tokens")
    decodes = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_text_tokens: int,
        length_multiple: int = 1,
        languages: Languages | None = None,
    ) -> None:
        self.tokenizer, self.max_text_tokens = tokenizer, max_text_tokens
        self.length_multiple, self.languages = length_multiple, languages

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        asked = request.texts()  # [t]
        number = asked.position % request.feed_rates.captions_per_image
        texts, absent = [], []
        for i, k in zip(asked.index.tolist(), number.tolist()):
            captions = source.captions(i) or [""]
            if not captions[0]:
                absent.append(i)
            which = 0
            if request.training:
                which = caption_numbers(seed, request.epoch, i, len(captions), k + 1)[k]
            texts.append(captions[which])
        phrases = request.phrases()
        if phrases is not None:
            texts += phrases.texts(source, seed, request.epoch, request.training)
        # [t, L]
        tokens, num_truncated = batch_tokens(
            self.tokenizer, texts, self.max_text_tokens, self.length_multiple
        )
        if self.languages is not None:
            every = asked.index if phrases is None else np.append(asked.index, phrases.index)
            given = [source.language(i) for i in every.tolist()]
            tokens["language_ids"] = self.languages.ids(given)
        mask = tokens["attention_mask"]
        counts = {
            "truncated_texts": num_truncated,
            "text_tokens": int(mask.sum()),
            "padded_text_tokens": mask.numel(),
        }
        key, num_captions = (
            np.array([caption_key(text) for text in texts], np.int64),
            len(asked.index),
        )
        rows = Loaded(tokens, asked.position, asked.index, asked.weight, key[:num_captions])
        further = {}
        if phrases is not None:
            of = (phrases.position, phrases.index, phrases.weight, key[num_captions:])
            further[phrases.kind.rows[1]] = Loaded({}, *of)
        return replace(rows, absent=absent, counts=counts, further=further)
