"""train.py with images, texts, sounds, films and regions at once: split over six ranks as on one, and
what evaluate.py says of it."""

import base64
import io
import json
import os
import re
import sys
from itertools import permutations

import numpy as np
import pytest
from launched import ROOT, metrics, run_to_end
from matplotlib.image import imread
from PIL import Image
from wandb_files import pieces

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402
from bad_films import film  # noqa: E402

import evaluate  # noqa: E402
from data.decoding.sounds import decode_audio  # noqa: E402
from data.index.sources import open_source  # noqa: E402

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")
pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

# no batch normalisation and no dropout, which see the split
VIT = (
    "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0"
)
NO_DROPOUT = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
AST = "hf:ast:hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
TOWERS = ["--image-tower", VIT, "--video-tower", f"{VIT},time=transformer,time_layers=1"]
TOWERS += ["--text-tower", f"bert-tiny:{NO_DROPOUT}"]
TOWERS += ["--audio-tower", f"{AST},num_mel_bins=16,{NO_DROPOUT}"]
SIZES = ["--image-size", 64, "--embed-dim", 16, "--max-text-tokens", 12, "--audio-seconds", 0.5]
SIZES += ["--video-frames", 4, "--video-rate", 8, "--film-clips", 2, "--augmentation", "crop"]
SIZES += ["--val-fraction", 0.2]
PAIRS = ["--pairs", "image:text,video:text,audio:text:0.5,image:video,region:text:0.5"]
PAIRS += ["--loss", "region:text=sigmoid", "--max-regions", 8, "--max-negatives", 3]
MODALITIES = ("image", "text", "audio", "video")
BRANCHES = {"image": 2, "text": 1, "audio": 1, "video": 2}
SPLITS = {
    1: {
        "layout": "merged",
        "stages": {"merged": 1},
        "micro_batch_size": 24,
        "balance": {"strategy": "off"},
    },
    6: {
        "layout": "fork",
        "stages": 1,
        "replicas": BRANCHES,
        "micro_batch_size": {"image": 4, "text": 24, "audio": 12, "video": 4},
        "schedule": "replay",
        "balance": {"strategy": "deal"},
    },
}
PAIRS_OF_SCENES = [("image", "text"), ("image", "region")]
NUM_FILMS = 24
STEPS = 4
EVALUATION = f"evaluation-step-{STEPS:08}.json"
RELATIVE = 1e-5  # fp32, whose sums come in another order


@pytest.fixture(scope="module")
def data(module_folder):
    """A set of pictures, every third of which has no region, and some negatives; and one of segments
    of films, of a tenth to all of a second, so of one to four frames: some with an image and a sound,
    some with none."""
    folder, scenes = module_folder("data"), open_source("demo:scenes:140", PAIRS_OF_SCENES)
    of_pictures, of_films = [], []
    for n in range(60):
        row = {"id": f"p{n}", "text": scenes.captions(n)[0], "image_path": f"p{n}.bmp"}
        (folder / f"p{n}.bmp").write_bytes(scenes.value("image", n))
        if n % 3:
            others = ["a blue elephant", f"a green thing {n}"] if n % 4 == 0 else []
            row["regions"] = [
                {
                    "xyxy": region.extent,
                    "unit": "relative",
                    "text": region.phrases[0],
                    "negatives": others,
                }
                for region in scenes.value("region", n)
            ]
        of_pictures.append(json.dumps(row) + "\n")
    for n in range(NUM_FILMS):
        (folder / f"{n}.mp4").write_bytes(film(number=16 + n))
        for k, (start_s, end_s) in enumerate(((0.0, 0.1), (0.1, 0.5), (0.0, None))):
            i = 3 * n + k
            row = {"id": str(i), "video_path": f"{n}.mp4", "start_s": start_s, "end_s": end_s}
            row["text"] = scenes.captions(60 + i)[0]
            if i % 3:
                (folder / f"{i}.bmp").write_bytes(scenes.value("image", 60 + i))
                row["image_path"] = f"{i}.bmp"
            if i % 2:
                sound = wav(tone(0.3 + i % 5 / 10, 200 + 7 * i))
                (folder / f"{i}.wav").write_bytes(sound)
                row["audio_path"] = f"{i}.wav"
            of_films.append(json.dumps(row) + "\n")
    (folder / "pictures.jsonl").write_text("".join(of_pictures))
    (folder / "films.jsonl").write_text("".join(of_films))
    return folder


def train(folder, ranks, run_dir, *more, expected=0):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= SPLITS[ranks]
    (folder / f"{ranks}.json").write_text(json.dumps(config))
    flags = ["--deepspeed_config", folder / f"{ranks}.json", "--run-dir", run_dir, *PAIRS]
    for name in ("pictures", "films"):
        flags += ["--data", f"jsonl:{folder}/{name}.jsonl"]
    status, output = run_to_end("train.py", *flags, *TOWERS, *SIZES, *more, ranks=ranks)
    assert status == expected, output[-3000:]
    return output


