"""Regions: every layout is read as it is published, every fault has its reason, and boxes lie on
the image as it is shown."""

import io
import json
import pickle
import struct
import sys
import tarfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from data.annotations import Annotation
from data.bad_samples import ANNOTATION_LIMIT, CODES, Absent, BadSample
from data.bad_tables import count_bad
from data.batching.mixture import open_sources
from data.batching.shown import ShownAnnotations, shown_annotations
from data.index.sources import open_format, open_source
from data.stored.derived import REGIONS
from data.streams.opening import open_stream

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import HUGE, add, png_chunk  # noqa: E402

PAIRS = (("image", "text"), ("image", "region"))
SIZE = (40, 20)  # of images
RED = (255, 0, 0)
FAULTS = [  # a region, its reason, a word of what is said
    ({"box": [1, 2, 0, 4]}, "empty-box", "width"),
    ({"box": [1, 2, 5, -4]}, "empty-box", "height"),
    ({"box": [1, 2, 1e-9, 5]}, "empty-box", "width"),
    ({"xyxy": [9, 2, 9, 8]}, "empty-box", "width"),
    ({"xyxy": [30, 2, 20, 8]}, "inverted-box", "x1 <= x2"),
    ({"xyxy": [20, 8, 30, 2]}, "inverted-box", "y1 <= y2"),
    ({"box": [41, 2, 5, 5]}, "outside-image", "40 x 20"),
    ({"box": [-6, 2, 10, 5]}, "outside-image", "more than half"),
    ({"box": [0.9, 0.2, 0.9, 0.5], "unit": "relative"}, "outside-image", "fractions"),
    ({"box": [float("nan"), 2, 5, 5]}, "invalid-box", "four numbers"),
    ({"box": [1, 2, float("inf"), 5]}, "invalid-box", "four numbers"),
    ({"box": [1, 2, 10**400, 5]}, "invalid-box", "four numbers"),
    ({"box": [1, 2, 5]}, "invalid-box", "four numbers"),
    ({"box": ["1", 2, 5, 5]}, "invalid-box", "four numbers"),
    ({"box": [True, 2, 5, 5]}, "invalid-box", "four numbers"),
    ({"box": None}, "invalid-box", "xyxy"),
    ({"unit": "percent"}, "invalid-box", "pixels or relative"),
    ({"unit": "relative"}, "not-relative", "pixels?"),
    ({"text": " "}, "no-phrase", "a text"),
    ({"text": None}, "no-phrase", "a text"),
    ({"text": 5}, "no-phrase", "a text"),
    ({"text": []}, "no-phrase", "a text"),
    ({"text": HUGE}, "huge-caption", "10,005"),
    ({"text": "a\0b"}, "nul-character", "NUL"),
    ({"text": "\ud800"}, "invalid-utf8", "UTF-8"),
    ("a box", "invalid-row", "{box, text}"),
]
GOOD = {"box": [4, 2, 8, 8], "text": "red"}
FOUND = Annotation((0.1, 0.1, 0.3, 0.5), ("red",))


def encoded(size=SIZE, kind: str = "PNG", **saving) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (0, 0, 255)).save(out, kind, **saving)
    return out.getvalue()


def jsonl(folder: Path, *rows: dict, name: str = "set.jsonl") -> str:
    """A set of these rows, which have an image, a caption and an id unless they say otherwise."""
    if not (folder / "a.png").exists():
        (folder / "a.png").write_bytes(encoded())
    usual = {"image_path": "a.png", "text": "a caption"}
    lines = [json.dumps({"id": str(n), **usual, **row}) for n, row in enumerate(rows)]
    (folder / name).write_text("\n".join(lines))
    return f"jsonl:{folder / name}"


def opened(spec: str, **building):
    return open_source(spec, pairs=PAIRS, workers=1, **building)


def test_boxes_of_both_kinds_in_both_units_with_phrases_and_negatives(tmp_path):
    some = {"box": [4, 2, 8, 8], "text": ["red", "a red one"], "negatives": ["green", "blue"]}
    rows = [
        {"regions": [GOOD, some]},
        {"regions": [{"xyxy": [4, 2, 12, 10], "text": "red", "unit": "pixels"}]},
        {"regions": [{"xyxy": [0.1, 0.1, 0.3, 0.5], "text": "red", "unit": "relative"}]},
        {"regions": [{"box": [0.1, 0.1, 0.2, 0.4], "text": "red", "unit": "relative"}]},
        {},
        {"regions": []},
        {"regions": None},
        {"regions": [{"box": [-1, 14, 11, 8], "text": "over the edge"}]},
        {"image_path": "none.png", "regions": [GOOD]},
    ]
    spec = jsonl(tmp_path, *rows)
    for source in (opened(spec), opened(spec), opened(spec, check="header")):
        assert source.value("region", 0) == [
            FOUND,
            Annotation(FOUND.extent, ("red", "a red one"), ("green", "blue")),
        ]
        assert all(source.value("region", i) == [FOUND] for i in (1, 2, 3))
        assert source.value("region", 7) == [Annotation((0.0, 0.7, 0.25, 1.0), ("over the edge",))]
        for i in (4, 5, 6):
            with pytest.raises(Absent, match="no region"):
                source.value("region", i)
        with pytest.raises(BadSample, match="none.png"):
            source.value("region", 8)
        assert source.usable().tolist() == list(range(8)) and not [*source.broken_values()]
        assert np.flatnonzero(source.lacking("region")).tolist() == [4, 5, 6, 8]
        assert source.column("num_regions").tolist() == [2, 1, 1, 1, 0, 0, 0, 1, 0]
        assert source.numbers("num_negatives", np.array([0, 1])).tolist() == [2, 0]
        assert source.column("num_regions").dtype == source.column("num_negatives").dtype == "i4"
        assert source.captions(0) == ["a caption"]
    mixed = open_sources([spec, "demo"], pairs=PAIRS)
    assert mixed.value("region", 0)[0] == FOUND and mixed.lacking("region")[9]
    assert mixed.column("num_regions")[:2].tolist() == [2, 1] and not mixed.column("num_regions")[9]


