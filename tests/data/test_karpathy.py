"""Karpathy's splits of COCO and Flickr: which images, whose captions, and what is refused."""

import json

import pytest

from data.index.sources import open_source


@pytest.fixture
def split_file(demo, tmp_path):
    """Five images, one of them without its file, in three splits; the second has no folder, as
    Flickr's."""
    images = []
    for i, split in enumerate(("train", "test", "restval", "test", "test")):
        folder = {} if i == 1 else {"filepath": "val2014"}
        name = f"{i}.png"
        if i < 4:
            path = tmp_path / "images" / folder.get("filepath", "") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(demo.value("image", i))
        sentences = [{"raw": f"caption {i} {k}", "tokens": ["caption"]} for k in range(5)]
        images.append({**folder, "filename": name, "imgid": i, "split": split})
        images[-1] |= {"sentences": sentences}
    images[0]["cocoid"] = 391895
    (tmp_path / "dataset.json").write_text(json.dumps({"images": images}))
    return tmp_path / "dataset.json"


def test_a_split_has_its_images_with_all_their_captions(split_file, tmp_path):
    source = open_source(f"karpathy:{split_file}?split=test&root={tmp_path / 'images'}")
    assert len(source) == 3 and source.usable().tolist() == [0, 1]
    assert [source.identity(i) for i in range(3)] == ["1", "3", "4"]
    assert source.captions(1) == [f"caption 3 {k}" for k in range(5)]
    assert source.value("image", 1) == (tmp_path / "images" / "val2014" / "3.png").read_bytes()
    assert source.where(0).endswith("dataset.json#images[1] 1.png")
    (bad,) = source.bad_samples()
    assert bad[2] == "missing-file"
    both = open_source(f"karpathy:{split_file}?split=train+restval&root={tmp_path / 'images'}")
    assert [both.identity(i) for i in range(2)] == ["391895", "2"]
    # the folder that filepath names may be the root itself
    inside = open_source(f"karpathy:{split_file}?split=restval&root={tmp_path / 'images/val2014'}")
    assert inside.value("image", 0) == both.value("image", 1)


def test_an_image_of_no_split_is_bad_whatever_is_asked_for(split_file, tmp_path):
    content = json.loads(split_file.read_text())
    del content["images"][0]["split"]
    content["images"].append("no image")
    split_file.write_text(json.dumps(content))
    source = open_source(f"karpathy:{split_file}?split=restval&root={tmp_path / 'images'}")
    assert [reason for _, _, reason, _ in source.bad_samples()] == ["invalid-row"] * 2
    assert len(source) == 3 and len(source.usable()) == 1


def test_refusals(split_file, tmp_path):
    counted = r"no split is given; .* the file has train \(1\), test \(3\), restval \(1\)"
    for options, words in (
        ("", counted),
        ("?split=tset", r"no split 'tset'; it has .*did you mean 'test'"),
        ("?splits=test", "unknown option 'splits'"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(f"karpathy:{split_file}{options}")
    images = [{"split": "test"}, {"split": "test", "filename": "a.png", "sentences": []}]
    for content, words in (
        ({"annotations": []}, "no file of Karpathy's splits"),
        ({"images": images}, "an image has a filename"),
    ):
        split_file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=words):
            open_source(f"karpathy:{split_file}?split=test")
