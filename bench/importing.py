"""What it costs a rank to build its stage from the weights of a whole model.

    python bench/importing.py                   an OpenCLIP model of 1.1 GB on four ranks
    python bench/importing.py --layers 24       a ViT-L/14, 1.7 GB

The model has random weights and is saved in OpenCLIP's form. A rank is a process of its own, one
after the other. Timed is the building of its layers, behind the imports and the reading of headers.
*Drawn, then filled*: all first values are drawn first, as without weights.
"""

from __future__ import annotations

import atexit
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import MIB, Column, Figures, Study, Way, alone, main, resident_bytes

MODEL, RANKS = "ViT-L-14", 4  # two ranks for each tower
READ, DRAWN = "read", "drawn, then filled"
COLUMNS = (
    Column("seconds", "s", "{:.1f}"),
    *(Column(key, f"{key}, MiB", "{:,.0f}", 1 / MIB) for key in ("growth", "weights")),
)


def importing(layers: int = 12) -> Study:
    """Growth: of resident memory without pages of files, which all ranks share; its highest value
    less that before."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    size = alone(save, folder.name, layers)
    return Study(
        f"Building {RANKS} stages from a file of {size / 1e9:.1f} GB",
        {
            f"rank {rank}, {way}": Way(partial(alone, measure, folder.name, rank, way))
            for rank in range(RANKS)
            for way in (DRAWN, READ)
        },
        COLUMNS,
        f"{MODEL} with {layers} image layers; ranks 0 and 1 have the image tower, 2 and 3 the text's.",
    )


STUDIES = (importing,)


def save(folder: str, layers: int) -> int:
    """Write a model in OpenCLIP's form; returns the bytes of its weights."""
    import open_clip
    from safetensors.torch import save_file

    config = open_clip.get_model_config(MODEL)
    config["vision_cfg"]["layers"] = layers
    state = open_clip.CLIP(**config).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, _file(folder))
    (Path(folder) / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return _file(folder).stat().st_size


def _file(folder: str) -> Path:
    return Path(folder) / "open_clip_model.safetensors"


def measure(folder: str, rank: int, way: str) -> Figures:
    from models.towers.building import build_towers
    from models.towers.layers import library_models_kept
    from models.weights.reading import open_model

    name = f"open_clip:{folder}"
    towers = build_towers(name, name, 768, 224, 49408, 77, eos_token_id=49407)
    reader = open_model(folder, *towers)
    specs = towers[rank // 2].specs
    own = specs[: len(specs) // 2] if rank % 2 == 0 else specs[len(specs) // 2 :]
    watched, start = Watch(), time.perf_counter()
    with library_models_kept():
        layers = [spec.build(0, reader if way == READ else None) for spec in own]
        if way == DRAWN:
            for layer in layers:
                reader.fill(layer)
    seconds = time.perf_counter() - start
    weights = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    return {"seconds": seconds, "growth": watched.peak_bytes(), "weights": weights}


class Watch:
    """Looks every few milliseconds at the memory that is no page of a file, which the kernel keeps
    no highest value of."""

    def __init__(self) -> None:
        import threading

        self._start = self._peak = resident_bytes(field="RssAnon")
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self._peak = max(self._peak, resident_bytes(field="RssAnon"))
            time.sleep(0.005)

    def peak_bytes(self) -> int:
        return max(self._peak, resident_bytes(field="RssAnon")) - self._start


if __name__ == "__main__":
    main("bench.importing")
