"""Equal recipes: train.py against a plain loop that uses nothing of this project but its demo's files:
PIL, PyAV, soundfile, torch, torchvision and transformers.

python bench/plain.py regions --seeds 3                          tables to bench/out/
python bench/plain.py clips
python bench/plain.py sounds

Both train a ResNet of four blocks and a small BERT from random values on the same files, with the
same rate, schedule, batch, steps and tokens, in fp32 and without augmentation; so does train.py with all
that its defaults choose. The figures are those of samples that no run trained on.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import roi_align
from torchvision.transforms.functional import normalize
from transformers import BertConfig, BertModel, ClapFeatureExtractor, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.common import (
    Column,
    Figures,
    Study,
    Way,
    call,
    main,
    read_metrics,
    settings,
    train_arguments,
)

SIDES = {"regions": 64, "clips": 32, "sounds": 64}  # of images, frames and spectrograms
FRAMES, SECONDS, RATE = 8, 2.0, 16_000  # of a clip; of a sound
BATCH, WIDTH, LR, DECAY, BETAS, EPS = 24, 64, 5e-4, 0.1, (0.9, 0.98), 1e-6
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 512}
TOKENIZER = "tokenizer"  # beside the lists
Rows = Sequence[Mapping[str, Any]]


# -- files


def write_files(kind: str, folder: Path) -> tuple[Path, Path]:
    """The demo's samples as files and two lists of them, to train on and held out; no caption comes
    twice in the second. Beside them the tokenizer that train.py makes of the first."""
    from data.index.sources import open_source
    from data.modalities.tokenizer import train_tokenizer
    from data.options import compared

    spec, pairs, held_out = DEMO[kind]
    source = open_source(spec, compared(pairs))
    lists: dict[bool, list[Mapping[str, Any]]] = {False: [], True: []}
    seen = set()
    for i in range(len(source)):
        concept, (caption, *_) = source.concept(i), source.captions(i)
        if concept.held_out not in (None, held_out) or concept.held_out and caption in seen:
            continue
        seen |= {caption} if concept.held_out else set()
        row = WRITERS[kind](source, i, folder) | {"text": caption}
        lists[concept.held_out is not None].append(row)
    if kind == "sounds":  # names that training hears, by voices that it does not
        names = sorted(seen)[:240]
        lists = {held: [r for r in rows if r["text"] in names] for held, rows in lists.items()}
    files = folder / "train.jsonl", folder / "test.jsonl"
    for file, rows in zip(files, (lists[False], lists[True])):
        file.write_text("\n".join(map(json.dumps, rows)))
    train_tokenizer([text for row in lists[False] for text in texts_of(row)], folder / TOKENIZER)
    return files


def _write_scene(source: Any, i: int, folder: Path) -> dict[str, Any]:
    (folder / f"{i}.png").write_bytes(source.value("image", i))
    regions = [
        {"xyxy": [*map(float, each.extent)], "unit": "relative", "text": each.phrases[0]}
        for each in source.value("region", i)
    ]
    return {"image_path": f"{i}.png", "regions": regions}


def _write_clip(source: Any, i: int, folder: Path) -> dict[str, Any]:
    clip = source.value("video", i)
    file = folder / f"{source.identity(i).partition('#')[0].replace('/', '-')}.mp4"
    if not file.is_file():
        file.write_bytes(clip.film)
    return {"video_path": file.name, "start_s": clip.start_s, "end_s": clip.end_s}


def _write_sound(source: Any, i: int, folder: Path) -> dict[str, Any]:
    (folder / f"{i}.wav").write_bytes(source.value("audio", i))
    # by its number alone a row would be the same sample in both lists: their captions are equal
    return {"audio_path": f"{i}.wav", "id": f"voice {i}"}


WRITERS: dict[str, Callable[[Any, int, Path], dict[str, Any]]] = {
    "regions": _write_scene,
    "clips": _write_clip,
    "sounds": _write_sound,
}
DEMO = {  # data, pairs, what is held out
    "regions": ("demo:scenes:400", "image:text,region:text", "composition"),
    "clips": ("demo:clips:120", "video:text", "composition"),
    "sounds": ("demo:voices", "audio:text", "voices"),
}


# -- what the plain loop reads


def read_rows(kind: str, file: Path) -> list[dict[str, Any]]:
    """The lines, and `values` for the tower of each."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    films: dict[str, Any] = {}
    extractor = sound_extractor(SIDES["sounds"])
    for row in rows:
        if kind == "regions":
            image = Image.open(file.parent / row["image_path"]).convert("RGB")
            row["values"] = pixels([image], SIDES[kind])[0]
        elif kind == "clips":
            name = row["video_path"]
            if name not in films:
                films[name] = read_film(file.parent / name, SIDES[kind])
            row["film"] = films[name]
        else:
            row["values"] = read_sound(file.parent / row["audio_path"], extractor)
    return rows


