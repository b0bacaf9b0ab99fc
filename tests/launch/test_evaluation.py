"""Embeddings, retrieval, classes, examples and a search by a model that was built, not trained: the
numbers are those of plain torch."""

import argparse
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from embedders import TOKENS, make_embedder
from exports import CLIP, trained_model
from matplotlib.image import imread
from PIL import Image
from rounding import assert_equal_rows
from torch.nn import functional as F

from data.index.sources import open_source
from data.keys import caption_key
from data.modalities.fonts import fonts_for, installed_families
from data.modalities.text import Languages, TextModality
from data.modalities.tokenizer import batch_tokens
from data.options import DataOptions
from data.prepare import prepare_data
from data.prepared import HeldOut
from launch.exporting.writing import write_export
from launch.inference.classes import classification
from launch.inference.embedding import Embedded, Embedder, Rows, as_source
from launch.inference.evaluation import examples, retrieval, write_numbers
from launch.inference.folders import (
    forget_embeddings,
    read_embeddings,
    refuse_other_content,
    refuse_other_data,
    write_embeddings,
)
from launch.inference.gallery import Cell, draw_rows
from launch.inference.querying import search, search_table
from launch.inference.reranking import reranked_retrieval
from launch.inference.samples import held_out, left_out, opened
from launch.inference.seen import seen_in_training
from launch.modalities import MODALITIES
from models.towers.fusion import FusionSizes

LANGUAGES = {"number": 2, "default": 0, "names": {}}
MODEL = {"checkpoint": "step-00000001", "run": "a run", "checksum": "a"}


@pytest.fixture(scope="module")
def source():
    return open_source("demo:en+de")


@pytest.fixture(scope="module")
def embedder(source):
    return make_embedder(source)


SUBSET = np.arange(0, 400, 20)
SPLITS = ("train", "test")


def test_embeddings_are_those_of_the_towers(source, embedder):
    """With the first caption of each sample, and with all."""
    for all_captions in (False, True):
        embedded = embedder.embedded(source, SUBSET, all_captions)
        image, text = embedded.rows["image"], embedded.rows["text"]
        assert image.sample.tolist() == SUBSET.tolist()
        assert torch.equal(text.sample, image.sample) == (not all_captions)
        most = None if all_captions else 1
        expected = [text for i in SUBSET for text in source.captions(i)[:most]]
        assert list(text.texts) == expected and len(expected) > len(SUBSET) * all_captions
        assert text.key.tolist() == [caption_key(each) for each in expected]
        row = len(expected) // 2
        tokens = batch_tokens(embedder.trained.tokenizer, [expected[row]], TOKENS)[0]
        for layer in embedder.trained.layers_of("text"):
            tokens = layer(tokens)
        own = tokens["text_embeds"][0].detach()
        assert_equal_rows(text.embeds[row], own)
    torch.testing.assert_close(image.embeds.norm(dim=1), torch.ones(len(SUBSET)))
    alone = embedder.rows("image", source, SUBSET[3:4]).embeds
    assert_equal_rows(image.embeds[3], alone[0])


def test_a_prefix_is_the_first_numbers_of_each_embedding(source, embedder):
    whole = embedder.embedded(source, SUBSET)
    cut = Embedder(embedder.trained, "cpu", 7, 0, prefix=5).embedded(source, SUBSET)
    for name, rows in whole.rows.items():
        expected = torch.nn.functional.normalize(rows.embeds[:, :5])
        torch.testing.assert_close(cut.rows[name].embeds, expected, rtol=1e-4, atol=1e-5)
    assert retrieval(cut) != retrieval(whole)
    with pytest.raises(ValueError, match="--prefix 16: the embeddings of this model have 16"):
        Embedder(embedder.trained, "cpu", 7, 0, prefix=16)


def test_texts_are_read_by_the_modality_that_a_module_registers(source, embedder, registries):
    """With all that it is given in training."""
    given = []

    class Backwards(TextModality):
        def load(self, source, request, seed):
            turned = [source.captions(i)[0][::-1] for i in range(len(source))]
            return super().load(as_source(turned), request, seed)

    def load(inputs):
        given.append(inputs)
        return Backwards(inputs.tokenizer, inputs.options.max_text_tokens, inputs.length_multiple)

    texts = ["evil star", "a lid"]
    expected = embedder.texts([text[::-1] for text in texts])
    MODALITIES["text"] = replace(MODALITIES["text"], load=load)
    assert torch.equal(embedder.texts(texts), expected)
    rows = embedder.rows("text", source, SUBSET[:3])
    assert torch.equal(rows.embeds, embedder.texts(rows.texts))
    image, text = embedder.trained.towers
    towers = (image, replace(text, config={**text.config, "languages": LANGUAGES}))
    Embedder(replace(embedder.trained, towers=towers), "cpu", 7, 0).texts(texts)
    assert given[-1].languages == Languages(**LANGUAGES)


