"""The README.md of an exported folder: what the model is, and code that loads it with public
libraries alone."""

from __future__ import annotations

from common.markdown import code, words
from launch.exporting.code import (
    TowerCode,
    helpers,
    projection_code,
    seconds_of_clip,
    tower_code,
)
from launch.inference.trained import Trained
from launch.run.records import AUDIO, FUSION, OPEN_CLIP, WEIGHTS
from models.towers.layers import Tower

CLAP, STATE_DICT = "ClapModel", "state dict"  # kinds of an export

PIXELS = '''```python
import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional

SIZE, RESIZE = {size}, {resize}
MEAN, STD = {mean}, {std}


def pixel_values(file):
    """[3, SIZE, SIZE]."""
    image = ImageOps.exif_transpose(Image.open(file))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    image = image.convert("RGB")
    image = image.resize({sides}, Image.Resampling.{interpolation})
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    top, left = (round((side - SIZE) / 2) for side in pixels.shape[1:])
    return functional.normalize(pixels[:, top : top + SIZE, left : left + SIZE] / 255, MEAN, STD)
```'''

WHOLE_MODEL = """```python
import torch
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained(".").eval()
tokenizer = AutoTokenizer.from_pretrained(".")


def embed(pixel_values, texts):
    \"\"\"image_embeds, text_embeds: of length 1.\"\"\"
    tokens = tokenizer(texts, padding={padding}, truncation=True, return_tensors="pt")
{images}    with torch.no_grad():
        output = model(input_ids=tokens["input_ids"], {given})
    return output.image_embeds, output.text_embeds
```"""

# as SigLIP 2's own image processor makes them
PATCHES = """    rows, columns = (length // {side} for length in pixel_values.shape[2:])
    patches = pixel_values[..., : rows * {side}, : columns * {side}].unflatten(3, (columns, {side}))
    patches = patches.unflatten(2, (rows, {side})).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    seen = torch.ones(patches.shape[:2], dtype=torch.int64)
    shapes = torch.tensor([[rows, columns]] * len(patches))
"""

WHOLE_CLAP = """```python
import torch
from transformers import AutoProcessor, ClapModel

model = ClapModel.from_pretrained(".").eval()
processor = AutoProcessor.from_pretrained(".")


def embed(input_features, texts):
    \"\"\"audio_embeds, text_embeds: of length 1.\"\"\"
    tokens = processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        output = model(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            input_features=input_features,
        )
    return output.audio_embeds, output.text_embeds
```"""

# of one tower or several, whose weights are in one file under the towers' own names
STATE_DICT_CODE = """```python
import torch{imports}
from safetensors.torch import load_file

tensors = load_file("{file}")
of = lambda prefix: {{name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}}{helpers}
{constructors}


def embedding(branch, features):
    \"\"\"What a tower makes, projected, and of length 1.\"\"\"
    weights = of(f"head.{{branch}}_projection.")
    {projected}
    return torch.nn.functional.normalize(projected)
{functions}
```"""

EMBED_TOWER = """

@torch.no_grad()
def embed_{what}({given}):
    \"\"\"Embeddings of length 1.\"\"\"
    {before}return embedding("{branch}", {features})
"""
WHAT = {"image": ("images", "pixel_values"), "audio": ("sounds", "input_features")}
TOKENIZE = """tokens = tokenizer(texts, padding={padding}, truncation=True, return_tensors="pt")
ids, mask = tokens["input_ids"], tokens["attention_mask"]
"""
EMBED_BOTH = """

def embed({given}, texts):
    \"\"\"{branch}_embeds, text_embeds: of length 1.\"\"\"
    return embed_{what}({given}), embed_texts(texts)
"""

SOUNDS = """## Sounds

{where} sounds are decoded by `soundfile` and brought to the rate by SciPy's polyphase filter, as the
model was evaluated. A sound that is longer than a clip is cut to its middle.

```python
import math

import soundfile
from scipy.signal import resample_poly
from transformers import AutoFeatureExtractor

extractor = AutoFeatureExtractor.from_pretrained("audio")
SAMPLES = {samples}  # of a clip, {seconds:.4g} seconds


def input_features(file):
    \"\"\"What the audio tower reads of one sound.\"\"\"
    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    common = math.gcd(rate, extractor.sampling_rate)
    samples = resample_poly(samples.mean(1), extractor.sampling_rate // common, rate // common)
    start = max(0, len(samples) - SAMPLES) // 2
    clip = samples[start : start + SAMPLES].astype("float32")
    made = extractor(clip, sampling_rate=extractor.sampling_rate, return_tensors="pt"{more})
    return made[extractor.model_input_names[0]][0]
```"""


