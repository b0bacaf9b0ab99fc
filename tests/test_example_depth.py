"""`examples/depth/`: a modality of files in three files, which no other file knows of. It shows the part
that its image shows, and is trained from every kind of data, resumed, evaluated and exported."""

import base64
import io
import json
from dataclasses import replace
from shutil import copytree

import numpy as np
import pytest
import torch
from depth_data import HEIGHT, NUMBER, WIDTH, WITHOUT, written
from launched import ROOT, metrics, run_to_end, words
from PIL import Image
from plain_requests import request_of
from safetensors.torch import load_file, save_file

from data.batching.load_control import FeedRates
from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.preprocessing import CLIP
from data.modalities.tokenizer import load_tokenizer
from data.modalities.transforms import EvalTransform, TrainTransform, Views
from data.modules import import_modules
from data.streams.opening import open_stream
from launch.config.options import parse_options
from launch.exporting.writing import canonical_state
from launch.inference.embedding import Embedder
from launch.inference.evaluation import directions
from launch.inference.trained import open_model_folder, open_run, with_named_towers
from launch.setup.dry_run import dry_run
from launch.setup.model import RunModel
from models.weights.names import OWN_TOWERS

PAIRS = "image:text,depth:text,image:depth"
FLAGS = ["--import-module", "examples.depth.shown", "--pairs", PAIRS, "--augmentation", "crop+flip"]
FLAGS += words("--image-tower resnet18:layers=1-1-1-1 --image-size 32 --text-tower bert-tiny")
FLAGS += words("--tower depth=48 --embed-dim 16 --max-text-tokens 8 --val-fraction 0.2 --workers 0")
FORK = {
    "layout": "fork",
    "stages": {"image": 1, "text": 1, "depth": 2},
    "replicas": {"image": 1, "text": 1, "depth": 1},
    "micro_batch_size": {"image": 6, "text": 12, "depth": 4},
}


pytestmark = pytest.mark.usefixtures("registries")


@pytest.fixture(scope="module")
def data(module_folder):
    """The same samples in each format -> their specs."""
    return written(module_folder("data"))