@pytest.fixture(scope="module")
def by_line(source, tmp_path_factory):
    """(a table with a line per caption, the same data grouped by image); some captions come with
    several images."""
    folder = tmp_path_factory.mktemp("captions")
    lines, groups = ["filepath,title"], []
    for i in range(12):
        (folder / f"{i}.png").write_bytes(source.value("image", i))
        face = "a face" if i % 3 else f"a smile of {i}"
        texts = [f"sign number {i}", face, source.captions(i)[0]]
        lines += [f"{i}.png,{text}" for text in texts]
        groups.append({"image_path": f"{i}.png", "text": texts, "id": str(i)})
    (folder / "lines.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "groups.jsonl").write_text("".join(json.dumps(g) + "\n" for g in groups))
    return open_source(f"csv:{folder}/lines.csv"), open_source(f"jsonl:{folder}/groups.jsonl")


def test_a_line_per_caption_scores_as_the_same_data_grouped(by_line, embedder):
    """CLIP_benchmark#7, openai/CLIP#115: an image in five rows is one image, and each of its
    captions is right, also where another image has the same one."""
    embedded = [
        embedder.embedded(source, source.usable(), all_captions)
        for source, all_captions in zip(by_line, (False, True))
    ]
    lines, groups = map(retrieval, embedded)
    for key in (key for key in groups if "_to_" in key):
        assert lines[key] == pytest.approx(groups[key], abs=1e-9), key
    assert (groups["image_to_text_queries"], groups["image_to_text_answers"]) == (12, 3)
    assert groups["text_to_image_candidates"] == 12 and groups["text_to_image_answers"] > 1
    perfect = torch.eye(12).repeat_interleave(3, 0)
    rows = {name: replace(own, embeds=perfect) for name, own in embedded[0].rows.items()}
    found = retrieval(replace(embedded[0], rows=rows))
    assert found["image_to_text_R@1"] == found["text_to_image_R@1"] == 1.0


def test_reranking_equals_every_pair_by_itself(source):
    """Batches of 7 cut images, texts and pairs; texts have other lengths. Each pair's score is
    computed alone, and ranks are counted by hand."""
    embedder = make_embedder(source, FusionSizes(1, 16, 2))
    for all_captions, numbers in ((False, (5,)), (True, (5, 1000))):
        embedded = embedder.embedded(source, SUBSET, all_captions)
        image, text = embedded.rows["image"], embedded.rows["text"]
        # [n, m]
        scores = torch.stack(
            [matching_scores(embedder, source, embedded, i) for i in range(len(image.sample))]
        )
        similarity, right = image.embeds @ text.embeds.T, text.sample == image.sample[:, None]
        assert scores.std() > 1e-3
        for number in numbers:
            values = reranked_retrieval(embedder, embedded, source, number)
            for direction, *three in (
                ("image_to_text", scores, similarity, right),
                ("text_to_image", scores.T, similarity.T, right.T),
            ):
                ranks = ranks_by_hand(*three, number)
                for k in (1, 10):
                    expected = pytest.approx(np.mean(np.array(ranks) < k))
                    assert values[f"{direction}_R@{k}"] == expected, (direction, number)
                median = pytest.approx(float(np.median(ranks)) + 1)
                assert values[f"{direction}_median_rank"] == median, (direction, number)
        assert values != {key: retrieval(embedded)[key] for key in values}


def ranks_by_hand(by_pair, alike, is_right, number):
    """Of each query, after its first `number` candidates were scored; where none of these is right,
    by similarity."""
    ranks = []
    for query in range(len(alike)):
        first = alike[query].argsort(descending=True)[:number]
        chosen = first if is_right[query, first].any() else torch.arange(alike.shape[1])
        values_of = (by_pair if chosen is first else alike)[query, chosen]
        best = values_of[is_right[query, chosen]].max()
        ranks.append(int((values_of[~is_right[query, chosen]] >= best).sum()))
    return ranks


@torch.no_grad()
def matching_scores(embedder, source, embedded, i):
    """[m] of one image with each text, alone and without padding."""
    one = embedded.rows["image"].sample[i : i + 1].numpy()
    ((_, outputs),) = embedder.outputs("image", source, one)
    scores = []
    for text in embedded.rows["text"].texts:
        tensors = batch_tokens(embedder.trained.tokenizer, [text], TOKENS)[0]
        for layer in embedder.trained.layers_of("text"):
            tensors = layer(tensors)
        given = outputs["image_tokens"], tensors["text_tokens"], tensors["text_mask"]
        scores.append(embedder.trained.layers[-1].fusion(*given))
    return torch.cat(scores)


def test_a_folder_of_embeddings_is_mapped_and_searched(source, embedder, tmp_path):
    embedded = embedder.embedded(source, SUBSET)
    write_embeddings(tmp_path / "out", embedded.rows, source, MODEL)
    embeds, lines, specs = read_embeddings(tmp_path / "out", MODEL)
    image = embedded.rows["image"].embeds
    assert isinstance(embeds, np.memmap) and np.array_equal(embeds, image.numpy())
    assert specs == [source.spec]
    found = search(image[3:4], embeds, lines, 4)
    assert len(found) == 4 and found[0]["id"] == source.identity(SUBSET[3])
    assert found[0]["caption"] == source.captions(SUBSET[3])[0]
    columns = search_table("words", found).columns
    assert [column.header for column in columns] == ["similarity", "caption", "id", "where"]
    assert [*columns[1].cells] == [line["caption"] for line in found]
    before = [{**line} for line in found]  # of a folder that an earlier version wrote
    _ = [line.pop("caption") for line in before]
    assert len(search_table("words", before).columns) == 3
    assert found[0]["similarity"] == pytest.approx(1.0, abs=1e-3)
    texts = [*map(json.loads, (tmp_path / "out" / "texts.jsonl").open())]
    i = int(SUBSET[5])
    of_sample = {"index": i, "id": source.identity(i), "where": source.where(i)}
    assert texts[5] == {**of_sample, "image": 5, "text": source.captions(i)[0]}
    odd = replace(embedded.rows["text"], texts=["a\u2028line\x85 of\u2029 its own"] * len(texts))
    write_embeddings(tmp_path / "out", {"text": odd}, source, MODEL)
    assert read_embeddings(tmp_path / "out", MODEL, "text")[1][5]["text"] == odd.texts[5]
    refuse_other_content(tmp_path / "out")
    # again, of a checkpoint of the same name
    write_embeddings(tmp_path / "out", embedded.rows, source, MODEL | {"checksum": "b"})
    with pytest.raises(ValueError, match="in a run, not of the weights of step-00000001 in a run"):
        read_embeddings(tmp_path / "out", MODEL)
    with pytest.raises(FileNotFoundError, match="make it with evaluate.py RUN_DIR --embeddings"):
        read_embeddings(tmp_path / "none", MODEL)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="holds something else"):
        refuse_other_content(tmp_path / "other")