OPEN_CLIP_MODEL = """```python
import open_clip
import torch

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:.")
tokenizer = open_clip.get_tokenizer("local-dir:.")
model.eval()


def embed(pixel_values, texts):
    \"\"\"image_embeds, text_embeds: of length 1.\"\"\"
    with torch.no_grad():
        image_embeds = model.encode_image(pixel_values, normalize=True)
        return image_embeds, model.encode_text(tokenizer(texts), normalize=True)
```"""

WITH_FUSION = """## The fusion head

`{file}` has the layers that score pairs of an image and a text: the projections of both towers'
tokens (`head.image_tokens.`, `head.text_tokens.`) and the attention between them (`head.fusion.`),
{layers} layers of width {width} with {heads} heads. They go with Wye's towers, which read this
folder:

```
python evaluate.py FOLDER --val-data SPEC --rerank 32
python train.py --import FOLDER --fusion {layers} --fusion-width {width} --fusion-heads {heads} …
```

The tensors alone: `safetensors.torch.load_file("{file}")`."""


def export_page(
    trained: Trained, kind: str, differences: list[str], training: str = "", fusion: bool = False
) -> str:
    """Markdown. Its code, in order, defines `embed`, and `pixel_values` or `input_features` or
    both, run in the exported folder; `embed_sounds` where sounds are beside images. `training`: the
    section about the run; `fusion`: there is a file of it."""
    towers = {tower.branch: tower for tower in trained.towers}
    parts = [
        f"# {' and '.join(words(trained.options[f'{branch}_tower']) for branch in towers)}",
        _introduction(trained, towers),
        "## Load it",
        *_how_to_load(kind, differences, towers),
        *([_fusion(towers["image"])] if fusion else []),
        *([training] if training else []),
        *(_images(trained) if "image" in towers else []),
        *(_sounds(towers["audio"], kind) if "audio" in towers else []),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(trained: Trained, towers: dict[str, Tower]) -> str:
    options = trained.options
    scalars = [name for tower in towers.values() for name in tower.specs[-1].template.scalars]
    bias = " plus `logit_bias`" if any(name.endswith("logit_bias") for name in scalars) else ""
    several = "; each pair has its own" if len(towers) > 2 else ""
    sizes = {
        "image": f"images of {options.get('image_size')} pixels a side",
        "audio": f"sounds of {seconds_of_clip(towers['audio']):.4g} seconds"
        if "audio" in towers
        else "",
        "text": f"texts of at most {options['max_text_tokens']} tokens",
    }
    said = "both towers give" if len(towers) == 2 else "all towers give"
    return (
        f"An {'–'.join(towers)} model: {said} embeddings of length 1 in {options['embed_dim']} "
        f"dimensions. Trained with the loss {code(options['loss'])} for {trained.step:,} steps; "
        f"{', '.join(sizes[branch] for branch in towers)}. Weights are in fp32. The loss read "
        f"`exp(logit_scale)` times the products of the embeddings{bias}{several}; the scale is at "
        "most 100."
    )


def _images(trained: Trained) -> tuple[str, ...]:
    options, pixels = trained.options, trained.preprocessing
    resize = pixels.options(options["image_size"])["image_resize"]
    return (
        "## Images",
        "`preprocessor_config.json` is for transformers' `CLIPImageProcessor`, which gives the "
        "pixels of evaluation for opaque images up to one of the 255 levels of a channel, but for "
        "images whose margin around the centre is rounded the other way. This is what the model "
        "was evaluated with:",
        PIXELS.format(
            size=options["image_size"],
            resize=resize,
            mean=pixels.mean,
            std=pixels.std,
            interpolation=pixels.interpolation.upper(),
            sides="(RESIZE, RESIZE)"
            if pixels.resize_mode == "squash"
            else "[RESIZE * side // min(image.size) for side in image.size]",
        ),
    )


def _sounds(audio: Tower, kind: str) -> tuple[str, ...]:
    """The tower too, where it is in a file of its own."""
    reads = audio.config["audio_input"]
    own_length = ', max_length=SAMPLES, truncation="rand_trunc"'
    page = SOUNDS.format(
        where="`audio/preprocessor_config.json` is for transformers' "
        f"`{reads['extractor']}`, which makes what the audio tower reads;",
        samples=reads["num_samples"],
        seconds=seconds_of_clip(audio),
        more=own_length if reads["extractor"] == "ClapFeatureExtractor" else "",
    )
    if kind in (STATE_DICT, CLAP):
        return (page,)
    intro = (
        f"`{AUDIO}` has the audio tower, under its library's names behind `audio.`, its projection, "
        "and the scalars of its pairs:"
    )
    return page, intro, _state_dict_example((audio,), AUDIO)


def _how_to_load(kind: str, differences: list[str], towers: dict[str, Tower]) -> tuple[str, ...]:
    if kind == OPEN_CLIP:
        return _open_clip_example(towers["text"])
    intro = _intro(differences, tuple(towers.values()))
    if differences:
        return intro, _state_dict_example(tuple(towers.values()))
    if kind == CLAP:
        return intro, WHOLE_CLAP
    return intro, _whole_model_example(kind, towers["image"], towers["text"])


def _open_clip_example(text: Tower) -> tuple[str, ...]:
    moved = (
        "`hf_model_name` in `open_clip_config.json` is where this folder was written. After moving "
        "it, give the new place of its folder `text` there, or the id of a published model of the "
        "same configuration.",
    )
    return (
        "OpenCLIP loads this folder, and from the hub it loads `hf-hub:ORGANISATION/MODEL` when the "
        "folder has been uploaded. `preprocess` is what the images are given to.",
        OPEN_CLIP_MODEL,
        *(moved if text.config["library"] == "transformers" else ()),
    )


def _fusion(image: Tower) -> str:
    return WITH_FUSION.format(file=FUSION, **image.config["fusion"])


def _whole_model_example(kind: str, image: Tower, text: Tower) -> str:
    full_length = text.config["pool"] == "head"  # where padding is read as any other token
    most = text.config["max_text_tokens"]
    in_patches = kind == "Siglip2Model"
    given = "pixel_values=pixel_values"
    if in_patches:
        given = "pixel_values=patches, pixel_attention_mask=seen, spatial_shapes=shapes"
    if not full_length:
        given += ', attention_mask=tokens["attention_mask"]'
    return WHOLE_MODEL.format(
        kind=kind,
        # SigLIP 2's tokenizer pads on the left by itself
        padding=f'"max_length", max_length={most}, padding_side="right"' if full_length else True,
        images=PATCHES.format(side=image.config["config"]["patch_size"]) if in_patches else "",
        given=given,
    )


def _intro(differences: list[str], towers: tuple[Tower, ...]) -> str:
    if not differences:
        return "`AutoProcessor` and `AutoTokenizer` load from this folder too."
    own = [f"`{t.branch}/config.json`" for t in towers if t.config["library"] == "transformers"]
    of_towers = " and ".join(
        f"those of the {tower.branch} tower under {_possessive(tower.config['library'])} names "
        f"behind `{tower.branch}.`"
        for tower in towers
    )
    return (
        "transformers has no model that is this one as a whole:\n\n"
        + "\n".join(f"- {difference}" for difference in differences)
        + f"\n\n`model.safetensors` has the tensors of all towers, {of_towers}, and the projections "
        "and scalars behind `head.`"
        + (f"; {' and '.join(own)} {'are' if len(own) > 1 else 'is'} transformers'" if own else "")
        + "."
    )


def _possessive(library: str) -> str:
    return {"transformers": "transformers'", "open_clip": "OpenCLIP's"}.get(library, f"{library}'s")


def _state_dict_example(towers: tuple[Tower, ...], file: str = WEIGHTS) -> str:
    """The code of towers whose weights are in `file`."""
    codes = {tower.branch: tower_code(tower) for tower in towers}
    of_projection, projected = projection_code(towers[0].config.get("projection", "linear"))
    lines = [code.imports for code in codes.values()]
    of_tokenizer = "from transformers import AutoTokenizer" if "text" in codes else ""
    imports = dict.fromkeys("\n".join([*lines, of_tokenizer, of_projection]).split("\n"))
    constructors = [code.constructor for code in codes.values()]
    constructors += [f"{branch}.eval()" for branch in codes]
    if "text" in codes:
        constructors.append('tokenizer = AutoTokenizer.from_pretrained(".")')
    functions = [_embed(tower, codes[tower.branch]) for tower in towers]
    compared = next((branch for branch in ("image", "audio") if branch in codes), None)
    if "text" in codes and compared:
        what, given = WHAT[compared]
        functions.append(EMBED_BOTH.format(given=given, branch=compared, what=what))
    return STATE_DICT_CODE.format(
        imports="".join(f"\n{line}" for line in imports if line),
        file=file,
        helpers=helpers(towers),
        constructors="\n".join(constructors),
        projected=projected,
        functions="".join(functions).rstrip(),
    )


def _embed(tower: Tower, code: TowerCode) -> str:
    what, given = WHAT.get(tower.branch, ("texts", "texts"))
    before = [code.before] if code.before else []
    if tower.branch == "text":
        full_length = tower.config["pool"] == "head"  # where padding is read as any other token
        most = tower.config["max_text_tokens"]
        padding = f'"max_length", max_length={most}' if full_length else True
        before = [TOKENIZE.format(padding=padding).rstrip(), *before]
    lines = "\n".join(before).replace("\n", "\n    ")
    return EMBED_TOWER.format(
        what=what,
        given=given,
        before=f"{lines}\n    " if lines else "",
        branch=tower.branch,
        features=code.features,
    )
