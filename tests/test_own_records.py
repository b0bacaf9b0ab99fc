"""Records of a modality of one's own that lack a part or have a wrong one: each is named where its module
is imported, or where its tower is made, before data is opened. The records are those of
`examples/depth/`, each with one line changed."""

import pytest
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
    """`changed(file, old, new)`: imports the example with other text in one of its files."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(file="", old="", new=""):
        names = [f"{each}_of_{tmp_path.name}" for each in ("stored", "tower", "shown")]
        for name in names:
            part = name.partition("_")[0]
            text = (ROOT / "examples" / "depth" / f"{part}.py").read_text()
            assert part != file or text.count(old) == 1
            text = text.replace(old, new) if part == file else text
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
