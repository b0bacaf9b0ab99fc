"""What only shows something ends no program: a terminal that cannot show a character, a pipe that
nobody reads, a disk that is full."""

import io
import sys
import time
from pathlib import Path

import pytest

from common.output import INTERRUPTED, only_shows, outlive_output, plain, run_program
from data.progress import Bar
from launch.journal import Journal
from launch.run.folder import RunFolder
from launch.setup.first_screen import print_screen
from launch.terminal.tables import retrieval_report, show

ROOT = Path(__file__).parents[2]
FIGURES = {"validation/image_to_text_R@1": 0.5, "validation/image_to_text_R@5": 0.7}
FIGURES["validation/image_to_text_R@10"] = 0.9


def show_all():
    print_screen([("plan", "fork: image 0 ×1 | text 0 ×1"), ("data", "naïve – “数据”")])
    show(retrieval_report("Retrieval", [FIGURES, FIGURES], {"validation": 12}))
    with Bar(total=2, desc="training → 数据", file=sys.stderr) as bar:
        bar.update()
    print("… of a name that is no UTF-8: \udcff", file=sys.stderr)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_terminal_that_lacks_a_character_shows_its_number(monkeypatch, tmp_path, encoding):
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(open(tmp_path / name, "wb"), encoding=encoding)
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(UnicodeEncodeError):
        show_all()
    outlive_output()
    show_all()
    sys.stdout.flush()
    written = (tmp_path / "stdout").read_text(encoding)
    assert "50.0" in written and ("→" if encoding == "utf-8" else "\\u2192") in written


def test_a_full_disk_and_a_stream_that_is_closed_end_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    monkeypatch.setattr(sys, "stderr", None)
    outlive_output()
    show_all()
    sys.stdout.flush()
    print("said to nobody", file=sys.stderr)


def test_what_fails_while_it_is_shown_is_one_warning(tmp_path, caplog, capsys):
    class Broken:
        def __rich_console__(self, console, options):
            raise KeyError("title\x1b[2J")

    journal = Journal(RunFolder(tmp_path, first_rank=True), trace_every=0)
    journal.say(Broken(), "a line", "a line")
    journal.evaluation(1, 0.5, {"validation": {"image_to_text_R@1": 0.5}}, {})
    journal.retrieval({"validation": 12})  # without the other figures of its table
    assert capsys.readouterr().out.count("a line") == 1
    messages = [record.getMessage() for record in caplog.records]
    shown, page, table = messages  # the folder holds no run, so there is no page either
    assert all("not shown (KeyError: " in each for each in (shown, table))
    assert shown.endswith("\\x1b[2J')") and "report.html is not written" in page
    with pytest.raises(KeyboardInterrupt), only_shows("a picture is not shown"):
        raise KeyboardInterrupt


def test_what_a_terminal_would_obey_is_shown_in_escapes(capsys):
    assert plain("a\tb\n\x1b[31mred\x07 \x9b2J \u202e \udcff") == (
        "a\tb\n\\x1b[31mred\\x07 \\x9b2J \\u202e \\udcff"
    )
    assert plain("naïve “数据” é") == "naïve “数据” é"
    show("caption: \x1b]0;title\x07")
    assert "\\x1b]0;title\\x07" in capsys.readouterr().out


def test_how_a_program_ends(capsys):
    def fail(error):
        raise error

    assert run_program("tool", lambda: None) == 0 and run_program("tool", lambda: 3) == 3
    assert run_program("tool", lambda: fail(FileNotFoundError("no \x1b[1mfile"))) == 2
    assert capsys.readouterr().err == "tool: error: no \\x1b[1mfile\n"
    assert run_program("tool", lambda: fail(KeyboardInterrupt())) == INTERRUPTED
    with pytest.raises(KeyError):
        run_program("tool", lambda: fail(KeyError("a fault of ours")))


def test_a_bar_within_a_bar_writes_no_terminal_codes_to_a_log_file():
    file = io.StringIO()
    with Bar(total=2, desc="training", file=file, mininterval=0) as outer:
        with Bar(total=2, desc="evaluating", file=file, mininterval=0, leave=False) as inner:
            for _ in range(2):
                time.sleep(0.01)
                inner.update()
                inner.refresh()
        outer.update()
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    assert "evaluating: 100%" in file.getvalue()


def test_every_program_outlives_its_output():
    programs = [*ROOT.glob("*.py"), *(ROOT / "launch").rglob("*.py")]
    programs += [ROOT / "data" / "inspect.py", ROOT / "data" / "cache" / "__main__.py"]
    seen = 0
    for program in programs:
        blocks = program.read_text("utf-8").split('\nif __name__ == "__main__":\n')[1:]
        if blocks:
            assert any(block.startswith("    outlive_output()\n") for block in blocks), program
            seen += 1
    assert seen >= 9