@pytest.fixture(scope="module")
def twins(module_folder):
    """The same with each depth in two samples."""
    return written(module_folder("twins"), lambda n: n // 2)


# -- the same part as the image


@pytest.mark.parametrize("mode", ("shortest", "squash", "longest"))
def test_it_shows_the_part_that_its_image_shows(mode, data, tmp_path):
    from examples.depth.shown import Depth

    how = replace(CLIP, resize_mode=mode, train_resize_mode=mode)
    size = (32, 32)
    views = Views(TrainTransform(size, how, flip=0.5), EvalTransform(size, how), 8)
    pairs = (("image", "text"), ("depth", "text"))
    source = open_source(data["parquet"], pairs, folder=tmp_path, workers=1)
    dataset = MicroBatchDataset(source, [ImageModality(views), Depth(views)])
    asked = range(WITHOUT, NUMBER)
    bucket = {"size": (24, 48), "feed_rates": FeedRates(image_size=16)}
    requests = [request_of(asked, epoch) for epoch in range(3)]
    requests += [request_of(asked, training=False), request_of(asked, 3, **bucket)]
    mirrored = 0
    for request in requests:
        loaded = dataset[request]
        pixels = loaded["pixel_values"].permute(0, 2, 3, 1).numpy().astype(int)
        depth = np.rint(loaded["depth_values"][:, 0].numpy() * 65_535).astype(int)
        assert pixels.shape[:3] == depth.shape
        assert request.size is None or depth.shape[1:] == (16, 24)
        columns, rows = depth // 256, depth % 256
        # beyond the image is black, and 0, and what is beside that is mixed with it
        inside = np.pad(depth > 0, ((0, 0), (1, 1), (1, 1)))
        inner = inside[:, 1:-1, 1:-1].copy()
        for down, across in ((0, 1), (2, 1), (1, 0), (1, 2)):
            inner &= inside[:, down:, across:][:, : depth.shape[1], : depth.shape[2]]
        step = max(HEIGHT / depth.shape[1], WIDTH / depth.shape[2])  # pixels of the file
        for where, channel in ((columns, 0), (rows, 1)):
            apart = np.abs(pixels[..., channel] / 2 - where)[inner]
            assert apart.size and apart.max() <= 1 + 0.6 * step, (mode, request.size, apart.max())
        to_the_right = np.diff(columns) * (inner[..., 1:] & inner[..., :-1])
        mirrored += int((to_the_right.sum((1, 2)) < 0).sum())
    assert 0.35 < mirrored / (4 * len(asked)) < 0.65  # an evaluation mirrors nothing


@pytest.mark.parametrize("mode", ("shortest", "squash", "longest"))
def test_the_part_is_equal_to_the_last_bit(mode):
    how = replace(CLIP, resize_mode=mode, train_resize_mode=mode)
    pixels = np.zeros((333, 517, 3), np.uint8)
    for transform in (TrainTransform((32, 48), how, flip=0.5), EvalTransform((32, 48), how)):
        for seed in range(20):
            generators = [np.random.default_rng(seed) for _ in range(2)]
            stored = transform.stored.of(Image.fromarray(pixels))
            placed = transform.view(stored, generators[0])[1]
            assert transform.placed_on(pixels.shape[:2], generators[1]) == placed


def test_every_format_gives_the_same_values(data, tmp_path):
    from examples.depth.shown import Depth

    views, found = Views(TrainTransform((32, 32)), EvalTransform((32, 32))), []
    pairs = (("image", "text"), ("depth", "text"))
    for kind in ("jsonl", "csv", "parquet", "webdataset"):
        source = open_source(data[kind], pairs, folder=tmp_path / kind, workers=1)
        loaded = MicroBatchDataset(source, [Depth(views)])[request_of(range(NUMBER))]
        assert (loaded["depth_index"] < 0).sum() == WITHOUT, kind
        found.append(loaded["depth_values"])
    assert all(np.array_equal(found[0], other) for other in found[1:]) and found[0].std() > 0.05


# -- equal values


KINDS = ("jsonl", "csv", "parquet", "webdataset", "stream")


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("kind", KINDS)
def test_equal_files_have_equal_keys(kind, training, twins, tmp_path, monkeypatch):
    """By which a loss takes them for no negatives of each other."""
    from examples.depth.shown import Depth

    monkeypatch.setenv("WYE_CACHE", str(tmp_path))
    pairs = (("image", "text"), ("depth", "text"))
    if kind == "stream":
        source, _ = open_stream(twins[kind], pairs)
    else:
        source = open_source(twins[kind], pairs, folder=tmp_path, workers=1)
    views = Views(TrainTransform((32, 32)), EvalTransform((32, 32)))
    asked = request_of(range(WITHOUT + 1, NUMBER), epoch=1, training=training)
    key = MicroBatchDataset(source, [Depth(views)])[asked]["depth_key"].tolist()
    assert [key.index(each) for each in key] == [n - n % 2 for n in range(len(key))], key


def test_equal_files_are_one_in_an_evaluation(run, twins, tmp_path):
    import_modules(["examples.depth.shown"])
    embedder = Embedder(open_run(run), "cpu", 8, 0)
    source = open_source(twins["jsonl"], embedder.trained.read, folder=tmp_path, workers=1)
    embedded = embedder.embedded(source, np.arange(WITHOUT + 1, NUMBER))
    counts = {
        name: len(asked.query_row) for name, _, _, asked in directions(embedded, ("depth", "text"))
    }
    assert counts == {"depth_to_text": 18, "text_to_depth": 36}
    (one, other) = (rows.embeds[:4] for rows in embedded.both("depth", "text"))
    assert torch.equal(one[0], one[1]) and not torch.equal(other[0], other[1])


# -- trained


def config(folder, batch: int = 12):
    written = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    written |= {"train_batch_size": batch, "branches": written["branches"] | FORK}
    file = folder / "fork.json"
    file.write_text(json.dumps(written))
    return ["--deepspeed_config", file]


def trained(data, kind, folder, run_dir, *flags, ranks=4, expected=0):
    how = [*FLAGS, *config(folder), "--data", data[kind], "--run-dir", run_dir, *flags]
    if kind == "stream":  # with a process that loads, which did not import the module by itself
        how += ["--val-data", data["webdataset"], "--workers", 1]
    status, output = run_to_end("train.py", *how, ranks=ranks)
    assert status == expected, output[-4000:]
    return output


@pytest.fixture(scope="module")
def run(data, module_folder):
    folder = module_folder("runs")
    trained(data, "jsonl", folder, folder / "run", "--steps", 3)
    return folder / "run"


def test_it_is_trained_and_evaluated(run):
    steps, (last,) = metrics(run), [metrics(run, "held_out")[3]]
    assert len(steps) == 3 and steps[3]["grad_norm/depth"] > 0
    assert steps[1]["depths_per_s"] == steps[1]["samples_per_s"]
    assert steps[1]["loss"] == pytest.approx(
        sum(steps[1][f"contrastive_loss/{a}"] for a in ("image_text", "depth_text", "image_depth"))
    )
    assert {"depth_to_text_R@10", "text_to_depth_R@10", "image_to_depth_R@10"} <= last.keys()


def test_depths_that_cannot_be_read_are_counted_and_told(data, tmp_path):
    """The index of `--index-check header` takes them for depths, and they turn out when they are
    loaded."""
    copy = tmp_path / "data"
    copytree(data["folder"], copy)
    for n in range(10, 30):
        (copy / f"{n:03}.depth.png").write_bytes(b"%d is no depth" % n)
    flags = ["--steps", 4, "--index-check", "header", "--max-bad-fraction", 0.9]
    trained({"jsonl": f"jsonl:{copy / 'a.jsonl'}"}, "jsonl", tmp_path, tmp_path / "run", *flags)
    steps = metrics(tmp_path / "run").values()
    assert sum(step["unreadable_depths"] for step in steps) >= 12
    assert all(step["unreadable_pictures"] == 0 for step in steps)
    told = [json.loads(line) for line in (tmp_path / "run" / "alerts.jsonl").open()]
    assert any("unreadable_depths" in each["text"] for each in told), told


def test_the_report_shows_it(run):
    page = (run / "report.html").read_text()
    samples = json.loads((run / "queries.json").read_text())["sets"]["validation"]["samples"]
    pictures = [each["depth_picture"] for each in samples.values() if "depth_picture" in each]
    assert pictures and all(f'{each}" alt="depth: picture ' in page for each in pictures)
    assert Image.open(io.BytesIO(base64.b64decode(pictures[0]))).size == (WIDTH, HEIGHT)


def test_a_resumed_run_ends_where_an_undisturbed_one_ends(data, run, tmp_path):
    trained(
        data, "jsonl", tmp_path, tmp_path / "run", "--steps", 3, "--max-hours", 1e-9, expected=75
    )
    trained(data, "jsonl", tmp_path, tmp_path / "run", "--steps", 3)
    again, whole = metrics(tmp_path / "run"), metrics(run)
    assert [again[n]["loss"] for n in (1, 2, 3)] == [whole[n]["loss"] for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "kind",
    [
        "stream",
        *(
            pytest.param(each, marks=pytest.mark.all("trains from more formats"))
            for each in ("parquet", "webdataset")
        ),
    ],
)
def test_it_is_trained_from_others(kind, data, run, tmp_path):
    trained(data, kind, tmp_path, tmp_path / "run", "--steps", 3)
    losses = [[line["loss"] for line in metrics(each).values()] for each in (tmp_path / "run", run)]
    # a stream has another order
    assert losses[0] == losses[1] if kind != "stream" else len(losses[0]) == 3


def test_it_is_asked_for_and_asks(data, run, tmp_path):
    query = data["folder"] / "007.depth.png"
    picture = tmp_path / "found.png"
    for found in ("text", "depth", "image"):
        status, output = run_to_end(
            *("evaluate.py", run, "--trust-run", "--query", query, "--find", found),
            *("--number", 3, "--picture", picture),
        )
        assert status == 0 and "007.depth.png" in output, output[-3000:]
        assert np.asarray(Image.open(picture)).std() > 1
    status, output = run_to_end("evaluate.py", run, "--trust-run", "--embeddings", tmp_path / "e")
    assert status == 0 and (tmp_path / "e" / "depth.npy").exists(), output[-3000:]
    assert "depth → text" in output


def test_an_export_keeps_it_beside_the_model(run, twins, tmp_path, capsys, monkeypatch):
    """No library has its tower: it is in a file of its own, which is read with its module alone."""
    out = tmp_path / "out"
    status, output = run_to_end("export.py", run, out, "--trust-run")
    assert status == 0, output[-3000:]
    assert not any("depth" in name for name in load_file(out / "model.safetensors"))
    tensors = load_file(out / OWN_TOWERS)
    assert {name.partition(".")[0] for name in tensors} == {"depth", "head"}
    page = (out / "README.md").read_text()
    assert OWN_TOWERS in page and "--import-module\nexamples.depth.shown" in page

    monkeypatch.setattr("data.modules._named", set())
    assert [tower.branch for tower in open_model_folder(out).towers] == ["image", "text"]
    said = " ".join(capsys.readouterr().out.split())  # a long line is broken
    assert "leaves out depth, of the Python module examples.depth.shown" in said
    import_modules(["examples.depth.shown"])
    models = [open_run(run), open_model_folder(out)]
    source = open_source(
        twins["jsonl"], (("image", "text"), ("depth", "text")), folder=tmp_path, workers=1
    )
    assert models[0].compared == models[1].compared
    found = [Embedder(model, "cpu", 8, 0).embedded(source, np.arange(NUMBER)) for model in models]
    for branch in ("depth", "image", "text"):
        own, other = (each.rows[branch] for each in found)
        assert len(own.embeds) == NUMBER - WITHOUT * (branch == "depth")
        assert torch.equal(own.embeds, other.embeds) and torch.equal(own.sample, other.sample)
    assert models[0].checksum() != models[1].checksum()

    del tensors["depth.patches.conv.weight"]
    save_file(tensors, out / OWN_TOWERS)
    with pytest.raises(ValueError, match="holds no depth.patches"):
        open_model_folder(out)


@pytest.fixture(scope="module")
def exported(run, module_folder):
    out = module_folder("exports") / "out"
    status, output = run_to_end("export.py", run, out, "--trust-run")
    assert status == 0, output[-3000:]
    return out


def begun_from(out, *flags):
    """The options of a run that begins from an export, its tokenizer and its model."""
    options = parse_options(["--import", str(out), "--label-smoothing", "0", *flags])
    tokenizer = load_tokenizer(options.tokenizer_source())
    return options, RunModel.of(with_named_towers(options, None), tokenizer)


MODULE = ("--import-module", "examples.depth.shown")


@pytest.mark.parametrize("flags", ((), ("--pairs", PAIRS), ("--pairs", "depth:text,image:text")))
def test_a_run_begins_from_an_export_with_it(flags, run, exported, registries):
    options, model = begun_from(exported, *MODULE, *flags)
    assert options.tower == ("depth=48",)
    assert options.pairs == (flags[1] if flags else PAIRS)
    built = {
        name: tensor
        for tower in model.towers
        for spec in tower.specs
        for name, tensor in canonical_state([model.build_layer(spec)]).items()
    }
    trained = canonical_state(open_run(run).layers)
    lost = trained.keys() - built.keys()
    assert lost == (
        {"head.image_depth_logit_scale"} if "image:depth" not in options.pairs else set()
    )
    assert not [name for name in built if not torch.equal(built[name], trained[name])]


def test_a_run_from_an_export_may_leave_it_out(exported, registries):
    options, model = begun_from(exported, *MODULE, "--pairs", "image:text")
    assert options.tower == () and [each.branch for each in model.towers] == ["image", "text"]


def test_what_does_not_go_with_its_weights_is_refused(exported, registries, capsys):
    with pytest.raises(ValueError, match="depth.patches.conv.weight has shape .* there but"):
        begun_from(exported, *MODULE, "--tower", "depth=32")
    with pytest.raises(SystemExit):
        begun_from(exported, *MODULE, "--weights", f"depth={exported}")
    assert "it holds the depth tower; leave out --weights depth=" in capsys.readouterr().err


def test_a_run_that_begins_from_an_export_without_its_module_says_so(
    data, exported, registries, monkeypatch, capsys
):
    monkeypatch.setattr("data.modules._named", set())
    flags = ["--import", str(exported), "--data", data["jsonl"], "--dry-run", "--ranks", "1"]
    flags += ["--set", "train_batch_size=12"]
    for further, expected in (((), True), (MODULE, False)):
        assert dry_run(parse_options([*flags, *further])) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("leaves out depth, of the Python module examples.depth.shown" in said) == expected
        assert ("depth depth48, " in said) != expected
