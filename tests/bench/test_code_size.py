"""bench/code_size.py counts what is there."""

from bench.code_size import measure

FILES = {
    "train.py": "from launch.a import f\n\n\ndef main(self, a, *b, c=1, **d):\n    return f\n",
    "launch/a.py": "import data.one.b\n# a comment\nimage_size = 1\n",
    "data/one/__init__.py": "",
    "data/one/b.py": "def g():\n    from data.two.c import C\n",
    "data/two/c.py": "from data.one import b\n\n\nclass C:\n    '''--image-size'''\n",
    "data/two/d.py": "if TYPE_CHECKING:\n    from data.two import e\n",
    "data/two/e.py": "import data.two.d\n",
}


def test_sizes_circles_and_options(tmp_path):
    for path, source in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    text = "\n".join(measure(tmp_path))
    assert (
        "| scripts | 5 | 1 | 1 | 2 / 2 / 2 (train.py: main) | 4 / 4 / 4 (train.py: main) |" in text
    )
    assert "| product | 18 | 7 | 2 | " in text and "| 2 (data/two/c.py: C) | 5.6% | 0 |" in text
    assert "between files: 1\n- data/one/b.py · data/two/c.py\n" in text
    assert "between folders: 1\n- data/one · data/two\n" in text
    assert "| image_size | 2 | 1 |" in text and "| eval_every | 0 | 0 |" in text