def test_each_fault_has_its_reason_and_the_other_regions_stay(tmp_path):
    rows = [
        {"regions": [GOOD, fault if isinstance(fault, str) else GOOD | fault]}
        for fault, *_ in FAULTS
    ]
    rows = [*rows, *({"regions": row["regions"][1:]} for row in rows)]
    for row in rows:
        for region in row["regions"]:
            if isinstance(region, dict) and "xyxy" in region:
                region.pop("box", None)
    for check in ("decode", "header"):
        source = opened(jsonl(tmp_path, *rows), check=check)
        found = {identity: (reason, said) for identity, _, reason, said in source.broken_values()}
        assert len(source.usable()) == len(rows) == len(found)
        for i, (fault, reason, words) in enumerate(FAULTS):
            assert source.value("region", i) == [FOUND], fault
            assert found[str(i)][0] == reason and words in found[str(i)][1], fault
            assert "1 of 2 regions" in found[str(i)][1]
            alone = i + len(FAULTS)  # the sample is used without any
            assert found[str(alone)][0] == reason and "without its region" in found[str(alone)][1]
            with pytest.raises(Absent):
                source.value("region", alone)
            assert source.captions(alone) == ["a caption"] and source.value("image", alone)


def test_thousandths_and_the_unit_of_a_whole_data_set(tmp_path):
    thousandths = {"xyxy": [100, 100, 300, 500], "unit": "thousandths"}
    bare = [{"xyxy": thousandths["xyxy"], "text": "red"}, GOOD | {"unit": "pixels"}]
    fractions = {"box": [0.1, 0.1, 0.2, 0.4], "text": "red"}
    for regions, option in (
        ([thousandths | {"text": "red"}], ""),
        (bare, "?unit=thousandths"),
        ([fractions, thousandths | {"text": "red"}], "?unit=relative"),
    ):
        source = opened(jsonl(tmp_path, {"regions": regions}) + option)
        assert source.value("region", 0) == [FOUND] * len(regions)
    over = opened(
        jsonl(tmp_path, {"regions": [GOOD, bare[0] | {"xyxy": [0, 0, 9, 1200]}]})
        + "?unit=thousandths"
    )
    ((_, _, reason, said),) = over.broken_values()
    assert reason == "not-relative" and "called thousandths" in said
    with pytest.raises(ValueError, match="unit=percent; one of pixels, relative, thousandths"):
        opened(jsonl(tmp_path, {}) + "?unit=percent")


def test_a_box_below_a_pixel_is_bad_and_one_of_a_pixel_is_not(tmp_path):
    small = [[4, 2, 0.5, 8], [4, 2, 8, 0.5], [39.5, 2, 1, 8], [0.1, 0.2, 0.5, 0.5]]
    small += [[0.1, 0.1, 0.02, 0.4], [0.1, 0.1, 0.4, 0.02]]
    good = [[4, 2, 1, 1], [1 / 3, 1 / 3, 1, 1], [0.1, 0.1, 0.025, 0.05]]
    regions = [
        {"box": box, "text": "x"} | ({"unit": "relative"} if max(box) < 1 and n > 1 else {})
        for boxes in (small, good)
        for n, box in enumerate(boxes)
    ]
    regions[3].pop("unit")
    source = opened(jsonl(tmp_path, *({"regions": [each, GOOD]} for each in regions)))
    assert source.column("num_regions").tolist() == [1] * len(small) + [2] * len(good)
    found = [(reason, said) for _, _, reason, said in source.broken_values()]
    assert [reason for reason, _ in found] == ["below-a-pixel"] * len(small)
    assert [n for n, (_, said) in enumerate(found) if "are these fractions" in said] == [3]


def boxes_of(folder: Path, kind: str, boxes: list, size=SIZE) -> str:
    """A data set of this kind whose boxes have no unit, in rows of two."""
    rows = [[{"xyxy": b, "text": "red"} for b in boxes[n : n + 2]] for n in range(0, len(boxes), 2)]
    if kind == "jsonl":
        (folder / "a.png").write_bytes(encoded(size))
        return jsonl(folder, *({"regions": each} for each in rows))
    if kind == "coco":
        (folder / "images").mkdir(exist_ok=True)
        content = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "red"}]}
        for n, row in enumerate(rows):
            (folder / "images" / f"{n}.png").write_bytes(encoded(size))
            content["images"].append({"id": n, "file_name": f"{n}.png"})
            for x1, y1, x2, y2 in (each["xyxy"] for each in row):
                box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "category_id": 1, "image_id": n}
                content["annotations"].append({"caption": "a", **box})
        (folder / "coco.json").write_text(json.dumps(content))
        return f"coco:{folder}/images:{folder}/coco.json?instances={folder}/coco.json"
    if kind == "python":
        code = f"import json\nrows = [dict(image={encoded(size)!r}, text='a', regions=each) "
        (folder / "doubted.py").write_text(code + f"for each in json.loads({json.dumps(rows)!r})]")
        sys.modules.pop("doubted", None)
        return "python:doubted:rows"
    table = {"image": [encoded(size)] * len(rows), "text": ["a"] * len(rows), "regions": rows}
    pq.write_table(pa.table(table), folder / "0.parquet")
    if kind == "parquet":
        return f"parquet:{folder}/0.parquet"
    with tarfile.open(folder / "0.tar", "w") as tar:
        for n, row in enumerate(rows):
            add(tar, f"{n}.png", encoded(size))
            add(tar, f"{n}.json", json.dumps({"caption": "a", "regions": row}).encode())
    return f"webdataset:{folder}/0.tar"


