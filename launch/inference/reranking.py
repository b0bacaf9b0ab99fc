"""Retrieval by pairs: the candidates nearest to a query, put in the order of the fusion's scores
(ALBEF: Li et al. 2021, section 5).

Embeddings choose, since a score takes a pass through the fusion for each pair; tokens of texts are
kept, those of images come in batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.index.sources import Source
from launch.inference.embedding import Embedded, Embedder
from launch.inference.evaluation import directions, rank_figures, relevance_of
from models.metrics.retrieval import nearest, relevant_ranks, reranked


def reranked_retrieval(
    embedder: Embedder, embedded: Embedded, source: Source, number: int
) -> dict[str, float]:
    """As `retrieval` counts, after the first `number` candidates of each query were scored. Empty
    data: none."""
    queries = directions(embedded, ("image", "text"))
    number_of_texts = max(1, len(embedded.rows["text"].sample))
    found, pairs = {}, {}
    for direction, (own, other) in queries.items():
        relevance = relevance_of(own, other)
        asked, answers = relevance.query_row, relevance.candidate_row
        index = nearest(own.embeds[asked], other.embeds[answers], number)[0]  # [q, k]
        found[direction] = relevance, index
        # as numbers: by image, then by text
        one, another = asked[:, None], answers[index]
        pairs[direction] = (
            one * number_of_texts + another
            if direction == "image_to_text"
            else another * number_of_texts + one
        )
    every = torch.cat([each.flatten() for each in pairs.values()]).unique()
    scores = pair_scores(
        embedder, embedded, source, every // number_of_texts, every % number_of_texts
    )
    values: dict[str, float] = {}
    for direction, (own, other) in queries.items():
        relevance, index = found[direction]
        of_pairs = scores[torch.searchsorted(every, pairs[direction])]
        right = relevance.is_right(torch.arange(len(index)), index)
        ranks = relevant_ranks(own.embeds, other.embeds, relevance)
        values |= rank_figures(direction, reranked(ranks, of_pairs, right), relevance)
    return values


@torch.inference_mode()
def pair_scores(
    embedder: Embedder, embedded: Embedded, source: Source, image: Tensor, text: Tensor
) -> Tensor:
    """[P] float32 of pairs of rows of `embedded`, [P] each, in which those of `image` ascend.
    Raises ValueError for a model without fusion."""
    fusion = embedder.fusion
    if fusion is None:
        raise ValueError(f"{embedder.trained.checkpoint}: scores no pairs; it has no fusion")
    text_tokens = embedder.text_tokens(embedded.rows["text"].texts)
    first, scores = 0, [torch.zeros(0)]
    for tokens in embedder.image_tokens(source, embedded.rows["image"].sample):
        start, end = torch.searchsorted(image, torch.tensor([first, first + len(tokens)])).tolist()
        for part in torch.arange(start, end).split(embedder.batch_size):
            own = [text_tokens[i] for i in text[part].tolist()]
            padded = pad_sequence(own, batch_first=True).to(embedder.device)
            mask = pad_sequence([torch.ones(len(each)) for each in own], batch_first=True).to(
                embedder.device
            )
            own_image = tokens[image[part].to(embedder.device) - first]
            with embedder.autocast():
                scores.append(fusion(own_image, padded, mask).float().cpu())
        first += len(tokens)
    return torch.cat(scores)
