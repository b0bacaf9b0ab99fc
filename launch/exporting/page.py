"""The README.md of an exported folder: a model card as the Hugging Face hub reads it, what the
model is, how it is loaded, and what the run that trained it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData

from common.files import read_json
from common.markdown import code, fenced, words
from engine.batch import BranchBatch
from launch.config.groups import first_weights, tower_names
from launch.exporting.inputs import CLAP, PIPELINE_TOKENS, is_padded_otherwise
from launch.exporting.loading import seconds_of_clip
from launch.inference.adapters import ADAPTERS, TOWER_IN
from launch.inference.trained import Trained
from launch.records import AVERAGED, OPEN_CLIP, STATE_DICT
from launch.reporting.reading import RunData, read_folder
from launch.terminal.tables import Table, retrieval_rows
from models.towers.layers import Tower
from models.weights.names import AUDIO, FUSION, OWN_TOWERS, REGIONS, TEXT_FOLDER

# the hub's words for what CLIP and SigLIP, and CLAP, are used for
TASKS = {"image": "zero-shot-image-classification", "audio": "zero-shot-audio-classification"}

LOAD = """`modeling_export.py` loads this folder with public libraries alone{libraries}:

```python
from modeling_export import load

model = load(".")
```

| call | returns |
|---|---|
{calls}

Embeddings have the length 1."""
CALLS = {
    "image": (
        "`model.pixel_values(FILE)` | what the image tower reads, [3, H, W], as the model was "
        "evaluated",
        "`model.embed_images(PIXEL_VALUES)` | the embeddings [B, D] of [B, 3, H, W]",
    ),
    "text": ("`model.embed_texts(TEXTS)` | the embeddings [B, D] of a list of texts",),
    "audio": (
        "`model.input_features(FILE)` | what the audio tower reads of a sound, decoded by "
        "`soundfile` and brought to its rate by SciPy; of one longer than a clip, the middle",
        "`model.embed_sounds(INPUT_FEATURES)` | the embeddings [B, D] of a batch of these",
    ),
}

OF_TRANSFORMERS = """transformers alone loads it too. The embeddings, not yet of length 1, are the
`pooler_output` of what it returns, or that itself before transformers 5:

```python
from transformers import AutoTokenizer, {kind}

library_model = {kind}.from_pretrained(".").eval()
library_tokenizer = AutoTokenizer.from_pretrained(".")
tokens = library_tokenizer(["a red apple"], {padding}, truncation=True, return_tensors="pt")
text = library_model.get_text_features({given})
{others}
```"""
# where the library's processor does not make what the tower reads, the folder's own code does
PICTURES = """
from PIL import Image
from transformers import AutoImageProcessor

processor = AutoImageProcessor.from_pretrained(".")
pixels = processor(Image.open("apple.jpg"), return_tensors="pt")
image = library_model.get_image_features(**pixels)"""
FILLED_UP = """
image = library_model.get_image_features(model.pixel_values("apple.jpg")[None])"""
PATCHES = """
from modeling_export import patches

pixels = patches(model.pixel_values("apple.jpg")[None], {side})
image = library_model.get_image_features(**pixels)"""
SOUNDS = """
sounds = model.input_features("apple.wav")[None]
audio = library_model.get_audio_features(sounds)"""
OF_SOUNDS = """transformers' `ClapProcessor` and its pipeline repeat a short sound to whole seconds and
cut a long one at random. `model.input_features` prepares sounds as in evaluation."""

WITH_OWN = """## Further towers

`{file}` holds the weights, under their own names, of {branches}, which no public library has. Wye loads
them with the Python module `{modules}`, which is not in this folder: `evaluate.py FOLDER --import-module
{modules} …`, and `train.py --import FOLDER --import-module {modules} …` begins from them. `modeling_export.py`
leaves them out."""
OF_CLIPS = """## Clips

This model was trained on clips of films, of which it saw {frames} frames each at most{rate}, from
the middles of as many equal parts. `modeling_clips.py` takes them from a film, with PyAV (`av`):

```python
from modeling_clips import Clips

clips = Clips(model)
frames = clips.frames("apple.mp4")  # [T, 3, H, W]; of 2.0 to 5.5 s: clips.frames(FILE, 2.0, 5.5)
video_embeds = clips.embed(frames[None])  # [1, D], of length 1
text_embeds = model.embed_texts(["an apple falls"])
similarities = video_embeds @ text_embeds.T
```

