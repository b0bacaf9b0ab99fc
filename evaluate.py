"""Zero-shot retrieval of a checkpoint, on one device, whatever topology it was trained on.

python evaluate.py RUN_DIR                              the newest checkpoint on the held-out samples of the run
python evaluate.py RUN_DIR --checkpoint step-00000100   another one
python evaluate.py RUN_DIR --ema                        the average of its weights, where the run keeps one
python evaluate.py RUN_DIR --val-data jsonl:FILE        other samples
"""

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.loader import MicroBatchDataset, micro_batches
from data.options import DataOptions
from data.prepare import HeldOut, prepare_data
from data.sampler import evaluation_requests
from data.sources import open_source
from data.transforms import eval_transform
from launch.report import recalls, retrieval_table, show
from launch.trained import open_run
from models.retrieval import recall_hits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description="Zero-shot retrieval (R@1, R@5, R@10, both directions) of a checkpoint, as a table and as JSON."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument("--checkpoint", metavar="NAME", help="folder below RUN_DIR/checkpoints (default: the newest)")
    parser.add_argument(
        "--ema", action="store_true", help="the moving average of the weights (the JSON's ema block) instead of the weights"
    )
    parser.add_argument("--val-data", metavar="SPEC", help="samples to retrieve among (default: the held-out samples of the run)")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help="samples at a time (default: 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go (default: RUN_DIR/evaluation-<checkpoint>.json)")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = open_run(arguments.run_dir, arguments.checkpoint, device, arguments.ema)
    options = trained.options
    held_out = prepare_data(DataOptions.from_record(options), trained.record["tokenizer"], arguments.run_dir, progress=True).held_out
    if arguments.val_data:
        source = open_source(arguments.val_data, progress=True)
        held_out = {"validation": HeldOut(source, source.usable())}

    results = {}
    for name, part in held_out.items():
        as_evaluated = eval_transform(options["image_size"])
        dataset = MicroBatchDataset(
            part.source,
            frozenset({"image", "text"}),
            as_evaluated,
            as_evaluated,
            trained.tokenizer,
            options["max_text_tokens"],
            options["seed"],
        )
        image, text = embed(trained.layers, dataset, part, arguments.batch_size, device)
        partner = torch.arange(len(image), device=device)
        totals = {"image_to_text": recall_hits(image, text, partner), "text_to_image": recall_hits(text, image, partner)}
        values = recalls({direction: hits.tolist() for direction, hits in totals.items()}, len(image))
        results |= {f"{name}/{key}": value for key, value in values.items()}

    sizes = {name: len(part.subset) for name, part in held_out.items()}
    name = f"{trained.checkpoint.name}-ema" if arguments.ema else trained.checkpoint.name
    show(retrieval_table(f"Zero-shot retrieval, {name}", [results], sizes))
    output = arguments.json or arguments.run_dir / f"evaluation-{name}.json"
    output.write_text(json.dumps({"step": trained.step, "num_samples": sizes, **results}, indent=2) + "\n", encoding="utf-8")
    print(output)


@torch.no_grad()
def embed(
    layers: list[nn.Module], dataset: MicroBatchDataset, part: HeldOut, batch_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Embeddings of all samples of a held-out set whose pictures can be read: image [n, D], text [n, D]."""
    image, text = [], []
    requests = evaluation_requests(part.subset, 0, 1, batch_size)
    for tensors in tqdm(micro_batches(dataset, requests), total=len(requests), unit="batch", leave=False):
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        for layer in layers:
            tensors = layer(tensors)
        loaded = tensors["image_index"] >= 0  # below: could not be read
        image.append(tensors["image_embeds"][loaded])
        text.append(tensors["text_embeds"][loaded])
    return torch.cat(image), torch.cat(text)


if __name__ == "__main__":
    try:
        main(parse())
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: error: {error}")
