"""`--terms`: what is refused, and that a run with them is the same however it is split."""

import json

import pytest
from launched import BATCH, SMALL, metrics, run_to_end, words, write_pairs

from data.batching.load_control import FeedRates
from data.options import read_terms
from engine.objective import Joint, Pair
from launch.batching.planned import refuse_lone_rows
from launch.objective import joints_of, refuse_views
from models.losses import LOSSES, MILNCE, InfoNCE, Matching, PlainLoss, Prefixed, Views

BRANCHES = ("image", "text", "audio")


def volume(first, second, third, scalars):
    return (first * second * third).sum()


def test_what_is_written_is_what_is_trained(monkeypatch):
    monkeypatch.setitem(LOSSES, "volume", lambda: PlainLoss(volume, {"scale": 2.0}))
    views, three = joints_of("image=infonce:0.5, image+text+audio=volume", BRANCHES, "positives")
    assert views == Joint(("image",), views.loss, 0.5, "image_image_")
    assert isinstance(views.loss, Views) and views.loss.loss.targets.duplicates == "positives"
    assert views.scalars == {"logit_scale": "image_image_logit_scale"}
    assert three.name == "image_text_audio" and three.scalars == {"scale": "image_text_audio_scale"}
    (cut,) = joints_of("text=sigmoid", BRANCHES, prefixes=(8, 16))
    assert isinstance(cut.loss, Prefixed) and cut.loss.dims == (8, 16)
    assert joints_of("", BRANCHES) == () == read_terms("")


@pytest.mark.parametrize(
    "given, words",
    [
        ("image=milnce", "image=milnce: views of one branch are compared by infonce or sigmoid"),
        ("imge=infonce", "no pair of --pairs has 'imge'; did you mean 'image'"),
        ("image=infonec", "loss 'infonec' is not known"),
        ("image+text+audio=infonce", "'infonce' compares two branches; a loss over 3 is one of"),
    ],
)
def test_terms_that_are_refused(given, words):
    with pytest.raises(ValueError, match=f"argument --terms: .*{words}"):
        joints_of(given, BRANCHES)


def test_rows_that_a_sample_has_once_are_not_compared_with_each_other():
    refuse_lone_rows("image=infonce", FeedRates(views_per_image=2))
    refuse_lone_rows("text=infonce,image+text+audio=x", FeedRates(captions_per_image=2))
    with pytest.raises(ValueError, match="the image branch, and each has one; give --views-per"):
        refuse_lone_rows("text=infonce,image=infonce", FeedRates(captions_per_image=2))
    with pytest.raises(ValueError, match='text branch, .* "captions_per_image": \\[2, 2\\]'):
        refuse_lone_rows("text=infonce", FeedRates())
    with pytest.raises(ValueError, match="the audio branch, .* which images alone have"):
        refuse_lone_rows("audio=infonce", FeedRates(views_per_image=2))


def test_several_views_beside_what_takes_one_row_of_each_image():
    plain, pair = PlainLoss(volume), ("image", "text")
    refuse_views(2, [Pair(*pair, InfoNCE()), Pair("audio", "text", plain)])
    refuse_views(1, [Pair(*pair, plain)])
    for term, said in (
        (Pair(*pair, plain), "this loss of image_text"),
        (Pair(*pair, Prefixed(MILNCE(), (4,))), "this loss of image_text"),
        (Pair(*pair, InfoNCE(), matching=Matching()), "--fusion of image_text"),
        (Pair(*pair, InfoNCE(), made=("region", "phrase")), "regions of region_phrase"),
    ):
        with pytest.raises(ValueError, match=f"--views-per-image: 2, but {said} takes one row"):
            refuse_views(2, [term])


def branches_of(layout, stages):
    fixed = {"layout": layout, "stages": stages, "schedule": "batch_sync", "micro_batch_size": 6}
    return fixed | {"balance": {"strategy": "off"}}


def trained(folder, layout, stages, ranks, flags):
    """The metrics of a run."""
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "branches": branches_of(layout, stages),
    }
    (folder / f"{layout}.json").write_text(json.dumps(config))
    own = ["--deepspeed_config", folder / f"{layout}.json", "--run-dir", folder / layout]
    status, output = run_to_end("train.py", *SMALL, *flags, *own, ranks=ranks)
    assert status == 0, output[-3000:]
    return metrics(folder / layout), " ".join(output.split())


def test_a_loss_over_three_branches_trains_alike_in_a_fork_and_merged(tmp_path):
    modules = "examples.modality,examples.volume"
    flags = ["--import-module", modules, "--data", "python:examples.dataset:Palettes"]
    flags += words("--pairs image:text,palette:text --terms text+image+palette=volume:0.5")
    flags += words("--steps 1 --workers 0 --max-text-tokens 16 --val-fraction 0.2 --eval-every 100")
    stages = {"image": 1, "text": 1, "palette": 1}
    fork, said = trained(tmp_path, "fork", stages, 3, flags)
    merged, _ = trained(tmp_path, "merged", {"merged": 1}, 1, flags)
    assert "beside it text+image+palette=volume:0.5" in said
    name = "contrastive_loss/text_image_palette"
    for each in (name, "loss", "text_image_palette_logit_scale_exp", "grad_norm/text"):
        assert fork[1][each] == pytest.approx(merged[1][each], rel=1e-4), each
    assert fork[1]["loss_weight/contrastive/text_image_palette"] == 0.5


def test_a_run_with_views_trains_alike_in_a_fork_and_merged(tmp_path):
    """Two views of each image, compared with its text and with each other; evaluated at the end."""
    data = ["--data", write_pairs(tmp_path / "pairs", 160), "--val-fraction", 0.2]
    flags = words("--views-per-image 2 --terms image=infonce:0.5 --steps 3 --workers 0")
    flags += [*data, *words("--max-text-tokens 16 --save-every 100 --eval-every 100")]
    fork, said = trained(tmp_path, "fork", {"image": 1, "text": 1}, 2, flags)
    merged, _ = trained(tmp_path, "merged", {"merged": 1}, 1, flags)
    assert "beside it image=infonce:0.5; 2 views of each image" in said
    assert sorted(fork) == sorted(merged) == [1, 2, 3]
    names = ["contrastive_loss/image_text", "contrastive_loss/image_image"]
    for step, line in fork.items():
        whole = line[names[0]] + 0.5 * line[names[1]]
        assert line["loss"] == pytest.approx(whole, rel=1e-5)
        # batch normalisation enlarges, step by step, what rounding makes
        within, first = (1e-4, ["grad_norm/image"]) if step == 1 else (1e-3, [])
        for name in (*names, "loss", "image_image_logit_scale_exp", *first):
            assert line[name] == pytest.approx(merged[step][name], rel=within), (step, name)