KINDS = ("jsonl", "coco", "python", "parquet", "webdataset")


@pytest.mark.parametrize("kind", KINDS)
def test_fractions_and_thousandths_without_a_unit_are_refused_as_a_whole(
    kind, tmp_path, monkeypatch
):
    """Pixel-Reasoner#23, lmms-eval PR1373. Also where single boxes could be of pixels."""
    monkeypatch.syspath_prepend(str(tmp_path))
    fractions = [[0.0, 0.0, 1.0, 1.0], *([0.1, 0.1, 0.3, 0.5],) * 13]
    thousandths = [*([100, 100, 300, 500],) * 18, *([0, 0, 900, 970],) * 4]
    for boxes, size, unit, words in (
        (fractions, SIZE, "relative", "none of its 14 boxes has a unit or a number above 1"),
        (thousandths, (1280, 940), "thousandths", "above 1000, and 4 go over their image"),
    ):
        spec = boxes_of(tmp_path, kind, boxes, size)
        with pytest.raises(
            ValueError, match=f"(?s){words}.*unit.: .{unit}.*[?]unit={unit}.*pixels"
        ):
            opened(spec)
        more = f"{'&' if kind == 'coco' else '?'}unit={unit}"
        found = opened(spec + more)
        some = found.value("region", 5)[0]
        assert some == (FOUND._replace(phrases=("red",))), (kind, unit)
        assert not found.hints() and not [*found.broken_values()]
        pixels = opened(spec + more.replace(unit, "pixels"))
        assert pixels.bad_counts() == {} and not pixels.hints()
    if kind in ("parquet", "webdataset"):
        for boxes, unit in ((fractions, "relative"), (thousandths, "thousandths")):
            address = boxes_of(tmp_path, kind, boxes, (1280, 940)).partition(":")[2]
            with pytest.raises(ValueError, match=f"unit={unit}"):
                open_stream(f"stream:{address}", pairs=PAIRS)[0].value("region", 0)
            stream = open_stream(f"stream:{address}?unit={unit}", pairs=PAIRS)[0]
            assert stream.value("region", 5)[0].extent == FOUND.extent


def test_boxes_of_pixels_are_not_taken_for_anything_else(tmp_path):
    """One number above 1, few that go over an edge; on large images it is said, and read."""
    for boxes, size, hints in (
        ([*([0.2, 0.2, 0.9, 0.9],) * 9, [2, 2, 9, 9]], SIZE, 0),
        ([*([4, 2, 12, 10],) * 95, *([30, 2, 45, 10],) * 5], SIZE, 0),
        ([*([4, 2, 600, 480],) * 95, *([30, 2, 700, 490],) * 5], (640, 480), 0),
        ([*([4, 2, 600, 1001],) * 10, [4, 2, 600, 900]], (640, 480), 0),
        ([*([100, 100, 980, 990],) * 10], (1600, 1300), 1),
    ):
        source = opened(boxes_of(tmp_path, "jsonl", boxes, size))
        assert len(source.hints()) == hints, boxes
        assert all("1000, though all images" in hint for hint in source.hints())


@pytest.mark.parametrize("check", ("decode", "header"))
def test_boxes_drawn_on_the_upright_image(check, tmp_path):
    """As Label Studio draws them (label-studio#6608), whatever EXIF says."""
    rows = []
    for turn in range(1, 9):
        (tmp_path / f"{turn}.jpg").write_bytes(turned_image("JPEG", turn))
        shown = ImageOps.exif_transpose(Image.open(tmp_path / f"{turn}.jpg"))
        width, height = shown.size
        far = {"xyxy": [width - 8, height - 6, width, height], "text": "red"}
        rows.append({"image_path": f"{turn}.jpg", "regions": [far]})
    spec = jsonl(tmp_path, *rows)
    source = opened(f"{spec}?boxes=upright", check=check)
    for i in range(len(rows)):
        width, height = (source.column(name)[i] for name in ("width", "height"))
        box = (1 - 8 / width, 1 - 6 / height, 1, 1)
        assert source.value("region", i)[0].extent == pytest.approx(box, abs=1e-6)
    assert not source.hints() and not [*source.broken_values()]
    stored = opened(spec, check=check)
    (hint,) = stored.hints()
    assert (
        "of 4 boxes on images that EXIF turns by 90 degrees, 4 fit their image only as it is"
        in hint
    )
    assert hint.endswith("give ?boxes=upright in the data spec")
    for row in rows:  # at the far edge of the file's own rows
        row["regions"] = [{"xyxy": [32, 14, 40, 20], "text": "red"}]
    spec = jsonl(tmp_path, *rows)
    assert not opened(f"{spec}?boxes=stored").hints() and not opened(spec).hints()
    (hint,) = opened(f"{spec}?boxes=upright").hints()
    assert "4 fit their image only as its file has it" in hint and "?boxes=stored" in hint
    with pytest.raises(ValueError, match="boxes=turned; one of upright, stored"):
        opened(f"{spec}?boxes=turned")


