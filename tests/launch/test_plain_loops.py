"""One step from files to gradients equals that of a plain loop that uses nothing of this project:
PIL, PyAV, soundfile, SciPy, torch, torchvision and transformers. Equal weights, equal files.

Tolerance in fp32: 1e-5 of the norm of each gradient, for pixels, RoIAlign, attention and the blocks
of the loss are computed in another order; and 1e-7 of the norm of all of them, since the gradient of
the bias of keys is 0 and what is computed is rounding.
"""

import json
import math
import sys

import numpy as np
import pytest
import torch
from launched import ROOT
from maps import write_maps
from PIL import Image
from scipy.signal import resample_poly
from torch import nn
from torch.nn import functional as F
from torchvision import transforms
from torchvision.models import VisionTransformer
from torchvision.ops import roi_align
from transformers import (
    BertConfig,
    BertModel,
    ClapAudioConfig,
    ClapAudioModel,
    ClapFeatureExtractor,
)

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone  # noqa: E402
from bad_films import film  # noqa: E402

from bench.plain import OverTime  # noqa: E402
from data.batching.requests import evaluation_requests  # noqa: E402
from data.batching.shown import ShownAnnotations  # noqa: E402
from data.decoding.sounds import INSTALL  # noqa: E402
from data.index.sources import open_source  # noqa: E402
from data.modalities.tokenizer import train_tokenizer  # noqa: E402
from data.options import compared, derived_of  # noqa: E402
from engine.loss.term_batch import GatheredRows, Numbers, Rows, align  # noqa: E402
from launch.config.options import parse_options  # noqa: E402
from launch.inputs import as_values, micro_batch_dataset  # noqa: E402
from launch.modalities import Inputs  # noqa: E402
from launch.setup.model import RunModel  # noqa: E402

MAPS, SIDE, WIDTH, FRAMES = 6, 64, 16, 4
# smooth: with ReLU, a last digit on either side of 0 is another gradient
VIT = {"patch_size": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 64}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HTSAT = {"patch_embeds_hidden_size": 16, "depths": [2, 2], "num_attention_heads": [2, 4]}
HTSAT |= {"window_size": 4, "spec_size": 64, "num_mel_bins": 16}
HTSAT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
SOUND_S, RATE = 1.0, 48_000
RELATIVE = 1e-5

TONES = [(0.4, 48_000), (1.0, 48_000), (1.7, 48_000), (0.8, 44_100), (1.3, 16_000), (0.25, 22_050)]
FILMS = [(25, (144, 96), 60), (10, (48, 80), 30), (8, (64, 64), 40)]  # frames/s, size, frames
SEGMENTS = [(0.0, 1.2), (1.1, 2.38)]  # of each film; 4 frames are whole milliseconds apart


# -- files


def maps(folder):
    """Boxes half a pixel wider and higher than drawn. RoIAlign samples each side as often as its
    length in cells, rounded up: on a whole number of cells a last digit decides how often."""
    file = write_maps(folder, MAPS)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for region in (region for row in rows for region in row["regions"]):
        region["box"] = [*region["box"][:2], *(side + 0.5 for side in region["box"][2:])]
    return written(file, rows)


def clips(folder):
    """Wide, tall and square films of unequal rates, with two clips each of one caption."""
    pytest.importorskip("av", reason=INSTALL)
    rows = []
    for n, (rate, size, number) in enumerate(FILMS):
        (folder / f"{n}.mp4").write_bytes(film(number, rate=rate, size=size))
        for begin, end in SEGMENTS:
            row = {"video_path": f"{n}.mp4", "start_s": begin, "end_s": end}
            rows.append({**row, "text": f"film {n} is seen" if n else "the same"})
    return written(folder / "clips.jsonl", rows)


