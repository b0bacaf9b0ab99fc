"""Which fonts draw a text: tried with those that matplotlib ships, which have no Chinese, Japanese
or Korean."""

import unicodedata

import pytest
from fontTools.ttLib import TTCollection, TTFont
from matplotlib import font_manager
from PIL import ImageFont

from data.modalities.fonts import (
    BASE,
    Font,
    Fonts,
    characters_of,
    columns_of,
    fonts_for,
    installed_fonts,
    wrapped,
)

CJK = "红苹果 りんご 사과"


@pytest.fixture
def shipped(monkeypatch):
    """As on a machine without any other fonts."""
    fonts = tuple(font for font in installed_fonts() if font.family.startswith(("DejaVu", "STIX")))
    monkeypatch.setattr("data.modalities.fonts.installed_fonts", lambda: fonts)
    return fonts


def of_family(fonts, family: str) -> Font:
    return next(font for font in fonts if font.family == family)


def test_the_first_font_is_enough_for_latin_greek_and_cyrillic():
    fonts = fonts_for(["naïve", "αβγ Привет"])
    assert fonts.families == [BASE] and not fonts.missing and fonts.notice() is None
    assert fonts.runs("αβγ Привет") == [("αβγ Привет", fonts.fonts[0])]


def test_a_font_is_added_for_what_the_first_one_lacks(shipped):
    stix = of_family(shipped, "STIXGeneral")
    lacking = characters_of(stix) - characters_of(fonts_for([]).fonts[0])
    sign = chr(min(c for c in lacking if unicodedata.category(chr(c)) == "So"))
    fonts = fonts_for([f"a {sign}{sign}b"])
    assert (
        fonts.families[0] == BASE
        and len(fonts.fonts) == 2
        and not fonts.missing
        and fonts.notice() is None
    )
    assert ord(sign) in characters_of(fonts.fonts[1])
    assert fonts.runs(f"a {sign}{sign}b") == [
        ("a ", fonts.fonts[0]),
        (sign * 2, fonts.fonts[1]),
        ("b", fonts.fonts[0]),
    ]


def test_the_plainest_of_equal_fonts_is_taken(shipped):
    assert of_family(shipped, "DejaVu Sans").path.endswith("DejaVuSans.ttf") and of_family(
        shipped, "STIXGeneral"
    ).path.endswith("STIXGeneral.ttf")


def test_what_no_font_has_is_a_question_mark_and_one_line_names_a_font_to_install(shipped):
    fonts = fonts_for([f"an apple: {CJK}"])
    assert {
        c
        for c in "红苹果りんご사과"
        if ord(c) not in characters_of(of_family(shipped, "STIXGeneral"))
    } == fonts.missing
    assert fonts.drawable("an apple: 红苹果") == "an apple: ???" and fonts.runs("红") == [
        ("?", fonts.fonts[0])
    ]
    assert "apt-get install fonts-noto-cjk" in fonts.notice() and "\n" not in fonts.notice()
    assert fonts_for(["中文"]).notice() == fonts.notice()  # several images need it once
    other = fonts_for(["𐎀 in Ugaritic"]).notice()
    assert (
        other.startswith("some characters, such as '𐎀', are drawn as")
        and "fonts-noto-cjk" not in other
    )


def test_fonts_of_placeholders_are_no_fonts():
    """Matplotlib ships one, whose glyphs say which block of Unicode a character is of."""
    assert not any("resort" in font.family.lower() for font in installed_fonts())


def test_joiners_and_selectors_need_no_font(shipped):
    fonts = fonts_for(["❤\ufe0f\u200d\U000e0101 \x07"])
    assert not fonts.missing
    assert fonts.drawable("❤\U000e0101\x07!\n") == "❤!\n"


def test_fonts_installed_or_removed_after_matplotlib_made_its_list(shipped, monkeypatch, tmp_path):
    stix = of_family(shipped, "STIXGeneral")
    (tmp_path / "damaged.ttf").write_bytes(b"no font")
    manager = font_manager.fontManager
    gone = font_manager.FontEntry(str(tmp_path / "gone.ttf"), name="Gone", size="scalable")
    monkeypatch.setattr(
        manager,
        "ttflist",
        [gone, *(entry for entry in manager.ttflist if entry.fname != stix.path)],
    )
    monkeypatch.setattr(
        font_manager, "findSystemFonts", lambda fontext: [str(tmp_path / "damaged.ttf"), stix.path]
    )
    found = installed_fonts.__wrapped__()
    assert stix in found and "Gone" not in {font.family for font in found}
    (tmp_path / "damaged.ttf").unlink()
    assert characters_of(Font("gone", str(tmp_path / "damaged.ttf"))) == frozenset()


def test_each_face_of_a_collection_by_its_own_characters(shipped, tmp_path):
    members = [of_family(shipped, name) for name in ("DejaVu Sans Mono", "STIXGeneral")]
    collection = TTCollection()
    collection.fonts = [TTFont(font.path) for font in members]
    collection.save(tmp_path / "both.ttc")
    faces = [
        Font(font.family, str(tmp_path / "both.ttc"), index) for index, font in enumerate(members)
    ]
    assert [characters_of(face) for face in faces] == [characters_of(font) for font in members]
    assert [ImageFont.truetype(face.path, 11, index=face.index).getname()[0] for face in faces] == [
        font.family for font in members
    ]


def test_the_first_font_that_has_a_character_draws_it():
    base = fonts_for([]).fonts[0]
    other = Font("other", font_manager.findfont("DejaVu Serif"))
    assert Fonts((other, base), frozenset("x")).runs("axb") == [("a?b", other)]


# -- lines


def test_wide_characters_count_two_columns():
    assert columns_of("ab红苹사ん!") == 2 + 4 * 2 + 1


@pytest.mark.parametrize(
    ("text", "letters", "lines"),
    [
        ("a red  apple\non a tree", 8, ["a red", "apple on", "a tree"]),
        ("medium-light skin", 8, ["medium-", "light", "skin"]),
        ("incomprehensible", 6, ["incomp", "rehens", "ible"]),
        ("戴兔耳朵的人 ab", 8, ["戴兔耳朵", "的人 ab"]),
        ("red苹果", 6, ["red苹", "果"]),
        ("여자 과학자 갈색", 9, ["여자", "과학자", "갈색"]),  # Korean has spaces
        ("", 6, []),
    ],
)
def test_lines_are_broken_where_the_script_allows(text, letters, lines):
    found = wrapped(text, 9, lambda line: columns_of(line) <= letters)
    assert found == lines and all(columns_of(line) <= letters for line in found)


def test_more_lines_than_there_is_room_for_are_cut_and_marked():
    assert wrapped("one two three four", 2, lambda line: len(line) <= 5) == ["one", "tw…"]
    assert wrapped("one two", 2, lambda line: len(line) <= 5) == ["one", "two"]