The image tower embeds each frame alone, and the embedding of a clip is the mean of these before
their length is made 1, brought to the length 1. `model.embed_images` returns frames of length 1,
whose mean is another vector: use `clips.embed`{library}"""
CLIPS_OF_LIBRARY = """, or the library's own model:

```python
import torch

features = library_model.{method}(frames)
features = getattr(features, "pooler_output", features)
video = torch.nn.functional.normalize(features.mean(0, keepdim=True), dim=-1)
```"""

OF_OPEN_CLIP = """OpenCLIP alone loads it too, and from the hub as `hf-hub:ORGANISATION/MODEL` once
it has been uploaded. `preprocess` is what the images are given to:

```python
import open_clip

library_model, _, preprocess = open_clip.create_model_and_transforms("local-dir:.")
library_model.eval()  # OpenCLIP makes models ready to train
tokenizer = open_clip.get_tokenizer("local-dir:.")
```"""
# OpenCLIP looks for `hf_model_name` in the current folder, whatever folder the model is in
OF_OPEN_CLIP_WITH_HF = f"""OpenCLIP alone loads it too. Its text tower is one of transformers, whose
configuration OpenCLIP looks for in the current folder, where `local-dir:.` is enough. These lines
load it from any folder. `preprocess` is what the images are given to:

```python
import json
import open_clip

folder = "."
with open(f"{{folder}}/open_clip_config.json") as file:
    text = json.load(file)["model_cfg"]["text_cfg"]
text |= {{"hf_model_name": f"{{folder}}/{TEXT_FOLDER}", "hf_model_pretrained": False}}
library_model, _, preprocess = open_clip.create_model_and_transforms(
    f"local-dir:{{folder}}", text_cfg=text
)
library_model.eval()  # OpenCLIP makes models ready to train
tokenizer = open_clip.get_tokenizer(f"local-dir:{{folder}}")
```

Before an upload to the hub, give `hf_model_name` in `open_clip_config.json` the id of a published
model of the same configuration, and `hf_tokenizer_name` the id of this one."""
PIPELINE = """So does its pipeline, which does not cut long texts:

```python
from transformers import pipeline

classify = pipeline("zero-shot-image-classification", model=".")
scores = classify("apple.jpg", candidate_labels=["a red apple", "snow"], hypothesis_template="{}")
```"""
NO_PIPELINE = f"""Its pipeline and processor pad the texts of SigLIP to {PIPELINE_TOKENS} tokens, and
this model reads texts of {{most}}: both score it wrongly or refuse it. Call it as above."""

OF_STATE_DICT = """transformers has no model that is this one as a whole:

{differences}

`model.safetensors` has the tensors of each tower under its own library's names, behind the name of
its modality ({prefixes}), and the projections and scalars behind `head.`."""

WITH_ADAPTERS = """## Adapters

`model.safetensors` holds the weights without what the adapters learned. These lines add them to the
model, in place:

```python
from peft import PeftModel

{lines}
```"""

WITH_FUSION = """## The fusion head

`{file}` has the layers that score pairs of an image and a text: the projections of both towers'
tokens (`head.image_tokens.`, `head.text_tokens.`) and the attention between them (`head.fusion.`),
{fusion} layers of width {fusion_width} with {fusion_heads} heads. They go with Wye's towers, which
read this folder:

```
python evaluate.py FOLDER --val-data SPEC --rerank 32
python train.py --import FOLDER \\
    --fusion {fusion} --fusion-width {fusion_width} --fusion-heads {fusion_heads} …
```"""

WITH_REGIONS = """## Regions

`{file}` has the head that embeds regions of images, to be compared with `model.embed_texts` of
phrases. {rest}"""
CALL_REGIONS = """`modeling_regions.py` cuts them out of the image tower's last maps. Boxes
are x1, y1, x2, y2 in 0..1 of the sides of the image as `model.pixel_values` gives it:

```python
import torch
from modeling_regions import Regions

regions = Regions(model)
seen = model.pixel_values("apple.jpg")[None]
boxes = torch.tensor([[0.1, 0.2, 0.5, 0.9]])
region_embeds = regions.embed(seen, boxes)
```"""
NO_REGIONS = """It goes with Wye's towers, which read this folder: no module of
this tower's library makes by itself a map that it reads, so no code here embeds a box."""

PROCESSOR = """## Images

`preprocessor_config.json` is for transformers' `CLIPImageProcessor`, which gives the pixels of
evaluation for opaque images of 8 bits a channel, up to one of the 255 levels, but for images whose
margin around the centre is rounded the other way. `model.pixel_values` gives exactly these."""