def sounds(folder):
    """Shorter and longer ones than the tower hears, of several rates, and one in two channels; one
    caption comes twice."""
    soundfile = pytest.importorskip("soundfile", reason=INSTALL)
    rows = []
    for n, (seconds, rate) in enumerate(TONES):
        samples = tone(seconds, 200 + 90 * n, rate)
        samples = samples * np.linspace(0.2, 1, len(samples))  # each part sounds unlike the others
        channels = np.stack([samples, samples**2], 1) if n == 3 else samples
        name = f"{n}.flac" if n % 2 else f"{n}.wav"
        soundfile.write(folder / name, channels, rate)
        rows.append({"audio_path": name, "text": f"tone {n}" if n > 1 else "the same"})
    return written(folder / "sounds.jsonl", rows)


def written(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


# -- plain loops


class PlainModel(nn.Module):
    """A tower, BERT, and a head; its parameters have the names of this project."""

    def __init__(self, branch, tower, width, tokenizer, **of_head):
        super().__init__()
        self.add_module(branch, tower)
        self.tokenizer = tokenizer
        config = BertConfig(vocab_size=len(tokenizer), **BERT)
        self.text = BertModel(config, add_pooling_layer=False)
        own, text = nn.Linear(width, WIDTH, False), nn.Linear(32, WIDTH, False)
        self.head = nn.ModuleDict({f"{branch}_projection": own, "text_projection": text, **of_head})
        prefix = "" if branch == "image" else f"{branch}_text_"
        self.scale = f"{prefix}logit_scale"
        self.head.register_parameter(self.scale, nn.Parameter(torch.empty(1)))

    def take(self, weights):
        own = dict(self.named_parameters())
        assert own.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    def project(self, name, features):
        return F.normalize(self.head[f"{name}_projection"](features), dim=1)

    def texts(self, texts):
        ids = self.tokenizer(texts, padding=True, return_tensors="pt")
        mask = ids["attention_mask"]
        hidden = self.text(ids["input_ids"], attention_mask=mask).last_hidden_state
        return self.project("text", (hidden * mask[..., None]).sum(1) / mask.sum(1, True))


def infonce(one, other, scale, target=None, masked=None):
    logits = scale.exp() * one @ other.T
    if masked is not None:
        logits = logits.masked_fill(masked, -torch.inf)
    target = torch.eye(len(one)) if target is None else target / target.sum(1, keepdim=True)
    found = [(target * each.log_softmax(1).clamp(min=-1e9)).sum(1) for each in (logits, logits.T)]
    return -sum(each.mean() for each in found) / 2


def equal(texts):
    return torch.tensor([[one == other for one in texts] for other in texts])


def of_samples(model, branch, features, captions):
    """The loss of one pair; samples with equal captions are no negatives of each other."""
    others = equal(captions) & ~torch.eye(len(captions), dtype=torch.bool)
    own, text = model.project(branch, features), model.texts(captions)
    return infonce(own, text, model.head.get_parameter(model.scale), masked=others)


def vision_transformer(kind=VisionTransformer):
    net = kind(SIDE, **VIT)
    net.heads = nn.Identity()
    return net


def normalised(pixels):
    return transforms.functional.normalize(pixels, MEAN, STD)


def plain_regions(file, weights, tokenizer):
    """Squashed images, RoIAlign of the patches; equal phrases are answers as good."""
    of_regions = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, WIDTH))
    net = vision_transformer()
    model = PlainModel("image", net, 32, tokenizer, region_projection=of_regions)
    model.head.region_phrase_logit_scale = nn.Parameter(torch.empty(1))
    model.take(weights)
    rows = read(file)
    images = [Image.open(file.parent / row["image_path"]).convert("RGB") for row in rows]
    squashed = [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in images]
    pixels = normalised(torch.stack([transforms.functional.to_tensor(each) for each in squashed]))
    boxes = []
    for row, image in zip(rows, images):
        x, y, width, height = torch.tensor([each["box"] for each in row["regions"]]).T
        scale = torch.tensor([SIDE / image.width, SIDE / image.height] * 2)
        boxes.append(torch.stack([x, y, x + width, y + height], 1) * scale)
    tokens = []
    net.encoder.layers.register_forward_hook(lambda _, given, out: tokens.append(out))
    captions, phrases = (
        [row["text"] for row in rows],
        [each["text"] for row in rows for each in row["regions"]],
    )
    image, texts = model.project("image", net(pixels)), model.texts([*captions, *phrases])
    text, phrase = texts.split([len(captions), len(phrases)])
    grid = SIDE // VIT["patch_size"]
    patches = tokens[0][:, 1:].transpose(1, 2).unflatten(2, (grid, grid))
    at_boxes = roi_align(patches, boxes, 1, grid / SIDE, aligned=True).flatten(1)
    scale = model.head.region_phrase_logit_scale
    loss = infonce(model.project("region", at_boxes), phrase, scale, equal(phrases).float())
    return loss + infonce(image, text, model.head.logit_scale), model


