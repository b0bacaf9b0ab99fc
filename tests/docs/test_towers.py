"""models/TOWERS.md says what is true: some of its rows are made again, and its summary is that of
its rows."""

import importlib.metadata
import re
import statistics

import pytest

from docs.towers import PACKAGES, README, SUMMARY, TABLE, names, page, row

pytest.importorskip("timm", reason="the table has its models")
pytest.importorskip("open_clip", reason="the table has its models")

PAGE = TABLE.read_text(encoding="utf-8")
TABLES = SUMMARY.search(PAGE)[0]
SAMPLE = (
    ("timm", "timm:resnet18"),
    ("timm", "timm:coat_mini"),
    ("timm", "timm:beit_base_patch16_224"),
    ("torchvision", "alexnet"),
    ("OpenCLIP, images", "open_clip:RN101"),
    ("OpenCLIP, texts", "open_clip:EVA01-g-14"),
    ("transformers, images", "hf:dinov2-small"),
    ("transformers, texts", "bert-tiny"),
    ("transformers, sounds", "hf:whisper-tiny"),
)


def layers_in(text: str) -> dict[str, dict[str, int]]:
    """What a page says: library -> name, without the library's prefix -> layers, 0 where it is no
    tower."""
    found: dict[str, dict[str, int]] = {}
    for library, section in re.findall(r"^## (.+?)$(.+?)(?=^## |\Z)", text, re.M | re.S):
        found[library] = of_library = {}
        listed, _, refused = section.partition(f"No towers of {library}")
        for line in re.findall(r"^- .+?: (\d.*)$", listed, re.M):
            for number, names_of in re.findall(r"(\d+) ((?:`[^`]+` ?)+)", line):
                of_library |= dict.fromkeys(re.findall(r"`([^`]+)`", names_of), int(number))
        of_library |= dict.fromkeys(re.findall(r"^- `([^`]+)`:", refused, re.M), 0)
    return found


@pytest.fixture(scope="module")
def every():
    return list(names())


@pytest.fixture(scope="module")
def made(every):
    """The rows of SAMPLE, made again."""
    return [row(*each) for each in every if (each[1], each[0]) in SAMPLE]


@pytest.mark.all("makes a page anew")
def test_rows_made_again_are_those_of_the_page(made):
    listed = layers_in(PAGE)
    assert len(made) == len(SAMPLE)
    for each in made:
        name = each.name.removeprefix("timm:").removeprefix("open_clip:").removeprefix("hf:")
        assert listed[each.library][name] == each.layers > 0, each.name


def test_a_page_says_what_its_rows_say(made, every):
    text, listed = page(made, every), layers_in(page(made, every))
    assert sorted(n for of in listed.values() for n in of.values()) == sorted(
        each.layers for each in made
    )
    resnet = next(each for each in made if each.name == "timm:resnet18")
    assert f"| resnet | 1 of {sum(e[1:3] == ('timm', 'resnet') for e in every)} | 224 px | " in text
    assert f"| {resnet.width} | {resnet.layers} |" in text


def test_the_summary_is_that_of_the_rows():
    listed = layers_in(PAGE)
    lines = [line.strip("| ").split(" | ") for line in TABLES.splitlines()[2:]]
    assert [line[0] for line in lines] == list(listed)
    for library, _, tried, towers, spread, short, one in lines:
        layers = [number for number in listed[library].values() if number]
        assert int(tried) == len(listed[library]) and int(towers) == len(layers)
        median = f"{statistics.median(layers):g}"
        assert spread == f"{min(layers)}, {median}, {max(layers)}"
        assert int(short) == sum(number < 6 for number in layers)
        assert int(one) == layers.count(1)
    assert TABLES in README.read_text(encoding="utf-8")


def test_names_are_those_of_the_libraries(every):
    """Of the versions that the page was written with; of others there may be more."""
    if any(f"{name} {importlib.metadata.version(name)}" not in PAGE for name in PACKAGES):
        pytest.skip("the page was written with other versions of the libraries")
    for line in TABLES.splitlines()[2:]:
        library, number, *_ = line.strip("| ").split(" | ")
        own = {name.rpartition(":")[2] for name, of, _, _ in every if of == library}
        assert len(own) == int(number) and set(layers_in(PAGE)[library]) <= own
