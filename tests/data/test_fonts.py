"""Which fonts draw a text: tried with those that matplotlib ships, which have no Chinese, Japanese
or Korean."""

import unicodedata

import pytest
from fontTools.ttLib import TTCollection, TTFont
from matplotlib import font_manager

from data.modalities.fonts import (
    BASE,
    characters_of,
    columns_of,
    fonts_for,
    installed_families,
    wrapped,
)

CJK = "红苹果 りんご 사과"


@pytest.fixture
def shipped(monkeypatch):
    """As on a machine without any other fonts."""
    names = tuple(name for name in installed_families() if name.startswith(("DejaVu", "STIX")))
    monkeypatch.setattr("data.modalities.fonts.installed_families", lambda: names)
    return names


def test_the_first_font_is_enough_for_latin_greek_and_cyrillic():
    fonts = fonts_for(["naïve", "αβγ Привет"])
    assert fonts.families == [BASE] and not fonts.missing and fonts.notice() is None


def test_a_font_is_added_for_what_the_first_one_lacks(shipped):
    lacking = characters_of("STIXGeneral") - characters_of(BASE)
    sign = chr(min(c for c in lacking if unicodedata.category(chr(c)) == "So"))
    fonts = fonts_for([f"a {sign}{sign}b"])
    assert fonts.families[0] == BASE and len(fonts.families) == 2
    assert not fonts.missing and fonts.notice() is None
    assert ord(sign) in characters_of(fonts.families[1])
    assert fonts.drawable(f"a {sign}b") == f"a {sign}b"


def test_what_no_font_has_is_a_question_mark_and_one_line_names_a_font_to_install(shipped):
    fonts = fonts_for([f"an apple: {CJK}"])
    assert {c for c in CJK if c != " "} - fonts.missing <= set(map(chr, fonts.characters))
    assert fonts.drawable("an apple: 红苹果") == "an apple: ???"
    assert "apt-get install fonts-noto-cjk" in fonts.notice() and "\n" not in fonts.notice()
    assert fonts_for(["中文"]).notice() == fonts.notice()  # several images need it once
    other = fonts_for(["𐎀 in Ugaritic"]).notice()
    assert "such as '𐎀', are drawn" in other and "fonts-noto-cjk" not in other


def test_fonts_of_placeholders_are_no_fonts():
    """Matplotlib ships one, whose glyphs say which block of Unicode a character is of."""
    assert not any("resort" in name.lower() for name in installed_families())


def test_joiners_and_selectors_need_no_font(shipped):
    fonts = fonts_for(["❤\ufe0f\u200d\U000e0101 \x07"])
    assert not fonts.missing
    assert fonts.drawable("❤\U000e0101\x07!\n") == "❤!\n"


def test_fonts_installed_after_matplotlib_made_its_list(monkeypatch, tmp_path):
    stix = font_manager.findfont("STIXGeneral")
    (tmp_path / "damaged.ttf").write_bytes(b"no font")
    manager = font_manager.fontManager
    others = [entry for entry in manager.ttflist if entry.name != "STIXGeneral"]
    monkeypatch.setattr(manager, "ttflist", others)
    paths = [str(tmp_path / "damaged.ttf"), str(stix)]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda fontext: paths)
    assert "STIXGeneral" in installed_families.__wrapped__()
    assert characters_of("No Such Family") == frozenset()


@pytest.mark.skipif(
    not hasattr(font_manager.FontEntry, "index"), reason="matplotlib reads the first face alone"
)
def test_each_face_of_a_collection_by_its_own_characters(monkeypatch, tmp_path):
    names = ("DejaVu Sans Mono", "STIXGeneral")
    expected = [characters_of(name) for name in names]
    collection = TTCollection()
    collection.fonts = [TTFont(font_manager.findfont(name)) for name in names]
    collection.save(tmp_path / "both.ttc")
    manager = font_manager.fontManager
    others = [entry for entry in manager.ttflist if entry.name not in names]
    monkeypatch.setattr(manager, "ttflist", others)
    manager.addfont(tmp_path / "both.ttc")
    manager._findfont_cached.cache_clear() if hasattr(manager, "_findfont_cached") else None
    assert [characters_of(name) for name in names] == expected


def test_a_font_that_is_written_anew_is_read_and_drawn_anew(monkeypatch, tmp_path):
    """Under its name, as an update of the system does it."""
    manager, file, sign = font_manager.fontManager, tmp_path / "ours.ttf", ord("∞")

    def write(without):
        font = TTFont(font_manager.findfont("STIXGeneral"))
        for record in font["name"].names:
            record.string = "Wye Ours" if record.nameID in (1, 4, 16) else "Regular"
        for table in font["cmap"].tables:
            for code in without:
                table.cmap.pop(code, None)
        font.save(tmp_path / "beside")
        (tmp_path / "beside").replace(file)

    monkeypatch.setattr(manager, "ttflist", [*manager.ttflist])
    write([sign])
    manager.addfont(file)
    before = characters_of("Wye Ours")
    assert ord("a") in before and sign not in before
    assert not font_manager.get_font(str(file)).get_char_index(sign)
    write([])
    assert characters_of("Wye Ours") == before | {sign}
    assert font_manager.get_font(str(file)).get_char_index(sign)
    file.unlink()
    assert characters_of("Wye Ours") == frozenset()


# -- lines


def test_lines_are_broken_where_the_script_allows():
    assert columns_of("ab红苹사ん!") == 2 + 4 * 2 + 1  # wide characters count two
    for text, letters, lines in (
        ("a red  apple\non a tree", 8, ["a red", "apple on", "a tree"]),
        ("medium-light skin", 8, ["medium-", "light", "skin"]),
        ("incomprehensible", 6, ["incomp", "rehens", "ible"]),
        ("戴兔耳朵的人 ab", 8, ["戴兔耳朵", "的人 ab"]),
        ("red苹果", 6, ["red苹", "果"]),
        ("여자 과학자 갈색", 9, ["여자", "과학자", "갈색"]),  # Korean has spaces
        ("", 6, []),
    ):
        assert wrapped(text, 9, lambda line: columns_of(line) <= letters) == lines, text
    # more lines than there is room for are cut and marked
    assert wrapped("one two three four", 2, lambda line: len(line) <= 5) == ["one", "tw…"]
    assert wrapped("one two", 2, lambda line: len(line) <= 5) == ["one", "two"]