def pixels(images: Sequence[Image.Image], side: int) -> torch.Tensor:
    """Squashed: [n, 3, side, side]."""
    resized = [np.array(i.resize((side, side), Image.Resampling.BICUBIC)) for i in images]
    return normalize(torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2) / 255, MEAN, STD)


def read_film(file: Path, side: int) -> tuple[list[float], torch.Tensor]:
    """When each frame begins, and all of them."""
    import av

    with av.open(str(file)) as container:
        frames = [(frame.time, frame.to_image()) for frame in container.decode(video=0)]
    return [time for time, _ in frames], pixels([image for _, image in frames], side)


def of_clip(row: Mapping[str, Any], random: np.random.Generator | None) -> tuple[Any, Any]:
    """Frames from equal parts of the clip, of evaluation from their middles, and their times."""
    begins, frames = row["film"]
    within = np.full(FRAMES, 0.5) if random is None else random.random(FRAMES)
    part = (row["end_s"] - row["start_s"]) / FRAMES
    times = row["start_s"] + (np.arange(FRAMES) + within) * part
    shown = np.searchsorted(begins, times, side="right") - 1
    return frames[shown.clip(0)], torch.from_numpy(times - times[0]).float()


def sound_extractor(side: int) -> ClapFeatureExtractor:
    return ClapFeatureExtractor(
        feature_size=side,
        sampling_rate=RATE,
        hop_length=round(SECONDS * RATE / (side - 1)),
        fft_window_size=1024,
        frequency_max=RATE / 2,
        truncation="rand_trunc",
    )


def read_sound(file: Path, extractor: ClapFeatureExtractor) -> torch.Tensor:
    """Its middle as a grey image of `side` mel bins and frames, [3, side, side]."""
    import soundfile
    from scipy.signal import resample_poly

    samples, rate = soundfile.read(file, dtype="float32")
    common = math.gcd(rate, RATE)
    samples = resample_poly(samples, RATE // common, rate // common)
    most = (SIDES["sounds"] - 1) * extractor.hop_length
    start = max(0, len(samples) - most) // 2
    made = extractor(
        samples[start : start + most], sampling_rate=RATE, max_length=most, return_tensors="pt"
    )
    return ((made["input_features"][0].float().transpose(1, 2) + 30) / 30).expand(3, -1, -1)


# -- the plain model


class OverTime(nn.Module):
    """A block of a transformer over the frames of a clip, which adds their times where it attends;
    at first it changes nothing."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear in (self.out, self.fc2):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        """[T, width] of the frames of one clip, and their times [T]."""
        periods = torch.logspace(math.log2(0.25), math.log2(256), hidden.shape[1] // 2, base=2)
        angles = 2 * math.pi * seconds[:, None] / periods
        given = self.norm_1(hidden) + torch.cat([angles.sin(), angles.cos()], 1)
        parts = self.qkv(given).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        found = F.scaled_dot_product_attention(*parts[:, None])[0]
        hidden = hidden + self.out(found.transpose(0, 1).flatten(1))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm_2(hidden))))


class Model(nn.Module):
    """A ResNet of four blocks, over frames with a block over time behind it, and a small BERT."""

    def __init__(self, kind: str, vocabulary: int) -> None:
        super().__init__()
        self.kind, self.side = kind, SIDES[kind]
        self.net = ResNet(BasicBlock, [1, 1, 1, 1], zero_init_residual=True)
        self.net.fc = nn.Identity()
        self.text = BertModel(BertConfig(vocab_size=vocabulary, **BERT), add_pooling_layer=False)
        self.own_head, self.text_head = nn.Linear(512, WIDTH, False), nn.Linear(128, WIDTH, False)
        self.time = OverTime(512, 8) if kind == "clips" else None
        self.region_head = nn.Sequential(nn.LayerNorm(768), nn.Linear(768, WIDTH))
        for head in (self.own_head, self.text_head, self.region_head[1]):
            nn.init.normal_(head.weight, std=head.in_features**-0.5)  # as CLIP's
        self.scales = nn.Parameter(torch.full((2,), math.log(1 / 0.07)))
        self.maps: dict[str, torch.Tensor] = {}
        for name in ("layer3", "layer4"):
            layer = self.net.get_submodule(name)
            layer.register_forward_hook(
                lambda _, given, out, name=name: self.maps.update({name: out})
            )

    def values(self, rows: Rows, random: np.random.Generator | None = None) -> torch.Tensor:
        if self.time is None:
            features = self.net(torch.stack([row["values"] for row in rows]))
        else:
            frames, times = zip(*(of_clip(row, random) for row in rows))
            hidden = self.net(torch.cat(frames)).split(FRAMES)
            features = torch.stack([self.time(*each).mean(0) for each in zip(hidden, times)])
        return F.normalize(self.own_head(features), dim=1)

    def regions(self, rows: Rows) -> torch.Tensor:
        """Of the images that `values` saw last."""
        boxes = [
            torch.tensor([each["xyxy"] for each in row["regions"]]).float() * self.side
            for row in rows
        ]
        found = [
            roi_align(each, boxes, 1, each.shape[-1] / self.side, aligned=True).flatten(1)
            for each in self.maps.values()
        ]
        return F.normalize(self.region_head(torch.cat(found, 1)), dim=1)

    def texts(self, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean over the tokens."""
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        hidden = self.text(ids, attention_mask=mask).last_hidden_state * mask[..., None]
        return F.normalize(self.text_head(hidden.sum(1) / mask.sum(1, True)), dim=1)


def infonce(
    one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor, texts: Sequence[str], masked: bool
) -> torch.Tensor:
    """Both ways. Rows of equal texts are left out of each other's loss, or as good an answer."""
    logits = scale.clamp(max=math.log(100)).exp() * one @ other.T
    equal = torch.tensor([[a == b for a in texts] for b in texts])
    target = torch.eye(len(texts)) if masked else equal / equal.sum(1, keepdim=True)
    logits = logits.masked_fill(equal & (target == 0), -1e9)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target.T)) / 2


