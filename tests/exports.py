"""What is asked of exported models: images and texts, and their embeddings by public libraries
alone."""

import io
import re
import subprocess
import sys

import numpy as np
import torch
from PIL import Image

from data.modalities.transforms import eval_transform, normalised

SIZE, TOKENS = 64, 12
CAPTIONS = [
    "a red apple",
    "two green birds over water",
    "nothing but snow and a very long way to go home again",
    "an apple",
]


def embeddings(layers, pixel_values, tokens):
    tensors = {"pixel_values": pixel_values, **tokens}
    with torch.no_grad():
        for layer in layers:
            tensors = layer(tensors)
    return tensors


def sample_image(size):
    """Coarse squares of colour, (width, height) pixels."""
    coarse = np.random.default_rng(sum(size)).integers(0, 255, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def files():
    """Images of the tower's size, near it, smaller, shrunk in two steps, decoded at a smaller
    scale, lying on a side, with transparency."""
    turned = Image.Exif()
    turned[274] = 6
    transparent = sample_image((90, 70))
    transparent.putalpha(Image.linear_gradient("L").resize((90, 70)))
    opaque = [
        encoded(sample_image(size))
        for size in ((SIZE, SIZE), (SIZE + 15, SIZE + 1), (40, 57), (333, 217))
    ]
    return [
        *opaque,
        encoded(sample_image((700, 500)), "JPEG"),
        encoded(sample_image((70, 99)), "JPEG", exif=turned),
        encoded(transparent),
    ]


def evaluated(data):
    """[3, SIZE, SIZE] as evaluate.py sees it."""
    transform = eval_transform(SIZE)
    return normalised([transform(transform.stored(data))])[0]


# for each folder: the code of its page, run there, on the images and texts; nothing of ours can
# be imported
FRESH = """
import os, sys, torch
_, captions, *folders = sys.argv
for folder in folders:
    os.chdir(folder)
    names = {}
    exec(open("page.py").read(), names)
    pixels = torch.stack([names["pixel_values"](f"../{i}") for i in range(7)])
    torch.save((pixels, *names["embed"](pixels, captions.split("|"))), "result.pt")
"""


def embed_by_pages(root, folders):
    """Run the code of the README.md of each folder, of a folder below `root`, in a fresh process
    that leaves pixels and embeddings in result.pt."""
    for folder in folders:
        text = (folder / "README.md").read_text(encoding="utf-8")
        code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        (folder / "page.py").write_text("\n".join(code), encoding="utf-8")
    for i, data in enumerate(files()):
        (root / str(i)).write_bytes(data)
    arguments = [sys.executable, "-c", FRESH, "|".join(CAPTIONS), *map(str, folders)]
    result = subprocess.run(arguments, cwd=root, text=True, capture_output=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