def export_page(trained: Trained, record: Mapping[str, Any], averaged: bool) -> str:
    """Markdown. `record`: of the export; `averaged`: the weights are the run's moving average."""
    towers, kind, names = trained.by_branch, record["kind"], tower_names(trained.options)
    parts = [
        _card(trained, kind),
        f"# {' and '.join(words(names[branch]) for branch in towers)}",
        _introduction(trained, towers),
        "## Load it",
        *_loading(record, towers),
    ]
    if record["adapters"]:
        where = 'model.towers["{}"].module' if kind == STATE_DICT else "model.whole.{}"
        lines = "\n".join(
            f'PeftModel.from_pretrained({where.format(own)}, "{ADAPTERS}/{branch}").eval()'
            for branch in record["adapters"]
            for own in [branch if kind == STATE_DICT else TOWER_IN[branch]]
        )
        parts.append(WITH_ADAPTERS.format(lines=lines))
    if record["fusion"]:
        parts.append(WITH_FUSION.format(file=FUSION, **record["fusion"]))
    if "regions" in towers["text"].config:
        rest = CALL_REGIONS if "regions" in record["loading"] else NO_REGIONS
        parts.append(WITH_REGIONS.format(file=REGIONS, rest=rest))
    if "time" in towers.get("image", towers["text"]).config:
        parts.append(_of_clips(record))
    if own := record.get("own"):
        parts.append(
            WITH_OWN.format(
                file=OWN_TOWERS, **{k: ", ".join(own[k]) for k in ("modules", "branches")}
            )
        )
    if "data" in trained.options:
        parts += _training(trained, averaged)
    return "\n\n".join([*parts, *([PROCESSOR] if _has_processor(record) else [])]) + "\n"


def _card(trained: Trained, kind: str) -> str:
    """The header in YAML. No license: what the data and the weights allow is not known here."""
    branches = [branch for branch in TASKS if branch in trained.by_branch]
    compared = branches[0]
    of_pairs = {"image": "clip", "audio": "clap"}[compared]
    library = {OPEN_CLIP: OPEN_CLIP, STATE_DICT: "pytorch"}.get(kind, "transformers")
    data = ModelCardData(
        library_name=library,
        tags=[
            "siglip" if trained.options["loss"] == "sigmoid" else of_pairs,
            *(f"{branch}-text" for branch in branches),
            "contrastive-learning",
        ],
        pipeline_tag=TASKS[compared],
    )
    return f"---\n{data.to_yaml()}\n---"


def _introduction(trained: Trained, towers: dict[str, Tower]) -> str:
    options = trained.options
    scalars = [name for tower in towers.values() for name in tower.specs[-1].template.scalars]
    bias = " plus `logit_bias`" if any(name.endswith("logit_bias") for name in scalars) else ""
    sizes = {
        "image": lambda: f"images of {options['image_size']} pixels a side",
        "audio": lambda: f"sounds of {seconds_of_clip(towers['audio']):.4g} seconds",
        "text": lambda: f"texts of at most {options['max_text_tokens']} tokens",
    }
    return (
        f"An {'–'.join(towers)} model: all towers give embeddings in {options['embed_dim']} "
        f"dimensions. Trained with the loss {code(options['loss'])} for {trained.step:,} steps; "
        f"{', '.join(sizes[branch]() for branch in towers)}. Weights are in fp32. The loss read "
        f"`exp(logit_scale)` times the products of the embeddings{bias}"
        f"{'; each pair has its own' if len(towers) > 2 else ''}; the scale is at most 100."
    )


def _loading(record: Mapping[str, Any], towers: dict[str, Tower]) -> list[str]:
    kind, text = record["kind"], towers["text"]
    libraries = sorted({tower.config["library"] for tower in towers.values()} - {"transformers"})
    page = LOAD.format(
        libraries=f" ({', '.join(['transformers', *libraries])})",
        calls="\n".join(f"| {call} |" for branch in towers for call in CALLS[branch]),
    )
    if kind == STATE_DICT:
        prefixes = ", ".join(f"`{branch}.`" for branch in towers)
        reasons = "\n".join(f"- {difference}" for difference in record["differences"])
        return [page, OF_STATE_DICT.format(differences=reasons, prefixes=prefixes)]
    own = [page]
    if kind == OPEN_CLIP:
        has_hf = text.config["library"] == "transformers"
        own.append(OF_OPEN_CLIP_WITH_HF if has_hf else OF_OPEN_CLIP)
    else:
        own.append(_of_transformers(kind, record))
        own += _pipeline(record, text)
    if towers.get("image") and towers.get("audio"):
        own.append(f"`{AUDIO}` has the audio tower, its projection, and the scalars of its pairs.")
    return own


