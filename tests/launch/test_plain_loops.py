"""One step from files to gradients equals that of a plain loop that uses nothing of this project:
PIL, torch, torchvision and transformers. Equal weights, equal files.

Tolerance in fp32: 1e-5 of the norm of each gradient, for pixels, RoIAlign and the blocks of the loss
are computed in another order; and 1e-7 of the norm of all of them, since the gradient of the bias of
keys is 0 and what is computed is rounding.
"""

import json
import math

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer
from torchvision.ops import roi_align
from transformers import BertConfig, BertModel

from bench.plain_regions import write_maps
from data.batching.requests import evaluation_requests
from data.batching.shown import ShownRegions
from data.index.sources import open_source
from data.modalities.tokenizer import train_tokenizer
from data.options import compared
from engine.loss.pair_batch import GatheredRows, Numbers, Rows, align_pair
from launch.config.options import parse_options
from launch.inputs import as_values, micro_batch_dataset
from launch.modalities import Inputs
from launch.setup.model import RunModel

MAPS, SIDE, WIDTH = 6, 64, 16
# smooth: with ReLU, a last digit on either side of 0 is another gradient
VIT = {"patch_size": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 64}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RELATIVE = 1e-5


def plain_step(file, weights, tokenizer):
    """The loss of one batch, all maps of a file, and its gradients by the names of this project."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    images = [Image.open(file.parent / row["image_path"]).convert("RGB") for row in rows]
    squashed = np.stack([image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in images])
    pixels = torch.from_numpy(squashed).permute(0, 3, 1, 2) / 255
    pixels = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    boxes = []
    for row, image in zip(rows, images):
        x, y, width, height = torch.tensor([each["box"] for each in row["regions"]]).T
        scale = torch.tensor([SIDE / image.width, SIDE / image.height] * 2)
        boxes.append(torch.stack([x, y, x + width, y + height], 1) * scale)
    phrases = [each["text"] for row in rows for each in row["regions"]]
    ids = tokenizer([*(row["text"] for row in rows), *phrases], padding=True, return_tensors="pt")

    net = VisionTransformer(SIDE, **VIT)
    net.heads = nn.Identity()
    config = BertConfig(vocab_size=len(tokenizer), **BERT)
    bert = BertModel(config, add_pooling_layer=False)
    heads = nn.ModuleDict(
        {name: nn.Linear(n, WIDTH, False) for name, n in (("image", 32), ("text", 32))}
    )
    heads["region"] = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, WIDTH))
    scales = nn.ParameterDict({name: nn.Parameter(torch.empty(1)) for name in ("image", "region")})
    names = {f"image.{name}": p for name, p in net.named_parameters()}
    names |= {f"text.{name}": p for name, p in bert.named_parameters()}
    names |= {f"head.{n}_projection.weight": heads[n].weight for n in ("image", "text")}
    names |= {f"head.region_projection.{n}": p for n, p in heads["region"].named_parameters()}
    names |= {
        "head.logit_scale": scales["image"],
        "head.region_phrase_logit_scale": scales["region"],
    }
    assert names.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(weights[name])

    tokens = []
    net.encoder.layers.register_forward_hook(lambda _, given, out: tokens.append(out))
    image = F.normalize(heads["image"](net(pixels)), dim=1)
    grid = SIDE // VIT["patch_size"]
    patches = tokens[0][:, 1:].transpose(1, 2).unflatten(2, (grid, grid))
    at_boxes = roi_align(patches, boxes, 1, grid / SIDE, aligned=True).flatten(1)
    region = F.normalize(heads["region"](at_boxes), dim=1)
    hidden = bert(ids["input_ids"], attention_mask=ids["attention_mask"]).last_hidden_state
    mask = ids["attention_mask"][..., None]
    features = (hidden * mask).sum(1) / mask.sum(1)
    text, phrase = F.normalize(heads["text"](features), dim=1).split([len(rows), len(phrases)])

    def infonce(one, other, target, scale):
        logits = scale.exp() * one @ other.T
        target = target / target.sum(1, keepdim=True)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target.T)) / 2

    equal = torch.tensor([[float(a == b) for a in phrases] for b in phrases])
    loss = infonce(image, text, torch.eye(len(rows)), scales["image"])
    loss = loss + infonce(region, phrase, equal, scales["region"])
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in names.items()}


def our_step(file):
    """The same by the parts of a run: its options, reader, towers, heads, rows and losses."""
    bert, vit = (",".join(f"{k}={v}" for k, v in sizes.items()) for sizes in (BERT, VIT))
    words = [
        "--data",
        f"jsonl:{file}",
        "--pairs",
        "image:text,region:text",
        "--image-size",
        str(SIDE),
    ]
    words += ["--image-tower", f"vit_b_32:{vit}", "--text-tower", f"bert-tiny:{bert},pool=mean"]
    options = parse_options([*words, "--embed-dim", str(WIDTH), "--augmentation", "none"])
    source = open_source(options.data[0], compared(options.pairs))
    texts = [text for i in range(MAPS) for text in source.captions(i)]
    texts += [
        p for i in range(MAPS) for region in source.value("region", i) for p in region.phrases
    ]
    tokenizer = train_tokenizer(texts)
    model = RunModel.of(options, tokenizer)
    regions = ShownRegions(source, options.max_regions, options.max_negatives)
    (request,) = evaluation_requests(np.arange(MAPS), 0, 1, MAPS, regions)
    loaded, made, parameters = {}, {}, {}
    for branch, specs in model.layers.items():
        dataset = micro_batch_dataset(source, Inputs(options, tokenizer), {branch})
        batch, _ = dataset.load(request)
        loaded |= batch
        tensors = as_values(batch, options.preprocessing)
        for spec in specs:
            layer = spec.build(0).train()
            parameters |= {layer.canonical_names[n]: p for n, p in layer.named_parameters()}
            tensors = layer(tensors)
        made |= tensors
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    total, roots, gradients = 0.0, [], []
    for pair in model.objective.pairs:
        rows = {
            name: Rows(
                made[f"{name}_embeds"].detach(),
                *(loaded[f"{name}_{label}"] for label in ("position", "index")),
                torch.full_like(loaded[f"{name}_index"], -1),
                loaded[f"{name}_key"],
            )
            for name in pair.rows
        }
        numbers = {name: Numbers(len(own.position)) for name, own in rows.items()}
        counts = {name: [number.items] for name, number in numbers.items()}
        places = {name: own.position for name, own in rows.items()}
        items = {name: number.items for name, number in numbers.items()}
        batch = align_pair(GatheredRows(rows, rows, places, counts, numbers, items), pair)
        scalars = {name: made[f"{pair.prefix}{name}"] for name in pair.loss.parameters}
        part = pair.loss.whole(batch.everyone, {n: v.detach() for n, v in scalars.items()})
        total += sum(float(share.sum()) for share in part.shares.values())
        roots += [made[f"{name}_embeds"] for name in part.embeds] + [*scalars.values()]
        gradients += [*part.embeds.values(), *(part.parameters[name] for name in scalars)]
    torch.autograd.backward(roots, gradients)
    return total, {name: p.grad for name, p in parameters.items()}, weights, tokenizer


def unaligned(file):
    """The maps with boxes half a pixel wider and higher. RoIAlign samples each side as often as its
    length in cells, rounded up: on a whole number of cells a last digit decides how often."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for region in (region for row in rows for region in row["regions"]):
        region["box"] = [*region["box"][:2], *(side + 0.5 for side in region["box"][2:])]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_a_step_with_regions_equals_that_of_a_plain_loop(tmp_path):
    """Wide maps, squashed: loss and the gradient of every parameter."""
    file = unaligned(write_maps(tmp_path, MAPS))
    loss, gradients, weights, tokenizer = our_step(file)
    expected, of_plain = plain_step(file, weights, tokenizer)
    assert math.isclose(loss, float(expected), rel_tol=RELATIVE)
    rounding = 1e-7 * float(torch.cat([each.flatten() for each in of_plain.values()]).norm())
    for name, gradient in of_plain.items():
        error, norm = (float(each.norm()) for each in (gradients[name] - gradient, gradient))
        assert error <= RELATIVE * norm + rounding, (name, error, norm)
