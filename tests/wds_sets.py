"""Sets of benchmarks as CLIP_benchmark writes them: images with noise, in tar shards."""

import io
import tarfile

import numpy as np
from PIL import Image

TEMPLATES = "a square of {c}.\nthe colour {c}, seen from near"
NAMES = [f"thing {word}" for word in "red blue green black white gold pink grey teal plum".split()]


def picture(number: int, kind: str = "png") -> bytes:
    """Another image for another number."""
    draw, file = np.random.default_rng(number), io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (36, 40, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def saved(array) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return file.getvalue()


def write_shard(file, samples) -> None:
    """`samples`: members by their endings, of each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for n, members in enumerate(samples):
            for ending, content in members.items():
                member = tarfile.TarInfo(f"s{n:07}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_set(root, samples, shards=2, split="test", **files):
    """`files`: what lies beside the split, without .txt. Returns the folder."""
    root.mkdir(parents=True, exist_ok=True)
    for n in range(shards):
        write_shard(root / split / f"{n}.tar", samples[n::shards])
    (root / split / "nshards.txt").write_text(f"{shards}\n")
    for name, text in files.items():
        (root / f"{name}.txt").write_text(f"{text}\n")
    return root


def class_files(names=NAMES):
    return {"classnames": "\n".join(names), "zeroshot_classification_templates": TEMPLATES}


def of_classes(root, number=30, groups=None, names=NAMES, **more):
    """Labels are i % 9: the last of ten classes has no image."""
    samples = []
    for i in range(number):
        beside = {} if groups is None else {"npy": saved([groups[i], 7])}
        samples.append({"png": picture(i), "cls": str(i % 9).encode(), **beside})
    return write_set(root, samples, **{**class_files(names), **more})


def of_several(root, number=30, names=NAMES):
    """Every seventh image has no class, and the last class no image."""
    draw = np.random.default_rng(3)
    targets = draw.integers(0, 2, (number, len(names)))
    targets[::7], targets[:, -1] = 0, 0
    samples = [{"webp": picture(i, "webp"), "npy": saved(targets[i])} for i in range(number)]
    return write_set(root, samples, dataset_type="multilabel", **class_files(names))


def caption(number: int, k: int) -> str:
    """The k-th of an image, short and of letters that every tokenizer of the tests knows."""
    letters = "adeghilmno"
    return " ".join(letters[n // 10] + letters[n % 10] for n in (number, k))


def of_captions(root, number=20, captions=5, equal=0):
    """`equal`: so many images at the end are those of the begin."""
    samples = []
    for i in range(number):
        text = "\n".join(caption(i, k) for k in range(captions))
        samples.append({"jpg": picture(i % (number - equal), "jpeg"), "txt": text.encode()})
    return write_set(root, samples, dataset_type="retrieval")