def _of_transformers(kind: str, record: Mapping[str, Any]) -> str:
    reads = record["loading"]  # what `modeling_export.py` reads
    texts, others = reads["texts"], PICTURES
    padding = (f"{name}={json.dumps(value)}" for name, value in texts["padding"].items())
    names = ("input_ids", "attention_mask") if texts["masked"] else ("input_ids",)
    if reads["images"] is None:
        others = SOUNDS
    elif side := reads["images"]["patch_size"]:
        others = PATCHES.format(side=side)
    elif not _has_processor(record):
        others = FILLED_UP
    return OF_TRANSFORMERS.format(
        kind=kind,
        padding=", ".join(padding).replace("true", "True"),
        given=", ".join(f'tokens["{name}"]' for name in names),
        others=others,
    )


def _pipeline(record: Mapping[str, Any], text: Tower) -> list[str]:
    """What transformers' own pipeline makes of the model; nothing where it cannot."""
    kind, images = record["kind"], record["loading"]["images"]
    if kind == CLAP:
        return [OF_SOUNDS]
    if images["patch_size"] or not _has_processor(record):
        return []
    most = record["options"]["max_text_tokens"]
    if is_padded_otherwise(text, most):
        return [NO_PIPELINE.format(most=most)]
    return [PIPELINE]


def _has_processor(record: Mapping[str, Any]) -> bool:
    """Is there a `preprocessor_config.json` of its images?"""
    return record["options"].get("image_resize_mode", "longest") != "longest"


def _of_clips(record: Mapping[str, Any]) -> str:
    kind, loading = record["kind"], record["loading"]
    rate, library = loading["clips"]["rate"], "."
    if kind != STATE_DICT and not loading["images"]["patch_size"]:
        method = "encode_image" if kind == OPEN_CLIP else "get_image_features"
        library = CLIPS_OF_LIBRARY.format(method=method)
    seen = f", {rate:g} for each second of a shorter clip" if rate else ""
    return OF_CLIPS.format(frames=loading["clips"]["frames"], rate=seen, library=library)


# -- the run


def _training(trained: Trained, averaged: bool) -> list[str]:
    """The sections of what is known of the run."""
    record, options = trained.record, trained.options
    run = read_folder(trained.checkpoint.parents[1], "")
    epochs = dict(zip(run.steps["step"], run.steps["epoch"])) if len(run.steps) else {}
    recalls = _recalls(run, trained, averaged)
    batch = BranchBatch(**next(iter(record["batches"].values())))
    weights = {"": options.get("imported"), **first_weights(options)}
    rows = {
        "data": ", ".join(map(code, options["data"])),
        "held out": code(options["val_data"])
        if options.get("val_data")
        else f"{options.get('val_fraction', 0):g} of the data",
        "started from": "; ".join(
            f"{branch} {code(where)}".strip() for branch, where in weights.items() if where
        )
        or "random weights",
        "steps": f"{trained.step:,} of {record['total_steps']:,}",
        "epochs": f"{epochs[trained.step]:.4g}" if trained.step in epochs else None,
        "samples per step": f"{batch.global_batch_size:,}",
        "weights": "moving average (`--ema`)" if averaged else None,
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return [
        "## Training",
        "\n".join(["| | |", "|---|---|", *lines]),
        fenced(record["command"]),
        "## Results",
        _in_markdown(recalls) if recalls else "The run has not evaluated these weights.",
    ]


def _recalls(run: RunData, trained: Trained, averaged: bool) -> list[dict[str, str]]:
    """Rows of what is known of these very weights: by evaluate.py on the samples that the run held
    out, else by the run itself."""
    by_hand = run.path / f"evaluation-{trained.checkpoint.name}{'-ema' if averaged else ''}.json"
    if by_hand.is_file():
        values = read_json(by_hand)
        return retrieval_rows([values], values["num_samples"])
    known = trained.record.get("data", {}).get("held_out_samples") or {}
    sizes: dict[str, int] = {}
    values = {}
    for name, lines in run.held_out.items():
        of_set = name.removeprefix(AVERAGED)
        for line in lines:
            if name.startswith(AVERAGED) == averaged and line["step"] == trained.step:
                sizes[of_set] = known.get(of_set, 0)
                values |= {f"{of_set}/{key}": value for key, value in line.items()}
    return retrieval_rows([values], sizes)


def _in_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    table = Table.of("", rows)
    lines = [table.header, ["---"] * len(table.header), *([*map(words, row)] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