@pytest.fixture(scope="module")
def runs(data, module_folder):
    """Ranks -> run."""
    folder = module_folder("runs")
    for ranks in SPLITS:
        tracked = "offline" if ranks > 1 else "disabled"
        more = ["--steps", STEPS, "--workers", 0, "--wandb", tracked]
        output = train(data, ranks, folder / str(ranks), *more)
        assert all(name in output for name in ("audio → text", "phrase → box", "region → phrase"))
    return {ranks: folder / str(ranks) for ranks in SPLITS}


@pytest.fixture(scope="module")
def run(runs):
    return runs[6]


@pytest.fixture
def evaluated(run, monkeypatch, capsys):
    """What evaluate.py says of the run with these flags."""

    def say(*words):
        monkeypatch.setattr(
            sys, "argv", ["evaluate.py", *map(str, (run, *words)), "--workers", "0"]
        )
        evaluate.main(evaluate.parse())
        return capsys.readouterr().out

    return say


def test_a_fork_of_all_modalities_trains_as_one_rank_does(runs):
    whole, split = map(metrics, runs.values())
    compared = ("contrastive_loss/", "grad_norm/", "left_out_samples/", "duplicate_samples/")
    for step in range(1, STEPS + 1):
        found = [
            {name: value for name, value in line.items() if name.startswith(compared)}
            for line in (split[step], whole[step])
        ]
        norms = {f"grad_norm/{branch}" for branch in (*BRANCHES, "head")}
        pairs = ("image_text", "video_text", "audio_text", "image_video", "region_phrase")
        assert {*norms, *(f"contrastive_loss/{pair}" for pair in pairs)} <= found[1].keys()
        assert found[0] == pytest.approx(found[1], rel=RELATIVE)
        assert split[step]["loss"] == pytest.approx(whole[step]["loss"], rel=RELATIVE)
    # boxes that crops have cut off
    assert any(line.get("left_out_samples/region_phrase") for line in whole.values())
    one, other = (metrics(run_dir, "held_out")[STEPS] for run_dir in runs.values())
    for first, second in permutations(MODALITIES, 2):  # also of those that no loss compared
        name = f"{first}_to_{second}_R@10"
        # one sample more or less among the first ten is what rounding may change
        assert other[name] == pytest.approx(one[name], abs=0.2), name
    assert one["phrase_to_box_queries"] == other["phrase_to_box_queries"] > 0
    for name in ("alignment/region_phrase", "uniformity/region/region_phrase"):
        assert other[name] == pytest.approx(one[name], rel=1e-3), name


def test_the_figures_are_those_of_the_last_evaluation(run, evaluated):
    said = " ".join(evaluated().split())
    assert "4 frames a clip at 8/s at most" in said and "dual softmax" in said
    assert "audio → image" in said
    found = json.loads((run / EVALUATION).read_text())
    last = metrics(run, "held_out")[STEPS]
    trained = {f"validation/{name}": value for name, value in last.items()}
    compared = [name for name in trained if name in found]
    assert {name for name in trained if "_R@" in name or "alignment/" in name} <= {*compared}
    assert {name: found[name] for name in compared} == pytest.approx(
        {name: trained[name] for name in compared}, rel=1e-3, abs=1e-4
    )
    assert 0 < found["validation/grounding_chance_iou_0.5"] < 1
    assert found["validation/grounding_queries"] > 2


def test_panels_of_each_pair_and_branch_and_queries_of_each_direction(run):
    (piece,) = pieces(run)
    assert {
        *("loss/contrastive/audio_text", "optimizer/logit_scale_exp/audio_text"),
        *("throughput/audio/samples_per_s", "throughput/audio/possible_samples_per_s"),
        *("retrieval/validation/audio_to_image/R@1", "alignment/validation/alignment/image_audio"),
        *("queries/validation/audio_to_image", "queries/validation/text_to_audio"),
    } <= {*piece.keys()}


def test_the_report_shows_strips_of_frames_and_spectrograms_that_can_be_heard(run):
    record = json.loads((run / "queries.json").read_text())["sets"]["validation"]
    asked = record["audio_to_image"][0]
    sound = record["samples"][asked["query"]]
    picture = Image.open(io.BytesIO(base64.b64decode(sound["audio_picture"])))
    assert picture.size == (180, 120) and np.asarray(picture).std() > 20
    assert decode_audio(base64.b64decode(sound["audio_sound"])).rate == 16_000
    assert "image_picture" in record["samples"][asked["answers"][0]["sample"]]
    clip = record["samples"][record["video_to_text"][0]["query"]]
    strip = Image.open(io.BytesIO(base64.b64decode(clip["video_picture"])))
    assert strip.width > 3 * strip.height and np.asarray(strip).std() > 20
    page = (run / "report.html").read_text()
    assert "audio → image" in page and "<audio controls" in page
    assert len(page) < 5_000_000