def test_every_reason_of_regions_is_tried():
    last = CODES["too-many-regions"]
    own = {reason for reason, code in CODES.items() if CODES["too-slow"] < code <= last}
    assert own == {reason for _, reason, _ in FAULTS} & own | {"too-many-regions"}


def test_what_is_beyond_a_limit_is_said_and_the_rest_used(tmp_path):
    phrases = GOOD | {"text": ["red"] * (ANNOTATION_LIMIT + 1), "negatives": ["blue"] * 5000}
    rows = [{"regions": [GOOD] * 10_000}, {"regions": [phrases]}, {"regions": {"box": 5}}]
    source = opened(jsonl(tmp_path, *rows))
    assert source.value("region", 0) == [FOUND] * ANNOTATION_LIMIT
    assert source.value("region", 1)[0].phrases == ("red",) * ANNOTATION_LIMIT
    assert source.column("num_negatives")[1] == ANNOTATION_LIMIT
    first, second, third = source.broken_values()
    assert first[2] == second[2] == "too-many-regions" and third[2] == "invalid-row"
    assert "9000 of 10000 regions: 10,000 regions are given; the first 1,000" in first[3]
    assert "2 phrases of its regions: 1,001" in second[3] and "a list" in third[3]


def test_bad_phrases_beside_good_ones_are_dropped_and_empty_ones_counted(tmp_path):
    regions = [
        GOOD | {"text": ["", "red", None], "negatives": ""},
        GOOD | {"text": ["red", HUGE], "negatives": [5, "blue"]},
    ]
    source = opened(jsonl(tmp_path, {"regions": regions}))
    assert source.value("region", 0) == [FOUND, FOUND._replace(negatives=("blue",))]
    ((_, _, reason, detail),) = source.broken_values()
    assert reason == "huge-caption" and "2 phrases of its regions" in detail
    assert source.unused() == {"phrases without text": (3, source.where(0))}


def test_a_sample_of_a_bad_image_lacks_its_regions_too(tmp_path):
    (tmp_path / "cut.png").write_bytes(encoded()[:60])
    source = opened(jsonl(tmp_path, {"image_path": "cut.png", "regions": [GOOD]}, {}))
    assert source.usable().tolist() == [1] and source.column("num_regions")[0] == 0
    assert count_bad(source)["truncated-image"] == 1
    pairs = (("region", "text"), ("image", "text"))
    source = open_source(f"jsonl:{tmp_path / 'set.jsonl'}", pairs=pairs)
    assert source.lacking("region").tolist() == [True, True]
    source = open_source(
        jsonl(tmp_path, {"regions": [GOOD]}, {"regions": []}), pairs=pairs[:1] + PAIRS
    )
    assert source.value("region", 0) == [FOUND] and source.usable().tolist() == [0, 1]


def turned_image(kind: str, orientation: int, late: bool = False) -> bytes:
    """A red rectangle at (4, 2) to (12, 10), in a file that says how it is to be turned."""
    image = Image.new("RGB", SIZE, (0, 0, 255))
    image.paste(RED, (4, 2, 12, 10))
    exif = Image.Exif()
    exif[0x112] = orientation
    out = io.BytesIO()
    exact = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    image.save(out, kind, **exact, **({} if late else {"exif": exif}))
    if late:  # behind the pixels, as exiftool writes it
        content, end = out.getvalue()[:-12], out.getvalue()[-12:]
        return content + png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + end
    return out.getvalue()


@pytest.mark.parametrize("check", ("decode", "header"))
def test_a_box_is_found_where_the_image_shows_it(check, tmp_path):
    kinds = [("JPEG", False), ("PNG", False), ("PNG", True), ("WEBP", False), ("TIFF", False)]
    tried = [(kind, late, turn) for kind, late in kinds for turn in range(1, 9)]
    given = [
        {"box": [4, 2, 8, 8], "text": "red"},
        {"box": [0.1, 0.1, 0.2, 0.4], "unit": "relative", "text": "red"},
    ]
    rows = []
    for kind, late, turn in tried:
        name = f"{kind}{late}{turn}"
        (tmp_path / name).write_bytes(turned_image(kind, turn, late))
        rows.append({"image_path": name, "regions": given})
    source = opened(jsonl(tmp_path, *rows), check=check)
    for i, case in enumerate(tried):
        image = Image.open(io.BytesIO(source.value("image", i)))
        image.load()
        shown = np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)
        height, width, _ = shown.shape
        assert source.column("width")[i] == width, case
        red = (shown[..., 0] > 128) & (shown[..., 2] < 128)
        rows_of, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
        box = (columns[0], rows_of[0], columns[-1] + 1, rows_of[-1] + 1)
        for region in source.value("region", i):
            sides = np.array(region.extent) * (width, height, width, height)
            assert sides == pytest.approx(box, abs=1e-4), case
    assert source.usable().size == len(tried)