def test_embeddings_in_another_format_are_refused(source, embedder, tmp_path):
    """As an earlier version may have left them: with one message, whatever differs."""
    rows = embedder.embedded(source, SUBSET[:3]).rows
    for name, change in (
        ("about.json", lambda text: "[]"),
        ("about.json", lambda text: text.replace('"checksum"', '"weights"')),
        ("about.json", lambda text: text.replace('"modalities"', '"branches"')),
        ("about.json", lambda text: text.replace('"image"', '"../image"')),
        ("images.jsonl", lambda text: text.replace('"content"', '"hash"')),
        ("images.jsonl", lambda text: text[: len(text) // 2]),
        ("images.jsonl", lambda text: text.partition("\n")[2]),
        ("image.npy", lambda text: ""),
        ("image.npy", None),
    ):
        write_embeddings(tmp_path, rows, source, MODEL)
        if change is None:
            (tmp_path / name).unlink()
        else:
            text = (tmp_path / name).read_text(encoding="latin-1")
            (tmp_path / name).write_text(change(text), encoding="latin-1")
        with pytest.raises(ValueError, match="another format"):
            read_embeddings(tmp_path, MODEL)


def test_embeddings_of_several_sets_are_searched_together(source, embedder, tmp_path):
    for name, subset in (("a", SUBSET[:6]), ("b", SUBSET[6:])):
        rows = embedder.embedded(source, subset).rows
        write_embeddings(tmp_path / "out" / name, rows, source, MODEL)
    refuse_other_content(tmp_path / "out")
    embeds, lines, specs = read_embeddings(tmp_path / "out", MODEL)
    image = embedder.rows("image", source, SUBSET)
    assert [line["index"] for line in lines] == image.sample.tolist() and specs == ["demo:en+de"]
    assert_equal_rows(embeds, image.embeds)
    forget_embeddings(tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_embeddings_know_the_images_they_are_of(embedder, emoji_files, tmp_path):
    """By content, whatever the data set is called and where its lines stand: others are not drawn
    in their place."""
    source, _ = emoji_files
    rows = embedder.embedded(source, np.arange(9)).rows
    write_embeddings(tmp_path / "out", rows, source, MODEL)
    _, lines, specs = read_embeddings(tmp_path / "out", {**MODEL, "run": "by another path"})
    refuse_other_data(tmp_path / "out", lines, open_source(specs[0]), "image")
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="train.jsonl:1 is no longer what it was"):
        refuse_other_data(tmp_path / "out", lines, open_source(specs[0]), "image")
    file.write_text("\n".join(file.read_text().splitlines()[:3]) + "\n")
    with pytest.raises(ValueError, match="no longer what it was"):
        refuse_other_data(tmp_path / "out", lines[3:], open_source(specs[0]), "image")


def test_what_cannot_be_used_or_read_is_reported_and_left_out(
    embedder, emoji_files, tmp_path, capsys
):
    source, files = emoji_files
    lines = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "half.jsonl").write_text(lines + '{"image_path": "none.png", "text": "no"}\n')
    assert left_out(opened(source.spec, embedder.trained)) == 0
    assert not capsys.readouterr().out
    part = opened(f"jsonl:{tmp_path / 'half.jsonl'}", embedder.trained)
    said = capsys.readouterr().out
    assert left_out(part) == 1 and len(part.subset) == 9
    assert "1 of 10 samples of" in said and "missing-file" in said
    whole = embedder.rows("image", source, np.arange(9))
    assert whole.sample.tolist() == list(range(9))
    for i in (2, 5):
        files[i].unlink()
    left = embedder.rows("image", source, np.arange(9))
    assert left.sample.tolist() == [0, 1, 3, 4, 6, 7, 8]
    assert_equal_rows(left.embeds, whole.embeds[left.sample])
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 9 images of jsonl:" in said and f"{files[2].name}" in said and "left out" in said
    for file in files:
        file.unlink(missing_ok=True)
    with pytest.raises(OSError, match="9 of 9 images of jsonl:"):
        embedder.rows("image", source, np.arange(9))


@pytest.fixture
def emoji_files(source, tmp_path, monkeypatch):
    """(a JSON-lines set of nine images, their files)."""
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    lines, files = [], []
    for i in range(9):
        files.append(tmp_path / f"{i}.png")
        files[-1].write_bytes(source.value("image", i))
        lines.append(json.dumps({"image_path": files[-1].name, "text": source.captions(i)[0]}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return open_source(f"jsonl:{tmp_path / 'train.jsonl'}"), files


def whole(spec, **more):
    found = open_source(f"imagefolder:{spec}", **more)
    return HeldOut(found, found.usable())


def test_classes_by_prompts_neighbours_and_a_probe(source, embedder, tmp_path):
    draw = np.random.default_rng(0)
    colours = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
    for split, per_class in (("train", 12), ("test", 6)):
        for name, colour in colours.items():
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(per_class):
                noise = draw.integers(0, 40, (40, 40, 3)) + np.array(colour)
                image = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
                image.save(tmp_path / split / name / f"{i}.png")
    (tmp_path / "templates.txt").write_text("{}\na {} square\n")
    prompted = {split: f"{tmp_path / split}?templates={tmp_path}/templates.txt" for split in SPLITS}
    train, test = (whole(prompted[split]) for split in SPLITS)
    values = classification(embedder, test, train)
    assert values["num_classes"] == 3 and values["num_samples"] == 18
    # colours survive any convolutions
    assert values["neighbours_top_1"] > 0.9 and values["linear_probe_top_1"] > 0.9
    names = sorted(colours)
    prompts = embedder.texts([t.format(n) for n in names for t in ("{}", "a {} square")])
    by_class = F.normalize(prompts.view(3, 2, -1).mean(1), dim=1)
    image = embedder.rows("image", test.source, test.subset)
    guessed = [names[c] for c in (image.embeds @ by_class.T).argmax(1).tolist()]
    named = [test.source.captions(i)[0] for i in image.sample.tolist()]
    assert values["zero_shot_top_1"] == pytest.approx(np.mean(np.equal(guessed, named)))
    assert values["zero_shot_top_5"] == 1.0
    alone = classification(embedder, test, None)
    figures = {f"zero_shot_{name}" for name in ("top_1", "top_5", "mean_per_class")}
    assert alone.keys() == {"num_samples", "num_classes"} | figures
    # a class is a folder, not a prompt
    assert values == classification(embedder, test, whole(tmp_path / "train"))
    # a class that is only learned from is no answer to a zero-shot question
    shutil.rmtree(tmp_path / "test" / "blue")
    fewer = whole(prompted["test"], refresh=True)
    with_train, alone = (classification(embedder, fewer, more) for more in (train, None))
    assert alone["num_classes"] == 2 and alone.items() <= with_train.items()
    (tmp_path / "train" / "green").rename(tmp_path / "train" / "lime")
    with pytest.raises(ValueError, match="1 of 2 classes of .* the first is 'green'"):
        classification(embedder, fewer, whole(tmp_path / "train"))
    with pytest.raises(ValueError, match="at least 5 training images of 2 classes; .* has 4 of 2"):
        classification(embedder, fewer, HeldOut(fewer.source, fewer.subset[4:8]))


def test_examples_are_marked_right_where_they_are(source, embedder, tmp_path, capsys):
    embedded = embedder.embedded(source, SUBSET, True)
    rows = examples(embedded, source, 5, seed=3)
    assert [row[0].value is None for row in rows] == [True, True, True, False, False]
    for query, *found in rows:
        assert len(found) == 5 and query.similarity is None
        assert [f.similarity for f in found] == sorted((f.similarity for f in found), reverse=True)
        for answer in found:
            image, text = (query, answer.text) if query.value else (answer, query.text)
            of = next(i for i in SUBSET if source.value("image", i) == image.value.data)
            assert answer.right == (text in source.captions(of))
    query, *found = rows[0]
    priced = [  # no formulas
        replace(query, text="for $5 and $a^b^c$"),
        *(replace(answer, text="$\\foo{") for answer in found),
    ]
    draw_rows([priced, *rows[1:]], "a title of $1", tmp_path / "a folder" / "rows.png")
    assert (tmp_path / "a folder" / "rows.png").stat().st_size > 20_000
    capsys.readouterr()
    draw_rows([], "nothing", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists() and "no queries" in capsys.readouterr().out


def test_numbers_are_there_whatever_a_picture_does(emoji_files, tmp_path, monkeypatch, capsys):
    import evaluate

    def fail(*_, **__):
        raise OSError("no space for a picture")

    write_export(trained_model("resnet18:layers=1-1-1-1", CLIP, "infonce"), tmp_path / "model")
    words = f"model --val-data {emoji_files[0].spec} --picture a.png --json a.json --workers 0"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words.split()])
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="no space for a picture"):
        evaluate.main(evaluate.parse())
    assert json.loads((tmp_path / "a.json").read_text())["num_samples"] == {"validation": 9}
    assert "R@10" in capsys.readouterr().out


@pytest.mark.filterwarnings("error")
def test_captions_that_no_font_has_are_reported_in_one_line(tmp_path, monkeypatch, capsys):
    """Not in a warning for each character; those that one has are drawn."""
    path, drawn = tmp_path / "rows.png", {}
    # matplotlib's have no Chinese
    shipped = tuple(name for name in installed_families() if name.startswith(("DejaVu", "STIX")))
    for families in (installed_families(), shipped):
        monkeypatch.setattr("data.modalities.fonts.installed_families", lambda: families)
        missing = bool(fonts_for(["犬猫"]).missing)
        for text in ("犬", "猫", "x"):
            draw_rows([[Cell(None, f"a {text}"), Cell(None, text, 0.5)]], text, path)
            drawn[text] = imread(path)
            *notice, last = capsys.readouterr().out.splitlines()
            assert last == str(path) and len(notice) == (missing and text != "x")
            assert all("fonts-noto-cjk" in line for line in notice)
        # boxes would be the same for both
        assert np.array_equal(drawn["犬"], drawn["猫"]) == missing
        assert not np.array_equal(drawn["犬"], drawn["x"])
    for kind in ("svg", "pdf"):
        draw_rows([[Cell(None, "a 犬"), Cell(None, "猫", 0.5)]], "犬", tmp_path / f"rows.{kind}")
        assert (tmp_path / f"rows.{kind}").is_file()


def test_what_does_not_go_together_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    import evaluate

    for arguments, words in (
        ("--classify-train imagefolder:x", "--classify-train trains on what"),
        ("--classify imagefolder:x --query apple", "--classify tells classes"),
        ("--benchmark . --classify imagefolder:x", "--benchmark measures sets as they lie"),
        ("--query ", "--query is empty"),
        ("--number 0 --query apple", "--number: 0 is below 1"),
        ("--number 4", "--number is of --query"),
        ("--query apple --json out.json", "--query searches; --json is of retrieval"),
        ("--query apple --captions all", "--query searches; --captions is"),
        ("--classify imagefolder:x --val-data demo", "--val-data is of pairs"),
        ("--workers -1", "--workers: -1 is below 0"),
        ("--json train.py/out.json", "nothing can be written in "),
        ("--batch-size -3", "--batch-size: -3 is below 1"),
        ("--rerank 0", "--rerank: 0 is below 1"),
        ("--prefix 0", "--prefix: 0 is below 1"),
        ("--prefix 8 --rerank 5", "--prefix measures retrieval and classes; take --rerank out"),
        ("--rerank 5 --query apple", "--query searches; --rerank is of retrieval"),
        ("--val-data demo --val-data demo:de", "--val-data is given twice, demo and"),
        ("--json .", "--json .: is a folder"),
        ("--picture train.py/a.png", "nothing can be written in "),
        ("--picture queries.jpeg", "a name that ends in .png, .svg or .pdf"),
    ):
        monkeypatch.setattr("sys.argv", ["evaluate.py", "nowhere", *arguments.split(" ")])
        with pytest.raises(SystemExit) as exit:
            evaluate.parse()
        assert exit.value.code == 2 and words in capsys.readouterr().err, arguments


def test_each_question_has_a_file_of_its_own(monkeypatch):
    import evaluate

    def name(*arguments):
        monkeypatch.setattr("sys.argv", ["evaluate.py", "nowhere", *arguments])
        return evaluate.output_name(evaluate.parse(), "step-00000008")

    assert name() == "evaluation-step-00000008.json"
    spec = ["--val-data", "jsonl:my data/a.jsonl"]
    assert name(*spec) == "evaluation-step-00000008-jsonl-my-data-a-jsonl.json"
    long = f"jsonl:{'a/' * 120}"
    asked = [
        [],
        spec,
        ["--captions", "all"],
        ["--prefix", "8"],
        ["--classify", "imagefolder:x"],
        ["--benchmark", "sets"],
        ["--val-data", "demo"],
    ]
    for end in ("b.jsonl", "c.jsonl"):
        asked += [["--val-data", long + end], ["--val-data", long + end, "--captions", "all"]]
    names = {name(*arguments) for arguments in asked}
    assert len(names) == len(asked) and max(map(len, names)) <= 205


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    output = tmp_path / "a new" / "folder" / "out.json"
    write_numbers(output, {"a": float("nan"), "deeper": {"b": float("inf"), "c": 1.5}, "n": 3})
    found = json.loads(output.read_text())
    assert found == {"a": None, "deeper": {"b": None, "c": 1.5}, "n": 3}


def test_what_a_run_held_out_is_looked_for_in_its_roots(tmp_path, source, embedder):
    """Both a set of its own and a part of its data, with the roots that config.json has."""
    for name in ("lists", "images", "run"):
        (tmp_path / name).mkdir()
    lines = []
    for i in range(8):
        (tmp_path / "images" / f"{i}.png").write_bytes(source.value("image", i))
        lines.append(json.dumps({"image_path": f"{i}.png", "text": source.captions(i)[0]}) + "\n")
    (tmp_path / "lists" / "pairs.jsonl").write_text("".join(lines))
    spec, roots = f"jsonl:{tmp_path}/lists/pairs.jsonl", [str(tmp_path / "images")]
    arguments = argparse.Namespace(val_data=None, run_dir=tmp_path / "run")
    of_set = {"data": ["demo"], "val_data": spec, "data_root": roots}
    of_part = {"data": [spec], "val_data": None, "val_fraction": 0.25, "data_root": roots}
    for options, number in ((of_set, 8), (of_part, 2)):
        trained = replace(embedder.trained, record={"options": options, "tokenizer": None})
        (part,) = held_out(arguments, trained).values()
        assert len(part.subset) == number and part.source.value("image", 3) == source.value(
            "image", 3
        )


def test_samples_that_were_trained_on_are_counted(tmp_path, source, embedder, emoji_files):
    """Of the file that a run was trained on all but what it held out; of other data none; and what
    cannot be compared is said."""
    files, _ = emoji_files
    spec = f"jsonl:{tmp_path / 'train.jsonl'}"
    options = {"data": [spec], "val_data": None, "val_fraction": 0.25, "data_root": []}
    record = {"options": options, "tokenizer": None}
    trained = replace(embedder.trained, record=record)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    part = HeldOut(files, files.usable())
    train = prepare_data(DataOptions.from_record(options), None, run_dir).train
    seen = seen_in_training(part, trained, run_dir)
    assert (seen.number, seen.of, seen.kinds) == (len(train), 9, {"content": len(train)})
    assert 5 < len(train) < 9 and seen.words == f"; {len(train)} of 9 samples were trained on"
    found = seen.record()["trained_on"]
    assert found == {"samples": len(train), "of": 9, "by": {"content": len(train)}}
    other = seen_in_training(HeldOut(source, np.arange(1000, 1020)), trained, run_dir)
    assert (other.number, other.of, other.words) == (0, 20, "")
    stream = replace(trained, record=record | {"options": options | {"data": ["stream:a"]}})
    export = replace(trained, record={"options": {}})
    unknown = [seen_in_training(part, model, run_dir) for model in (stream, export)]
    (tmp_path / "train.jsonl").unlink()
    unknown.append(seen_in_training(part, trained, run_dir))
    for each, why in zip(unknown, ("streams", "does not say", "train.jsonl")):
        assert each.number is None and why in each.why and "\n" not in each.why
        assert "could not be checked" in each.words and each.record()["trained_on"]["of"] == 9


def test_only_samples_with_an_image_and_a_text_are_compared(embedder, tmp_path, monkeypatch):
    """A run may have held out samples that lack one, for the sake of other pairs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gaps_here.py").write_text(
        "import numpy as np\n\n\nclass Gaps:\n"
        "    def __len__(self):\n        return 6\n\n"
        "    def __getitem__(self, i):\n"
        "        item = {'image': np.full((20, 20, 3), i, np.uint8), 'text': f'number {i}', 'tone': 1.0}\n"
        "        for name in [] if i > 1 else ['text'] if i else ['image']:\n"
        "            del item[name]\n"
        "        return item\n"
    )
    gaps = open_source(
        "python:gaps_here:Gaps", (("image", "text"), ("tone", "text"), ("image", "tone"))
    )
    assert gaps.usable().tolist() == [*range(6)]
    assert embedder.embedded(gaps, np.array([0, 1, 3, 5])).samples.tolist() == [3, 5]


def test_two_modalities_are_compared_over_the_samples_that_have_both():
    """Each image has its own text. Further images, and a text, of samples without the other are as
    near to what is asked for as its answer; they are neither asked nor found."""
    apart, key = torch.eye(4), torch.arange(4)
    samples = torch.tensor([2, 3, 5, 8])
    whole = {name: Rows(samples, apart, key) for name in ("image", "text")}
    alone = torch.tensor([0, 4, 9])
    image = Rows(
        torch.cat([samples, alone]).sort().values,
        apart[[0, 0, 1, 1, 2, 3, 3]],
        torch.tensor([10, 0, 1, 11, 2, 3, 12]),
    )
    text = Rows(
        torch.tensor([2, 3, 5, 6, 8]), apart[[0, 1, 2, 2, 3]], torch.tensor([0, 1, 2, 9, 3])
    )
    pairs = (("image", "text"),)
    found = retrieval(Embedded({"image": image, "text": text}, pairs))
    assert found == retrieval(Embedded(whole, pairs))
    assert found["image_to_text_R@1"] == found["text_to_image_R@1"] == 1.0
