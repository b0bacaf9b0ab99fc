"""Retrieval by pairs: the candidates nearest to a query, put in the order of the fusion's scores
(ALBEF: Li et al. 2021, section 5).

Embeddings choose, since a score takes a pass through the fusion for each pair; tokens of texts are
kept, those of images come in batches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.index.sources import KnownSource
from data.stored.kinds import text_of
from launch.inference.embedding import Embedded, Embedder, as_source
from launch.inference.evaluation import directions, rank_figures
from models.metrics.retrieval import nearest, relevant_ranks, reranked
from models.towers.fusion import Fusion
from models.towers.head import TextTokensHead


def reranked_retrieval(
    embedder: Embedder, embedded: Embedded, source: KnownSource, number: int
) -> dict[str, float]:
    """As `retrieval` counts, after the first `number` candidates of each query were scored. Empty
    data: none. Raises ValueError for a model without fusion."""
    fusion = fusion_of(embedder)
    if fusion is None:
        raise ValueError(f"{embedder.trained.checkpoint}: scores no pairs; it has no fusion")
    num_texts = max(1, len(embedded.rows["text"].sample))
    found, pairs = [], []
    for direction, own, other, relevance in directions(embedded, ("image", "text")):
        asked, answers = relevance.query_row, relevance.candidate_row
        index = nearest(own.embeds[asked], other.embeds[answers], number)[0]  # [q, k]
        image, text = asked[:, None], answers[index]
        if direction == "text_to_image":
            image, text = text, image
        found.append((direction, own, other, relevance, index))
        pairs.append(image * num_texts + text)  # as numbers: by image, then by text
    every = torch.cat([each.flatten() for each in pairs]).unique()  # a pair is scored once
    scores = _scores(embedder, fusion, embedded, source, every // num_texts, every % num_texts)
    values: dict[str, float] = {}
    for (direction, own, other, relevance, index), own_pairs in zip(found, pairs):
        right = relevance.is_right(torch.arange(len(index)), index)
        ranks = relevant_ranks(own.embeds, other.embeds, relevance)
        by_score = reranked(ranks, scores[torch.searchsorted(every, own_pairs)], right)
        values |= rank_figures(direction, by_score, relevance)
    return values


def fusion_of(embedder: Embedder) -> Fusion | None:
    """What scores pairs of tokens; None: the model was trained without."""
    text = text_of(embedder.branches)
    head = embedder.layers[text][-1] if text else None
    return head.fusion if isinstance(head, TextTokensHead) else None


@torch.inference_mode()
def _scores(
    embedder: Embedder,
    fusion: Fusion,
    embedded: Embedded,
    source: KnownSource,
    image: Tensor,
    text: Tensor,
) -> Tensor:
    """[P] float32 of pairs of rows of `embedded`, [P] each, in which those of `image` ascend."""
    images, of_texts = embedded.rows["image"].sample.numpy(), embedded.rows["text"]
    languages = [source.language(i) for i in of_texts.sample.tolist()]
    texts = as_source(of_texts.texts, languages=languages)
    # kept of all texts, [L, F] each without its padding; those of images come in batches below
    text_tokens = [
        own[mask != 0]
        for _, outputs in embedder.outputs("text", texts, np.arange(len(of_texts.texts)))
        for own, mask in zip(outputs["text_tokens"].cpu(), outputs["text_mask"].cpu())
    ]
    first, scores, device = 0, [torch.zeros(0)], embedder.device
    for _, outputs in embedder.outputs("image", source, images):
        tokens = outputs["image_tokens"]  # [b, T, F]
        # the pairs of the images of this batch, which lie behind each other
        start, end = torch.searchsorted(image, torch.tensor([first, first + len(tokens)])).tolist()
        for part in torch.arange(start, end).split(embedder.batch_size):
            own = [text_tokens[i] for i in text[part].tolist()]
            mask = pad_sequence([torch.ones(len(each)) for each in own], batch_first=True)
            padded = pad_sequence(own, batch_first=True)
            own_image = tokens[image[part].to(device) - first]
            with embedder.autocast():
                made = fusion(own_image, padded.to(device), mask.to(device))
            scores.append(made.float().cpu())
        first += len(tokens)
    return torch.cat(scores)