class OfClips(VisionTransformer):
    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        self.time = nn.ModuleList([OverTime(32, 2)])

    def forward(self, frames, seconds):
        hidden = super().forward(frames)
        for block in self.time:
            hidden = block(hidden, seconds)
        return hidden.mean(0)


def plain_clips(file, weights, tokenizer):
    """Of each clip the frames that are shown in the middles of equal parts; a ViT sees each, and a
    transformer over time all of them."""
    import av

    net = vision_transformer(OfClips)
    model = PlainModel("video", net, 32, tokenizer)
    model.take(weights)
    prepare = transforms.Compose(
        [
            transforms.Resize(SIDE, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIDE),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    rows, features = read(file), []
    for row in rows:
        with av.open(str(file.parent / row["video_path"])) as container:
            frames = [(frame.time, frame.to_image()) for frame in container.decode(video=0)]
        part = (row["end_s"] - row["start_s"]) / FRAMES
        times = [row["start_s"] + (n + 0.5) * part for n in range(FRAMES)]
        shown = [[image for begin, image in frames if begin <= time][-1] for time in times]
        seconds = torch.tensor(times) - times[0]
        features.append(net(torch.stack([prepare(image) for image in shown]), seconds))
    captions = [row["text"] for row in rows]
    return of_samples(model, "video", torch.stack(features), captions), model


def plain_sounds(file, weights, tokenizer):
    """The middle of each sound, by the library's extractor and its model."""
    import soundfile

    model = PlainModel("audio", ClapAudioModel(ClapAudioConfig(**HTSAT)), 32, tokenizer)
    model.take(weights)
    extractor = ClapFeatureExtractor(feature_size=HTSAT["num_mel_bins"], truncation="rand_trunc")
    rows, most, features = read(file), round(SOUND_S * RATE), []
    for row in rows:
        samples, rate = soundfile.read(file.parent / row["audio_path"], dtype="float32")
        samples = samples.mean(1) if samples.ndim == 2 else samples
        common = math.gcd(rate, RATE)
        samples = resample_poly(samples, RATE // common, rate // common)
        start = max(0, len(samples) - most) // 2
        samples = samples[start : start + most]
        made = extractor(samples, sampling_rate=RATE, max_length=most, return_tensors="pt")
        features.append(made["input_features"][0])
    pooled = model.audio(torch.stack(features).float()).pooler_output
    return of_samples(model, "audio", pooled, [row["text"] for row in rows]), model


# -- this project


def our_step(file, flags):
    """The same by the parts of a run: its options, reader, towers, heads, rows and losses."""
    sizes = ",".join(f"{name}={size}" for name, size in BERT.items())
    words = ["--data", f"jsonl:{file}", "--text-tower", f"bert-tiny:{sizes},pool=mean"]
    options = parse_options([*words, "--embed-dim", str(WIDTH), *map(str, flags)])
    source = open_source(options.data[0], compared(options.pairs))
    number, regions = len(source), None
    texts = [text for i in range(number) for text in source.captions(i)]
    if kind := derived_of(options.pairs):
        regions = ShownAnnotations(source, kind, options.max_regions, options.max_negatives)
        every = [region for i in range(number) for region in source.value("region", i)]
        texts += [phrase for region in every for phrase in region.phrases]
    tokenizer = train_tokenizer(texts)
    model = RunModel.of(options, tokenizer)
    (request,) = evaluation_requests(np.arange(number), 0, 1, number, regions)
    loaded, made, parameters = {}, {}, {}
    random = torch.Generator().manual_seed(0)
    for branch, specs in model.layers.items():
        dataset = micro_batch_dataset(source, Inputs(options, tokenizer), {branch})
        batch, _ = dataset.load(request)
        loaded |= batch
        tensors = as_values(batch, options.preprocessing)
        for spec in specs:
            layer = spec.build(0).train()
            own = {layer.canonical_names[n]: p for n, p in layer.named_parameters()}
            for p in own.values():  # what begins as zeros would hide what is behind it
                p.data += 0.02 * torch.randn(p.shape, generator=random)
            parameters |= own
            tensors = layer(tensors)
        made |= tensors
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    total, roots, gradients = 0.0, [], []
    for pair in model.objective.terms:
        part, scalars = pair_loss(pair, loaded, made)
        total += sum(float(share.sum()) for share in part.shares.values())
        roots += [made[f"{name}_embeds"] for name in part.embeds] + [*scalars.values()]
        gradients += [*part.embeds.values(), *(part.parameters[name] for name in scalars)]
    torch.autograd.backward(roots, gradients)
    return total, {name: p.grad for name, p in parameters.items()}, weights, tokenizer


def pair_loss(pair, loaded, made):
    rows = {name: Rows.brought(name, {**loaded, **made}) for name in pair.rows}
    numbers = {name: Numbers(len(own.position)) for name, own in rows.items()}
    counts = {name: [number.items] for name, number in numbers.items()}
    places = {name: own.position for name, own in rows.items()}
    items = {name: number.items for name, number in numbers.items()}
    batch = align(GatheredRows(rows, rows, places, counts, numbers, items), pair)
    scalars = {name: made[f"{pair.prefix}{name}"] for name in pair.loss.parameters}
    return pair.loss.whole(batch.everyone, {n: v.detach() for n, v in scalars.items()}), scalars


def overridden(name, sizes):
    def text(value):
        return "-".join(map(str, value)) if isinstance(value, list) else value

    return f"{name}:{','.join(f'{key}={text(value)}' for key, value in sizes.items())}"


IMAGES = ["--image-size", SIDE, "--augmentation", "none"]
VIT_NAME = overridden("vit_b_32", VIT)
TIME = {"time": "transformer", "time_layers": 1, "time_heads": 2}
VIDEO_NAME = overridden("vit_b_32", VIT | TIME)
LOOPS = {  # files, the plain loop, flags
    "regions": (
        maps,
        plain_regions,
        ["--pairs", "image:text,region:text", *IMAGES, "--image-tower", VIT_NAME],
    ),
    "clips": (
        clips,
        plain_clips,
        ["--pairs", "video:text", *IMAGES, "--video-frames", FRAMES, "--video-tower", VIDEO_NAME],
    ),
    "sounds": (
        sounds,
        plain_sounds,
        ["--pairs", "audio:text", "--audio-seconds", SOUND_S]
        + ["--audio-tower", overridden("hf:clap", HTSAT)],
    ),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_step_equals_that_of_a_plain_loop(kind, tmp_path):
    """Loss and the gradient of every parameter."""
    files, plain, flags = LOOPS[kind]
    file = files(tmp_path)
    loss, gradients, weights, tokenizer = our_step(file, flags)
    expected, model = plain(file, weights, tokenizer)
    expected.backward()
    assert math.isclose(loss, expected.item(), rel_tol=RELATIVE)
    of_plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    rounding = 1e-7 * float(torch.cat([each.flatten() for each in of_plain.values()]).norm())
    for name, gradient in of_plain.items():
        error, norm = (float(each.norm()) for each in (gradients[name] - gradient, gradient))
        assert error <= RELATIVE * norm + rounding, (name, error, norm)