# -- both ways to train


def plain(kind: str, files: tuple[Path, Path], steps: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    random, (rows, test) = np.random.default_rng(seed), (read_rows(kind, f) for f in files)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(files[0].parent / TOKENIZER)
    tokens = partial(tokenizer, padding=True, return_tensors="pt")
    model = Model(kind, len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_at, steps=steps))
    order, losses = [], []
    for _ in range(steps):
        if len(order) < BATCH:
            order = random.permutation(len(rows)).tolist()
        chosen, order = [rows[i] for i in order[:BATCH]], order[BATCH:]
        captions = [row["text"] for row in chosen]
        phrases = [each["text"] for row in chosen for each in row.get("regions", ())]
        values = model.values(chosen, random)
        text, phrase = model.texts(tokens([*captions, *phrases])).split(
            [len(captions), len(phrases)]
        )
        loss = infonce(values, text, model.scales[0], captions, masked=True)
        if phrases:
            own = model.regions(chosen)
            loss = loss + infonce(own, phrase, model.scales[1], phrases, masked=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return {"loss": float(np.mean(losses[-10:])), **measured(model, tokens, test)}


def rate_at(step: int, steps: int) -> float:
    """Warm-up in a tenth of the steps, then a cosine: DeepSpeed's WarmupCosineLR as train.py has it,
    by steps that are done before."""
    number, warm = step + 1, steps // 10
    if number < warm:
        return 0.05 + 0.95 * number / warm
    done = min(1.0, (number - warm + 1) / (steps - warm + 1))
    return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2


def texts_of(row: Mapping[str, Any]) -> list[str]:
    return [row["text"], *(each["text"] for each in row.get("regions", ()))]


@torch.no_grad()
def measured(model: Model, tokens: Callable[..., Any], test: Rows) -> dict[str, float]:
    """R@1 and R@10 of both directions, as parts; of regions phrases that choose their box."""
    model.eval()
    values = torch.cat([model.values(test[i : i + BATCH]) for i in range(0, len(test), BATCH)])
    similarity = values @ model.texts(tokens([row["text"] for row in test])).T
    found = {}
    for way, each in (("from_text", similarity.T), ("to_text", similarity)):
        rank = (each > each.diagonal()[:, None]).sum(1)
        found |= {f"{way}_R@{k}": float((rank < k).float().mean()) for k in (1, 10)}
    if "regions" in test[0]:
        hits = []
        for row in test:
            model.values([row])
            phrases = model.texts(tokens(texts_of(row)[1:]))
            chosen = (phrases @ model.regions([row]).T).argmax(1)
            hits += (chosen == torch.arange(len(phrases))).tolist()
        found["phrase_to_box"] = float(np.mean(hits))
    return found


def ours(
    kind: str, files: tuple[Path, Path], steps: int, seed: int, given: Mapping[str, Any]
) -> dict[str, float]:
    """The same of train.py in one process."""
    modality = {"regions": "image", "clips": "video", "sounds": "audio"}[kind]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        more = {"data": f"jsonl:{files[0]}", "val_data": f"jsonl:{files[1]}", "seed": seed}
        more |= {"run_dir": str(run), "cache": f"{folder}/cache", "steps": steps}
        arguments = train_arguments(
            settings(FIXED, {"pairs": DEMO[kind][1]}, OF_KIND[kind], given, more)
        )
        call([sys.executable, "train.py", *arguments], Path(folder) / "log", kind)
        trained, held_out = read_metrics(run)
    figures = {"loss": float(np.mean([line["loss"] for line in trained[-10:]]))}
    for way, name in (("from_text", f"text_to_{modality}"), ("to_text", f"{modality}_to_text")):
        figures |= {f"{way}_R@{k}": held_out[-1][f"{name}_R@{k}"] for k in (1, 10)}
    if kind == "regions":
        figures["phrase_to_box"] = held_out[-1]["phrase_to_box_R@1"]
    return figures


NET = "resnet18:layers=1-1-1-1,zero_init_residual=true"
FIXED = settings(
    "deepspeed_config=ds_configs/cpu_fp32.json workers=0 trace_every=0 wandb=disabled",
    "eval_every=1000000 text_tower=bert-tiny",
    {"train_batch_size": BATCH, "branches.micro_batch_size": BATCH, "embed_dim": WIDTH},
    {"branches.layout": "merged", "branches.stages": {"merged": 1}, "branches.replicas": 1},
)
OF_KIND: dict[str, dict[str, Any]] = {
    "regions": {"image_tower": NET, "image_size": SIDES["regions"]},
    "clips": {"image_size": SIDES["clips"], "video_frames": FRAMES}
    | {"video_tower": f"{NET},time=transformer,time_layers=1,time_heads=8"},
    "sounds": {"audio_tower": NET, "audio_size": SIDES["sounds"], "audio_seconds": SECONDS},
}


def equal_recipe(kind: str, steps: int) -> dict[str, Any]:
    """What the plain loop does, for train.py's `--set`."""
    augmentation = "audio_augmentation" if kind == "sounds" else "augmentation"
    found: dict[str, Any] = {augmentation: "none", "branches.optimizer_groups": {"no_decay": []}}
    optimizer = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    found |= {f"optimizer.params.{key}": value for key, value in optimizer.items()}
    return found | {"scheduler.params.warmup_num_steps": steps // 10}


def study(kind: str, seeds: int, steps: int) -> Study:
    folder = Path(tempfile.mkdtemp(prefix=f"plain-{kind}-"))
    files = write_files(kind, folder)
    numbers = [len(file.read_text().splitlines()) for file in files]
    of_three: dict[str, Callable[[int], dict[str, float]]] = {
        "plain loop": lambda seed: plain(kind, files, steps, seed),
        "train.py, equal recipe": lambda seed: ours(
            kind,
            files,
            steps,
            seed,
            equal_recipe(kind, steps) | {"tokenizer": str(folder / TOKENIZER)},
        ),
        "train.py, its defaults": lambda seed: ours(kind, files, steps, seed, {}),
    }
    columns = [Column("loss", "loss, last 10 steps", "{:.3f}")]
    if kind == "regions":
        columns.append(Column("phrase_to_box", "phrase → box, %", "{:.1f}", 100))
    for way, heading in (("from_text", "text → {}"), ("to_text", "{} → text")):
        name = heading.format({"regions": "image", "clips": "clip", "sounds": "sound"}[kind])
        columns += [Column(f"{way}_R@{k}", f"{name} R@{k}, %", "{:.1f}", 100) for k in (1, 10)]
    how = f"{numbers[0]} samples, {numbers[1]} others held out, {BATCH} a step, {steps} steps, "
    ways = {name: Way(partial(of_seeds, train, seeds)) for name, train in of_three.items()}
    return Study(f"A plain loop: {kind}", ways, columns, f"{how}{seeds} seeds each.", rounds=1)


def of_seeds(train: Callable[[int], dict[str, float]], seeds: int) -> Figures:
    found = [train(seed) for seed in range(seeds)]
    print(found, flush=True)
    return {key: [each[key] for each in found] for key in found[0]}


def regions(seeds: int = 3, steps: int = 120) -> Study:
    """Scenes: the same figures within the spread of the seeds, and the defaults no worse."""
    return study("regions", seeds, steps)


def clips(seeds: int = 3, steps: int = 120) -> Study:
    """Clips: the same figures within the spread of the seeds, and the defaults no worse."""
    return study("clips", seeds, steps)


def sounds(seeds: int = 3, steps: int = 120) -> Study:
    """Sounds: the same figures within the spread of the seeds, and the defaults no worse."""
    return study("sounds", seeds, steps)


STUDIES = (regions, clips, sounds)


if __name__ == "__main__":
    main("bench.plain")
