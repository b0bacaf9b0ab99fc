"""Records of a modality of one's own that lack a part or have a wrong one: each is named where its module
is imported, or where its tower is made, before data is opened. The records are those of
`examples/depth/`, each with one line changed. And data that has nothing of a modality, and code of one's own
that fails on a value: all before the first step."""

import json
import sys
from pathlib import Path

import pytest
from depth_data import written
from launched import ROOT, words

from data.modules import import_modules
from data.stored.kinds import STORED
from launch.config.options import parse_options
from launch.modalities import MODALITIES, Vocabulary, refuse_pairs, tower_of
from launch.setup.dry_run import dry_run

pytestmark = pytest.mark.usefixtures("registries")
PAIRS = "image:text,depth:text"
ENDINGS = 'endings=("depth.png",)'
MEASURED = 'measured={"depth_nearest": "f4"}'
MEASURE = "measure=measured,\n"
ENTRY = "ModalityEntry(lambda inputs: Depth(views_of(inputs)), depth_tower, DepthView)"
VIEW = 'endings, others, side = DEPTH.endings, frozenset({"not-an-image", "unreadable"}), 96'
TOWER = 'Tower("depth", f"depth{width}", width, specs=specs, config={}, example=example)'


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """`changed(file, old, new)`: imports the example with other text in one of its files; `also`: in
    another one."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(file="", old="", new="", also=("", "", "")):
        names = [f"{each}_of_{tmp_path.name}" for each in ("stored", "tower", "shown")]
        for name in names:
            part = name.partition("_")[0]
            text = (ROOT / "examples" / "depth" / f"{part}.py").read_text()
            for where, given, wanted in ((file, old, new), also):
                assert part != where or text.count(given) == 1
                text = text.replace(given, wanted) if part == where else text
            for other in names:
                text = text.replace(f"examples.depth.{other.partition('_')[0]}", other)
            (tmp_path / f"{name}.py").write_text(text)
        import_modules(names[-1:])

    return make


STORED_CASES = {
    "an ending for several": (ENDINGS, 'endings="depth.png"', "write ('depth.png',)"),
    "an ending with its dot": (ENDINGS, 'endings=(".depth.png",)', "write 'depth.png'"),
    "an ending in capitals": (ENDINGS, 'endings=("depth.PNG",)', "write 'depth.png'"),
    "an ending of images": (
        ENDINGS,
        'endings=("png",)',
        "the ending 'png' is that of image; take another, such as 'depth.png'",
    ),
    "no measure": (MEASURE, "", "there is no measure, which makes depth_nearest"),
    "a measure that is none": (MEASURE, "measure=3,", "measure is 3; a function is needed"),
    "a column of objects": (MEASURED, 'measured={"depth_nearest": "O"}', "a numpy type of numbers"),
    "a column of no type": (
        MEASURED,
        'measured={"depth_nearest": "near"}',
        "'depth_nearest': 'near'",
    ),
    "a column of images": (MEASURED, 'measured={"width": "i4"}', "must begin with 'depth_'"),
    "a column of its files": (MEASURED, 'measured={"depth_hash": "u8"}', "be none of depth_hash"),
    "a reason that is none": (
        MEASURE,
        MEASURE + 'not_of_its_kind="no-image",',
        "no reason of data.bad_samples; did you mean 'not-an-image'?",
    ),
    "a key for several": (
        MEASURE,
        MEASURE + 'names={"json": "depth"},',
        "names['json'] is 'depth'; a tuple of texts is needed; write ('depth',)",
    ),
    "a form that is none": (
        MEASURE,
        MEASURE + 'names={"jsonl": ("depth",)},',
        "names has a form 'jsonl'; did you mean 'json'?",
    ),
    "a key of images": (
        MEASURE,
        MEASURE + 'names={"json": ("image_path",)},',
        "of json rows the key 'image_path' is that of image",
    ),
    "parts of nothing": (MEASURE, MEASURE + 'parts="imag",', "did you mean 'image'?"),
    "parts of itself": (MEASURE, MEASURE + 'parts="depth",', "parts is 'depth', no other modality"),
    "decoders that are none": (
        MEASURE,
        MEASURE + 'missing_decoders=["a"],',
        "missing_decoders is ['a']; a function is needed",
    ),
    "another name": ('"depth",', '"tiefe",', "it is registered as STORED['depth']"),
    "a name of two words": ('"depth",', '"my depth",', "letters, digits and _ are needed"),
    "no record": (
        'STORED["depth"] = DEPTH',
        'STORED["depth"] = {"endings": ("depth.png",)}',
        "a Stored or StoredFile of data/stored/record.py is needed",
    ),
}


@pytest.mark.parametrize("case", STORED_CASES)
def test_a_record_of_data_sets_is_refused_when_it_is_imported(case, changed):
    old, new, expected = STORED_CASES[case]
    with pytest.raises(ValueError) as refused:
        changed("stored", old, new)
    message = str(refused.value)
    assert message.startswith("--import-module shown_of_") and expected in message, message


def test_the_line_of_a_record_is_named(changed):
    with pytest.raises(ValueError, match=r"\(line \d+ of .*/stored_of_.*\.py\)"):
        changed("stored", ENDINGS, 'endings="depth.png"')


ENTRY_CASES = {
    "no loader": (
        ENTRY,
        ENTRY.replace("lambda inputs: Depth(views_of(inputs))", "None"),
        "load is",
    ),
    "no tower": (ENTRY, ENTRY.replace("depth_tower", "None"), "tower is None; a function"),
    "a view that is made": (
        ENTRY,
        ENTRY.replace("DepthView", 'DepthView(b"")'),
        "view is DepthView",
    ),
    "a view of no view": ("class DepthView(View)", "class DepthView", "a subclass of launch.views"),
    "a view without a picture": ("def picture(", "def image(", "DepthView has no picture"),
    "a view without endings": (
        VIEW,
        VIEW.replace("endings", "ends", 1),
        "DepthView has no endings",
    ),
    "a view without a side": (VIEW, VIEW.replace(", side", ", size", 1), "DepthView has no side"),
    "a view with another reason": (VIEW, VIEW.replace("unreadable", "unread"), "'unreadable'?"),
    "weights that are none": (ENTRY, ENTRY[:-1] + ", weights=3)", "weights is 3; a function"),
    "a cost that is none": (ENTRY, ENTRY[:-1] + ", cost=3)", "cost is 3; a function"),
    "flags that are none": (
        ENTRY,
        ENTRY[:-1] + ', flags="--depth")',
        "one of launch.config.groups",
    ),
    "tensors of bytes": (ENTRY, ENTRY[:-1] + ', from_bytes=["a"])', "a mapping of tensors' names"),
}


@pytest.mark.parametrize("case", ENTRY_CASES)
def test_an_entry_is_refused_when_it_is_imported(case, changed):
    old, new, expected = ENTRY_CASES[case]
    with pytest.raises(ValueError) as refused:
        changed("shown", old, new)
    message = str(refused.value)
    assert "ModalityEntry: " in message and expected in message, message
    assert "shown_of_" in message.partition("(line ")[2], message


def test_one_part_without_the_other_is_refused_with_the_pairs(changed):
    changed("shown", f'MODALITIES["depth"] = {ENTRY}', "")
    with pytest.raises(ValueError, match="data sets hold 'depth', since STORED .* has none"):
        refuse_pairs(PAIRS, (), False)
    STORED.pop("depth")
    with pytest.raises(ValueError, match="there is no modality 'depth'; there are image, text"):
        refuse_pairs(PAIRS, (), False)
    MODALITIES["depth"] = (1, 2)
    with pytest.raises(ValueError, match=r"MODALITIES\['depth'\] is \(1, 2\); a ModalityEntry"):
        refuse_pairs(PAIRS, (), False)


TOWER_CASES = {
    "nothing": (f"return {TOWER}", "return None", "its function returned None; a Tower of"),
    "a module": (f"return {TOWER}", "return nn.Identity()", "its function returned Identity()"),
    "of another branch": (
        TOWER,
        TOWER.replace('"depth"', '"deep"'),
        "branch 'deep'; write 'depth'",
    ),
    "without an example": (TOWER, TOWER.replace(", example=example", ""), "it has no example"),
    "of another width": (
        TOWER,
        TOWER.replace("width, specs", "2 * width, specs"),
        "depth_features [2, 128], as its width says; they are of shape [2, 64]",
    ),
    "with other features": (
        'makes = ("depth_features",)',
        'makes = ("features",)',
        "they are not among features",
    ),
    "whose example is another": (
        'return {"depth_values": torch',
        'return {"depths": torch',
        "do not run on its own example: ValueError: Patches reads depth_values",
    ),
    "that takes no argument": ("(wanted: Wanted)", "()", "takes 0 positional arguments"),
    "that fails": (
        "wanted.name or 64",
        'wanted.name or "wide"',
        "its function failed with ValueError",
    ),
}


@pytest.mark.parametrize("case", TOWER_CASES)
def test_a_tower_is_refused_when_it_is_made(case, changed):
    old, new, expected = TOWER_CASES[case]
    changed("tower", old, new)
    options = {"image_size": 32, "embed_dim": 16, "pairs": PAIRS}
    with pytest.raises(ValueError) as refused:
        tower_of("depth", options, Vocabulary(), {})
    message = str(refused.value)
    assert message.startswith("the tower of 'depth': ") and expected in message, message


def test_a_tower_is_refused_before_data_is_opened(changed, tmp_path):
    changed("tower", f"return {TOWER}", "return None")
    (tmp_path / "a.jsonl").write_text("no JSON")
    module, file = f"shown_of_{tmp_path.name}", tmp_path / "a.jsonl"
    flags = f"--dry-run --import-module {module} --pairs {PAIRS} --data jsonl:{file} --embed-dim 16"
    with pytest.raises(ValueError, match="the tower of 'depth': its function returned None"):
        dry_run(parse_options(words(flags)))


def test_the_example_itself_is_taken(changed):
    changed()
    refuse_pairs(PAIRS, (), False)
    options = {"image_size": 32, "embed_dim": 16, "pairs": PAIRS}
    assert tower_of("depth", options, Vocabulary(), {}).width == 64


# -- data, and what loads it


FORMATS = ("jsonl", "csv", "parquet", "webdataset", "stream", "python")
NO_RECORD = ('STORED["depth"] = DEPTH', "")
FLAGS = (
    "--image-tower resnet18:layers=1-1-1-1 --image-size 32 --text-tower bert-tiny --embed-dim 16"
)
FLAGS += " --max-text-tokens 8 --val-fraction 0.2 --workers 0 --ranks 3"
ITEMS = """
from depth_data import contents