def test_a_sound_finds_itself_and_is_classified(data, evaluated, tmp_path):
    """Itself before all others; a tone is as any file of the set."""
    heard = tmp_path / "a sound"  # a file is known by its content
    heard.write_bytes((data / "31.wav").read_bytes())
    films = f"jsonl:{data}/films.jsonl"
    found = evaluated("--query", heard, "--find", "audio", "--val-data", films, "--number", 3)
    assert re.search(r"1\.000\b[^\n]*│ +31\b", found) and found.count("films.jsonl") == 3
    drawn = tmp_path / "found.png"
    found = evaluated("--query", heard, "--find", "image", "--val-data", films, "--picture", drawn)
    ids = [int(each) for each in re.findall(r"│ (\d+) +│", found)]
    assert len(ids) == 20 and all(n % 3 for n in ids)  # the others have no image
    assert drawn.stat().st_size > 20_000
    evaluated("--embeddings", tmp_path / "out", "--val-data", films)
    again = evaluated("--query", data / "31.bmp", "--embeddings", tmp_path / "out", "--number", 2)
    assert "text" in again.splitlines()[2] and again.count("films.jsonl") == 2
    for name, pitch in (("low", 200), ("high", 2000)):
        (tmp_path / "classes" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "classes" / name / f"{i}.wav").write_bytes(wav(tone(0.4, pitch + 9 * i)))
    classes = f"audiofolder:{tmp_path}/classes?templates=the sound of {{}}"
    assert "zero-shot" in evaluated("--classify", classes)
    said = evaluated("--classify", classes, "--classify-train", classes)
    assert "chance, 2 classes" in said
    (tmp_path / "notes.wav").write_text("no sound")
    for words, said in (
        (["--query", tmp_path / "notes.wav"], "is no file of a modality of this model"),
        (["--query", "missing.wav"], "there is no such file"),
        (
            ["--query", "a dog", "--find", "palette"],
            "this model has image, text, video, audio, region",
        ),
        (["--classify", films], "has image and video and audio of image and video and audio"),
    ):
        with pytest.raises(ValueError, match=said):
            evaluated(*words)


def test_a_clip_finds_itself_and_is_classified(data, evaluated, tmp_path):
    for name, n in (("runs", 0), ("jumps", 1)):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "a.mp4").write_bytes((data / f"{n}.mp4").read_bytes())
    said = evaluated("--classify", f"videofolder:{tmp_path}/classes")
    assert "chance, 2 classes" in said and "4 frames a clip at 8/s at most" in said
    picture, films = tmp_path / "found.png", ["--val-data", f"jsonl:{data}/films.jsonl"]
    words = ["--query", data / "3.mp4", "--number", 2, "--picture", picture]
    said = evaluated(*films, *words, "--find", "video")
    assert "1.000" in said and " 11 " in said  # the third clip of the film is all of it
    assert imread(picture).std() > 0.1


def test_where_a_clip_is_found_in_films(data, run, evaluated, tmp_path):
    picture = tmp_path / "found.png"
    words = ["--query", data / "3.mp4", "--find", "window", "--number", 99, "--picture", picture]
    lines = [line for line in evaluated(*words).splitlines() if " s " in line and "│" in line]
    held_out = json.loads((run / EVALUATION).read_text())["num_samples"]
    assert 2 <= len(lines) <= held_out["validation"] / 2  # the best window of each film
    # of a film that is damaged since, and of no other one, there is no window
    _, first = lines[0].split("│")[3].split("/")  # number of the data set, id
    damaged = data / f"{int(first) // 3}.mp4"
    whole, status = damaged.read_bytes(), damaged.stat()
    third = len(whole) // 3
    damaged.write_bytes(whole[:third] + bytes(third) + whole[-third:])
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    left = evaluated(*words)
    damaged.write_bytes(whole)
    assert "left out" in left and [line for line in lines if line in left] == lines[1:]
    assert imread(picture).std() > 0.1


def test_a_resumed_run_ends_where_an_undisturbed_one_ends_bit_for_bit(data, tmp_path):
    """With two workers, each of which has its own film open."""
    flags = ("--steps", 3, "--eval-every", 3, "--workers", 2)
    train(data, 1, tmp_path / "whole", *flags)
    # which stops after its first step, with a checkpoint
    train(data, 1, tmp_path / "parts", *flags, "--max-hours", 1e-9, expected=75)
    train(data, 1, tmp_path / "parts", *flags)
    losses = [
        [line["loss"] for line in metrics(tmp_path / name).values()] for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