def test_an_index_without_regions_says_nothing_of_them(tmp_path):
    """Not even where rows have some, and it is the one of before, byte for byte."""
    spec = jsonl(tmp_path, {"regions": [GOOD, {}]}, {})
    source = open_source(spec)
    assert "regions" not in source.index._batches.schema.names and not [*source.broken_values()]
    assert "num_regions" not in source.index.meta["columns"]
    assert source.column("num_regions").tolist() == [0, 0]
    with pytest.raises(Absent):
        source.value("region", 0)
    folder = source.index.folder
    opened(spec)
    assert open_source(spec).index.folder == folder


def test_regions_that_change_are_read_again(tmp_path):
    spec = jsonl(tmp_path, {"regions": [GOOD]})
    assert opened(spec).value("region", 0) == [FOUND]
    assert opened(jsonl(tmp_path, {"regions": [GOOD | {"text": "not"}]})).value("region", 0) == [
        FOUND._replace(phrases=("not",))
    ]


# -- formats


def test_parquet(tmp_path):
    rows = [
        [{"box": [4.0, 2.0, 8.0, 8.0], "text": ["red"], "negatives": None, "unit": None}],
        [{"box": [4.0, 2.0, 8.0, 8.0], "text": ["red"], "negatives": None, "unit": None}]
        + [{"box": [4.0, 2.0, 0.0, 8.0], "text": ["x"], "negatives": ["a"], "unit": None}] * 1999,
        None,
        [],
        [{"box": [0.1, 0.1, 0.2, 0.4], "text": ["red"], "negatives": ["b"], "unit": "relative"}],
        [
            {
                "box": [4.0, 2.0, 8.0, 8.0],
                "text": ["x" * 5000] * 500,
                "negatives": None,
                "unit": None,
            }
        ],
    ]
    table = pa.table({"image": [encoded()] * len(rows), "text": ["a"] * len(rows), "regions": rows})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=4)
    for source in (
        opened(f"parquet:{tmp_path}/0.parquet"),
        opened(f"parquet:{tmp_path}/0.parquet?region=regions", check="header"),
        open_stream(f"stream:{tmp_path}/0.parquet", pairs=PAIRS)[0],
    ):
        assert source.value("region", 0) == [FOUND]
        assert source.value("region", 4) == [FOUND._replace(negatives=("b",))]
        numbers = source.numbers("num_regions", np.arange(len(rows)))
        assert numbers.tolist() == [1, 1, 0, 0, 1, 0]
    broken = opened(f"parquet:{tmp_path}/0.parquet").broken_values()
    (_, _, first, said), (_, _, second, _) = broken
    assert (first, second) == ("empty-box", "huge-caption") and "1999 of 2000 regions" in said
    for kind in (pa.int64(), pa.decimal128(9, 2), pa.decimal128(38, 0)):  # of DuckDB and Spark
        boxed = pa.struct([("xyxy", pa.large_list(kind)), ("text", pa.string_view())])
        edges = [*map(Decimal, (4, 2, 12, 10))] if pa.types.is_decimal(kind) else [4, 2, 12, 10]
        boxes = pa.array([[{"xyxy": edges, "text": "red"}]], pa.list_(boxed))
        table = pa.table({"image": [encoded()], "text": ["a"], "boxes": boxes})
        pq.write_table(table, tmp_path / "1.parquet")
        source = opened(f"parquet:{tmp_path}/1.parquet?region=boxes")
        assert source.value("region", 0) == [FOUND]


def test_phrases_of_parquet_that_stand_for_gigabytes_are_not_held_in_memory(tmp_path):
    rows = [[{"box": [4, 2, 8, 8], "text": ["x" * 1_000_000]}] * 150, [GOOD | {"text": ["red"]}]]
    table = pa.table({"image": [encoded()] * 2, "text": ["a"] * 2, "regions": rows})
    pq.write_table(table, tmp_path / "0.parquet")
    del table
    assert (tmp_path / "0.parquet").stat().st_size < 100_000
    before = pa.default_memory_pool().bytes_allocated()
    reader = open_format(f"parquet:{tmp_path}/0.parquet", PAIRS)
    (first, second) = reader.samples(next(reader.parts()))
    assert first.lacks["region"].reason == "huge-caption" and second.annotations["region"].good
    column = next(reader._batches(reader.files[0], 0, {"region": "regions"})).column(0)
    assert pa.default_memory_pool().bytes_allocated() - before < 100_000_000 and len(column) == 1