class All:
    def __len__(self):
        return 30

    def __getitem__(self, i):
        image, depth = contents(i)
        return {"image": image, "text": f"picture {i}", "depth": depth}


class Without(All):
    def __getitem__(self, i):
        return {**super().__getitem__(i), "depth": None}
"""


@pytest.fixture(scope="module")
def data(module_folder):
    return written(module_folder("data"))


@pytest.fixture
def planned(changed, data, tmp_path, monkeypatch, capsys):
    """`planned(format, …)`: a dry run with other text in a file of the example -> its first screen."""

    def run(format="jsonl", file="", old="", new="", spec="", pairs=PAIRS, flags=(), **also):
        monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
        (tmp_path / f"items_of_{tmp_path.name}.py").write_text(ITEMS)
        changed(file, old, new, **also)
        spec = spec or data.get(format) or f"python:items_of_{tmp_path.name}:All"
        config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "train_batch_size": 12}))
        given = ["--dry-run", "--pairs", pairs, "--data", spec, *words(FLAGS)]
        given += ["--import-module", f"shown_of_{tmp_path.name}"]
        given += ["--deepspeed_config", str(tmp_path / "config.json")]
        given += ["--val-data", data["webdataset"]] if format == "stream" else []
        given += flags
        assert dry_run(parse_options(given)) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("format", FORMATS)
def test_what_no_data_set_can_hold_is_said(format, planned):
    """Of a stream only some shards are looked into: it is said on the first screen."""
    missing = (
        "has depth, which --pairs depth:text compares (depth is an item's 'depth' of python: data"
    )
    if format == "python":  # whose items hold any modality
        assert "compares" not in planned(format, "stored", *NO_RECORD)
    elif format == "stream":
        assert f"no sample of the shards that come first {missing}" in planned(
            format, "stored", *NO_RECORD
        )
    else:
        with pytest.raises(ValueError) as refused:
            planned(format, "stored", *NO_RECORD)
        assert f"no training sample {missing}" in str(refused.value)


@pytest.mark.parametrize("format", FORMATS[:4])
def test_a_record_that_no_format_reads_is_said(format, planned, changed):
    text = (
        'STORED["depth"] = DEPTH',
        'from data.stored.record import Stored\nSTORED["depth"] = Stored("depth")',
    )
    with pytest.raises(ValueError, match="no training sample has depth, .*that is a StoredFile"):
        planned(format, "stored", *text)


@pytest.mark.parametrize("format", ("webdataset", "stream"))
def test_a_tar_needs_endings(format, planned):
    expected = "no member of a tar, since it has no endings"
    if format == "stream":
        assert expected in planned(format, "stored", f"    {ENDINGS},\n", "")
        return
    with pytest.raises(ValueError, match=expected):
        planned(format, "stored", f"    {ENDINGS},\n", "")


def test_items_without_a_modality_are_said(planned, tmp_path):
    with pytest.raises(
        ValueError, match="Without: no training sample has depth, .* leave depth:text out"
    ):
        planned(spec=f"python:items_of_{tmp_path.name}:Without")


@pytest.mark.parametrize("format", FORMATS)
def test_derived_rows_that_no_sample_has_are_said(format, planned):
    pairs, expected = f"{PAIRS},region:text", "has region, which --pairs region:text compares"
    if format == "stream":
        assert expected in planned(format, pairs=pairs)
    else:  # a table has no regions at all
        with pytest.raises(ValueError, match=expected):
            planned(format, pairs=pairs)


@pytest.mark.parametrize("pair", ("region:depth", "phrase:text", "image:region"))
def test_derived_rows_of_another_branch_are_refused(pair, changed):
    changed()
    with pytest.raises(
        ValueError, match="argument --pairs: there is no modality '(region|phrase)'"
    ):
        refuse_pairs(f"{PAIRS},{pair}", (), False)


@pytest.mark.parametrize("format", FORMATS)
def test_the_example_is_read_from_every_format(format, planned):
    assert "compares" not in planned(format)


MEASURE_BODY = 'return {"depth_nearest": float(depth_of(content).min())} if decode else {}'
MEASURE_CASES = {
    "a module that is not there": (
        "import none_such",
        "depth: its measure failed with ModuleNotFoundError: No module named 'none_such' (line 2",
    ),
    "an error for each value": ('return {}["near"]', "unreadable: KeyError: 'near'"),
    "nothing": ("return None", "unreadable: TypeError: "),
    "another column": (
        'return {"depth_farthest": 1.0}',
        "measure made the column 'depth_farthest'",
    ),
    "a text": ('return {"depth_nearest": "near"}', "the column 'depth_nearest' of an index is of"),
}


@pytest.mark.parametrize("case", MEASURE_CASES)
def test_a_measure_that_fails_is_said(case, planned, tmp_path):
    """And no index keeps what it made, once it is mended."""
    new, expected = MEASURE_CASES[case]
    with pytest.raises(ValueError) as refused:
        planned("jsonl", "stored", MEASURE_BODY, new)
    assert expected in str(refused.value)
    for name in [name for name in sys.modules if name.endswith(f"_of_{tmp_path.name}")]:
        del sys.modules[name]
    for file in Path(tmp_path).rglob("*.pyc"):
        file.unlink()
    STORED.pop("depth")
    assert "compares" not in planned("jsonl")


LOADER_CASES = {
    "nothing": (
        ENTRY,
        ENTRY.replace("Depth(views_of(inputs))", "None"),
        "its function returned None",
    ),
    "another name": ('name = "depth"', 'name = "deep"', "with the name 'depth' is needed"),
    "no name": ('    name = "depth"\n', "", "with the name 'depth' is needed"),
    "no blank": ("def blank(", "def black(", "with abstract method blank"),
    "no loader": ("class Depth(PlacedModality)", "class Depth", "Depth() takes no arguments (line"),
    "other tensors": (
        'return {"depth_values": torch.from',
        'return {"depths": torch.from',
        "reads depth_values",
    ),
    "another blank": (
        "torch.zeros(1, *size)",
        "torch.zeros(2, *size)",
        "by its meta_batch, which is",
    ),
    "no map": (
        "        return depth_of(value)\n",
        "        return None\n",
        "failed with AttributeError",
    ),
    "a module that is not there": (
        "        return depth_of(value)\n",
        "        import none_such\n",
        "No module named 'none_such' (line",
    ),
}


@pytest.mark.parametrize("case", LOADER_CASES)
def test_a_loader_is_refused_before_the_first_step(case, planned):
    old, new, expected = LOADER_CASES[case]
    with pytest.raises(ValueError) as refused:
        planned("jsonl", "shown", old, new)
    message = str(refused.value)
    assert message.startswith("the loader of 'depth': ") and expected in message, message


# -- sizes of images

SIZES = {
    "--image-buckets": ["--image-buckets", "2"],
    "branches.balance.image_size": [
        "--set",
        'branches.balance={"strategy": "feed", "image_size": [16, 32]}',
    ],
}
GRID = (
    ".transpose(1, 2)",
    ".transpose(1, 2).unflatten(1, (4, 4)).flatten(1, 2)",
)  # of 32 pixels alone


@pytest.mark.parametrize("asked", SIZES)
def test_a_tower_of_one_size_is_refused_where_it_follows_the_image(asked, planned):
    with pytest.raises(ValueError) as refused:
        planned("webdataset", "tower", *GRID, flags=SIZES[asked])
    message = str(refused.value)
    assert message.startswith(f"{asked}: depth tower depth64 takes one size only, "), message


@pytest.mark.parametrize("asked", SIZES)
def test_a_tower_of_any_size_is_taken(asked, planned):
    assert "compares" not in planned("webdataset", flags=SIZES[asked])


def test_a_tower_of_one_size_is_taken_where_its_values_have_one(planned):
    """What its loader makes is of one size whatever the image's is."""
    body = """torch.from_numpy(shown.astype(np.float32))[None] / FARTHEST}

    def blank(self, size):
        return {"depth_values": torch.zeros(1, *size)}"""
    first = body.partition("}")[0]
    square = body.replace(first, f"nn.functional.adaptive_avg_pool2d({first}, 32)")
    square = square.replace("*size", "32, 32").replace("nn.", "torch.nn.")
    given = {"flags": SIZES["--image-buckets"], "also": ("tower", *GRID)}
    assert "compares" not in planned("webdataset", "shown", body, square, **given)