def test_webdataset(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for key, said in (
            ("a", {"caption": "a", "regions": [GOOD]}),
            ("b", {"caption": "b"}),
            ("c", {"caption": "c", "regions": [GOOD, GOOD | {"box": [1]}]}),
        ):
            add(tar, f"{key}.png", encoded())
            add(tar, f"{key}.json", json.dumps(said).encode())
        add(tar, "d.png", encoded())
        add(tar, "d.txt", b"without regions")
        add(tar, "e.png", encoded())
        add(tar, "e.txt", b"with")
        add(tar, "e.json", json.dumps({"regions": [GOOD]}).encode())
    source = opened(f"webdataset:{tmp_path}/0.tar")
    assert source.column("num_regions").tolist() == [1, 0, 1, 0, 1]
    assert (
        source.value("region", 0)
        == source.value("region", 2)
        == source.value("region", 4)
        == [FOUND]
    )
    assert [reason for _, _, reason, _ in source.broken_values()] == ["invalid-box"]
    stream, _ = open_stream(f"stream:{tmp_path}/0.tar", pairs=PAIRS)
    assert stream.value("region", 2) == [FOUND] and not source.unused()
    with pytest.raises(Absent):
        stream.value("region", 3)


def test_python(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_regions.py").write_text(
        "import numpy as np\n"
        "image = np.zeros((20, 40, 3), np.uint8)\n"
        "box = np.array([4, 2, 8, 8], np.float32)\n"
        "regions = [{'box': box, 'text': ('red',)}]\n"
        "items = [{'image': image, 'text': 'a', 'regions': r} for r in (regions, None, tuple(regions))]\n"
    )
    source = opened("python:own_regions:items")
    assert source.value("region", 0) == source.value("region", 2) == [FOUND]
    assert source.lacking("region").tolist() == [False, True, False]


def fg_clip_rows() -> list[dict]:
    region = {
        "bbox": [0.1, 0.1, 0.3, 0.5, 0.87],
        "short_expr": "red",
        "long_expr": "a red one",
        "short_expr_negs": {"0": "blue", "1": "green"},
        "flag_short_neg": 1,
    }
    row = {"f_path": "a.png", "caption": "a long one", "short_caption": "short"}
    return [
        row | {"bbox_info": [region, region | {"flag_short_neg": 0}]},
        row | {"bbox_info": [region | {"bbox": [4, 2, 12, 10], "short_expr_negs": ["b"]}]},
        row | {"is_cn": True},
    ]


@pytest.mark.parametrize("kind", ("list", "lines"))
def test_rows_of_fg_clip(kind, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    rows = fg_clip_rows()
    lines = "\n".join(map(json.dumps, rows))
    text = json.dumps(rows, indent=1) if kind == "list" else lines
    (tmp_path / "rows.json").write_text(text)
    source = opened(f"jsonl:{tmp_path}/rows.json")
    region = Annotation(FOUND.extent, ("red", "a red one"), ("blue", "green"))
    assert source.value("region", 0) == [region, region._replace(negatives=())]
    assert source.captions(0) == source.captions(2) == ["a long one", "short"]
    assert [reason for _, _, reason, _ in source.broken_values()] == ["not-relative"]
    assert source.lacking("region").tolist() == [False, True, True]
    other = open_source(f"jsonl:{tmp_path}/rows.json?text=short_caption")
    assert other.captions(0) == ["short"] and other.usable().size == 3
    assert source.where(1).endswith("rows.json#[1]" if kind == "list" else "rows.json:2")


def test_a_json_list_that_breaks_off_keeps_what_is_before(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    row = {"image_path": "a.png", "text": "a"}
    whole = json.dumps([row, 5, row])
    for text, bad in ((whole, 1), (whole[:-20], 2), (whole + "oops", 2), ("\ufeff " + whole, 1)):
        (tmp_path / "rows.json").write_text(text)
        source = open_source(f"jsonl:{tmp_path}/rows.json")
        assert [*source.bad_counts().items()] == [("invalid-row", bad)], text
        assert source.usable().tolist() == ([0] if text == whole[:-20] else [0, 2]), text
    # several lists, as `cat` joins them
    (tmp_path / "rows.json").write_text(f"{whole}\n{whole} []{whole}\n")
    assert open_source(f"jsonl:{tmp_path}/rows.json").usable().tolist() == [0, 2, 3, 5, 6, 8]


@pytest.fixture
def coco_files(tmp_path) -> Path:
    """As COCO's: image 3 has no caption, image 4 no box."""
    (tmp_path / "images").mkdir()
    for number in range(1, 5):
        (tmp_path / "images" / f"{number}.png").write_bytes(encoded())
    images = [{"id": n, "file_name": f"{n}.png", "width": 40, "height": 20} for n in range(1, 5)]
    captions = [{"id": n, "image_id": n, "caption": f"caption {n}"} for n in (1, 2, 4)]
    boxes = [
        {"id": 7, "image_id": 1, "category_id": 18, "bbox": [4, 2, 8, 8], "iscrowd": 0},
        {"id": 8, "image_id": 1, "category_id": 18, "bbox": [0, 0, 40, 20], "iscrowd": 1},
        {"id": 9, "image_id": 2, "category_id": 5, "bbox": [4, 2, 8, 8], "iscrowd": 0},
        {"id": 10, "image_id": 2, "category_id": 18, "bbox": [4, 2, 8, 8], "iscrowd": 0},
        {"id": 11, "image_id": 3, "category_id": 18, "bbox": [4, 2, 8, 8], "iscrowd": 0},
    ]
    for box in boxes:
        box |= {"segmentation": [[4, 2, 12, 2, 12, 10]], "area": 64}
    categories = [{"id": 18, "name": "dog", "supercategory": "animal"}]
    some = {"images": [images[0], images[1], images[3]], "annotations": captions}
    (tmp_path / "captions.json").write_text(json.dumps(some))
    instances = {"images": images, "annotations": boxes, "categories": categories}
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    return tmp_path


def test_coco(coco_files):
    spec = f"coco:{coco_files}/images:{coco_files}/captions.json"
    source = opened(f"{spec}?instances={coco_files}/instances.json")
    dog = Annotation(FOUND.extent, ("dog",))
    assert [source.identity(i) for i in range(4)] == ["1", "2", "4", "3"]
    assert all(source.value("region", i) == [dog] for i in (0, 1, 3))
    assert source.lacking("region").tolist() == [False, False, True, False]
    assert source.lacking("text").tolist() == [False, False, False, True]
    assert [reason for _, _, reason, _ in source.broken_values()] == ["no-phrase"]
    where = f"{coco_files}/instances.json#annotation 8"
    assert source.unused() == {"boxes of crowds": (1, where)}
    assert source.where(0).endswith("captions.json#images[0] 1.png")
    assert len(open_source(spec)) == 3 == len(opened(spec))  # as before
    with pytest.raises(FileNotFoundError, match="boxes"):
        opened(f"{spec}?instances={coco_files}/none.json")


def test_visual_genome(tmp_path):
    for number, folder in ((1, "VG_100K"), (2, "VG_100K_2"), (3, "")):
        (tmp_path / "images" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / folder / f"{number}.jpg").write_bytes(encoded(kind="JPEG"))
    entries = [
        {
            "id": number,
            "regions": [
                {"region_id": 5, "image_id": number, "phrase": phrase}
                | {"x": 4, "y": 2, "width": 8, "height": 8}
                for phrase in phrases
            ],
        }
        for number, phrases in ((1, ["red"]), (2, ["red", ""]), (3, ["red"]), (4, ["red"]))
    ]
    (tmp_path / "regions.json").write_text(json.dumps([*entries, {"regions": 5}]))
    source = opened(f"vg:{tmp_path}/images:{tmp_path}/regions.json")
    assert all(source.value("region", i) == [FOUND] for i in range(3))
    assert source.bad_counts() == {"missing-file": 1, "invalid-row": 1}
    assert [reason for _, _, reason, _ in source.broken_values()] == ["no-phrase"]
    assert source.identity(1) == "2" and source.where(1).endswith("regions.json#[1] 2.jpg")
    (tmp_path / "other.json").write_text('{"regions": [{}]}')
    with pytest.raises(ValueError, match="a JSON list"):
        opened(f"vg:{tmp_path}/images:{tmp_path}/other.json")
    with pytest.raises(ValueError, match="holds image and region"):
        open_source(f"vg:{tmp_path}/images:{tmp_path}/regions.json")


def refs() -> list[dict]:
    """As refer's: two objects of image 1, one of an image of another split."""

    def ref(number, image, annotation, split, *texts):
        sentences = [
            {"tokens": text.split(), "raw": text.upper(), "sent_id": n, "sent": text}
            for n, text in enumerate(texts)
        ]
        name = f"COCO_train2014_{image:012}_{annotation}.jpg"
        found = {"ref_id": number, "image_id": image, "ann_id": annotation, "split": split}
        found |= {"sent_ids": [*range(len(texts))], "category_id": 18, "file_name": name}
        return found | {"sentences": sentences}

    return [
        ref(0, 1, 7, "val", "the left dog", "dog"),
        ref(1, 2, 9, "testA", "dog"),
        ref(2, 1, 8, "val", "all dogs"),
        ref(3, 2, 5, "testB", "no box"),
        ref(4, 99, 7, "testB", "no image"),
        {"split": "testB"},
        {"split": "testB", "image_id": [1]},
    ]


@pytest.mark.parametrize("kind", ("json", "pickle 0", "pickle 2", "pickle 4"))
def test_refcoco(kind, coco_files):
    is_json = kind == "json"
    content = json.dumps(refs()).encode() if is_json else pickle.dumps(refs(), int(kind[-1]))
    file = coco_files / ("refs.json" if is_json else "refs(unc).p")
    file.write_bytes(content)
    source = opened(f"refcoco:{coco_files}/images:{file}?split=val+testA")
    assert [source.identity(i) for i in range(2)] == ["1", "2"]
    assert source.value("region", 0) == [
        Annotation(FOUND.extent, ("the left dog", "dog")),
        Annotation((0.0, 0.0, 1.0, 1.0), ("all dogs",)),
    ]
    instances = f"instances={coco_files}/instances.json"
    spec = f"refcoco:{coco_files}/images:{file}?split=testA+testB&{instances}"
    source = opened(spec)
    assert source.bad_counts() == {"invalid-row": 3} and source.value("region", 0)
    assert source.where(0).endswith("#refs[1] 2.png")
    assert [reason for _, _, reason, _ in source.broken_values()] == ["invalid-box"]
    counted = r"no split is given.*val \(2\), testA \(1\), testB \(4\)"
    with pytest.raises(ValueError, match=counted):
        opened(f"refcoco:{coco_files}/images:{file}")


def test_refcoco_with_all_annotated_boxes_as_candidates(coco_files):
    """Behind the referred objects, for evaluations: training sees only those with phrases."""
    (coco_files / "refs.json").write_text(json.dumps(refs()))
    spec = f"refcoco:{coco_files}/images:{coco_files}/refs.json?split=val+testA&candidates="
    source, referred = opened(f"{spec}annotated"), opened(f"{spec}referred")
    assert source.value("region", 0) == referred.value("region", 0)
    assert source.value("region", 1) == [
        Annotation(FOUND.extent, ("dog",)),
        Annotation(FOUND.extent, ()),
    ]
    assert referred.value("region", 1) == [Annotation(FOUND.extent, ("dog",))]
    assert source.column("num_regions").tolist() == [2, 1]
    for candidates, numbers in ((False, [2, 1]), (True, [2, 2])):
        shown = ShownAnnotations(source, REGIONS, 16, 0, candidates)
        assert shown.places(np.arange(2), training=False).number.tolist() == numbers
    assert shown_annotations(source, REGIONS, 1, 1, 0, 0, training=True) == [
        Annotation(FOUND.extent, ("dog",))
    ]
    with pytest.raises(ValueError, match="candidates=all; referred or annotated is needed"):
        opened(f"{spec}all")


def test_candidates_stand_behind_regions_with_phrases(tmp_path):
    candidate = {"box": GOOD["box"], "candidate": True}
    mixed, alone = [candidate, GOOD, {"box": GOOD["box"]}], [candidate]
    source = opened(jsonl(tmp_path, {"regions": mixed}, {"regions": alone}))
    assert source.value("region", 0) == [FOUND, Annotation(FOUND.extent, ())]
    assert source.lacking("region").tolist() == [False, True]
    reasons = [reason for _, _, reason, _ in source.broken_values()]
    assert (
        reasons == ["no-phrase", "no-phrase"]
        and "1 of 3 regions" in [*source.broken_values()][0][3]
    )


class Harmful:
    def __reduce__(self):
        return print, ("called",)


def doubled(times: int) -> bytes:
    """A list of two that are one, of two that are one, and so on."""
    found: list = [1]
    for _ in range(times):
        found = [found, found]
    return pickle.dumps([{"split": "val", "image_id": found, "sentences": found}])


def test_a_pickle_calls_nothing(coco_files, capsys):
    file = coco_files / "refs.p"
    for content in (
        pickle.dumps([Harmful()]),
        pickle.dumps([np.zeros(3)]),
        pickle.dumps({"val": 1}),
        pickle.dumps(refs())[:-40],
        2 * pickle.dumps(refs()),
        b"",
        b"]r\xff\xff\xff\xff.",  # a place for four billion objects
        b"\x80\x05\x96" + struct.pack("<Q", 6 << 30) + b".",  # as many bytes
        b"]" + b"q\x00" + b"(" + b"h\x00" * 2 + b"e.",  # a list that holds itself
        doubled(40),
        pickle.dumps([{"split": "val", "image_id": 10**100_000, "sentences": []}]),
    ):
        file.write_bytes(content)
        if content.startswith(b"]r"):
            error = "no split 'val'"  # an empty list, and no memory
        else:
            error = "lists, dicts, texts and numbers|dict is given"
        with pytest.raises(ValueError, match=f"(?s){file}.*({error})"):
            opened(f"refcoco:{coco_files}/images:{file}?split=val")
    assert "called" not in capsys.readouterr().out


ANNOTATION = """<annotation>
 <filename>36979.jpg</filename>
 <size><width>40</width><height>20</height><depth>3</depth></size>
 <object><name>1</name><name>4</name>
  <bndbox><xmin>5</xmin><ymin>3</ymin><xmax>12</xmax><ymax>10</ymax></bndbox></object>
 <object><name>2</name><scene>1</scene><nobndbox>0</nobndbox></object>
 <object><name>3</name>
  <bndbox><xmin>1</xmin><ymin>1</ymin><xmax>40</xmax><ymax>20</ymax></bndbox></object>
 <object><name>9</name>
  <bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>2</ymax></bndbox></object>
 <object><name>1</name>
  <bndbox><xmin>x</xmin><ymin>1</ymin><xmax>4</xmax><ymax>2</ymax></bndbox></object>
</annotation>"""
SENTENCES = """[/EN#1/people Two men] stand in [/EN#2/scene the yard] .
[/EN#1/people Two men] again .
[/EN#1/people/animals Men] with [/EN#3/other a red car] and [/EN#0/notvisual it] .
"""


def test_flickr30k_entities(tmp_path):
    own = tmp_path / "entities"
    for folder in (own / "Sentences", own / "Annotations", tmp_path / "images"):
        folder.mkdir(parents=True)
    for name in ("36979", "5", "6"):
        (tmp_path / "images" / f"{name}.jpg").write_bytes(encoded(kind="JPEG"))
        (own / "Sentences" / f"{name}.txt").write_text(SENTENCES)
    (own / "Annotations" / "36979.xml").write_text(ANNOTATION)
    (own / "Annotations" / "5.xml").write_text(ANNOTATION[:-10])
    (own / "test.txt").write_text("36979\n5\n")
    (own / "val.txt").write_text("6\n../test\n")
    spec = f"flickr30k-entities:{tmp_path}/images:{own}?split=test"
    source = opened(f"{spec}+val")
    captions = ["Two men stand in the yard .", "Two men again .", "Men with a red car and it ."]
    assert source.captions(0) == source.captions(1) == captions and source.identity(1) == "5"
    assert source.value("region", 0) == [
        Annotation(FOUND.extent, ("Two men", "Men")),
        Annotation((0.0, 0.0, 1.0, 1.0), ("a red car",)),
    ]
    found = {identity: (reason, detail) for identity, _, reason, detail in source.broken_values()}
    assert found["36979"][0] == "no-phrase" and "2 of 4 regions" in found["36979"][1]
    assert found["5"][0] == "invalid-row" and found["6"][0] == "missing-file"
    assert source.bad_counts() == {"outside-root": 1} and source.where(1).endswith("#5.jpg")
    (own / "Annotations" / "36979.xml").write_text(ANNOTATION.replace("40", "20"))
    assert opened(f"{spec}+val").value("region", 0)[1].extent == (0.0, 0.0, 0.5, 1.0)
    assert open_source(spec).usable().size == 2
    with pytest.raises(ValueError, match="there are test, val"):
        open_source(spec.partition("?")[0])
