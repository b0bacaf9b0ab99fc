"""Films through a reader that keeps the last one open.

python bench/films.py opening                             tables to bench/out/
python bench/films.py memory --films 10000
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.compare import Column, Figures, Study, Way, main
from data.decoding.films import FilmReader, even_times

FRAMES = 8  # of a segment
RATE = 25  # frames/s
LOOKS = 10  # at the memory, evenly spread


def opening(seconds: int = 120, segments: int = 60, side: int = 240, group: int = 50) -> Study:
    """Segments of one film, one after another: at least 1.3 × as fast as a loop that opens the film
    anew for each."""
    path = str(Path(tempfile.mkdtemp(prefix="films-")) / "film.mp4")
    write_film(path, seconds * RATE, side, group)
    parts = np.linspace(0, seconds, segments + 1)
    times = [even_times(*part, FRAMES) for part in zip(parts, parts[1:])]
    ways = {
        "opened once": Way(partial(measured, once, path, times)),
        "opened anew": Way(partial(measured, anew, path, times)),
        "a loop of PyAV": Way(partial(measured, loop, path, times)),
    }
    return Study(
        "Segments of one film",
        ways,
        (
            Column("segments_per_s", "segments per second of processor time", "{:.1f}"),
            Column("segments_per_s", "opened once ÷ it", inverse=True),
        ),
        f"{segments} segments of {seconds} s at {side} x {side} and {RATE} frames/s, h264, a key "
        f"frame every {group}, {FRAMES} frames a segment.",
        reference="opened once",
        equal=("sum", 0.0),
    )


def memory(films: int = 10_000, different: int = 100, side: int = 64) -> Study:
    """Films through one reader: resident memory is the same after the first thousand and after the
    last, and no descriptor is left."""
    folder = Path(tempfile.mkdtemp(prefix="films-"))
    for i in range(different):
        write_film(str(folder / f"{i}.mp4"), 30 + i, side, 10)
    names = [str(folder / f"{i % different}.mp4") for i in range(films)]
    columns = (
        Column("resident_mib", f"MiB after each {films // LOOKS:,}", "{:.1f}"),
        Column("descriptors", "descriptors", "{:.0f}"),
    )
    how = f"{films:,} films of {side} x {side} and 1 to 5 s, h264, {FRAMES} frames of each."
    ways = {"by path": Way(partial(grown, names)), "as bytes": Way(partial(grown, names, True))}
    return Study("Memory of one worker", ways, columns, how, rounds=1)


STUDIES = (opening, memory)


def write_film(path: str, number: int, side: int, group: int) -> None:
    """Noise in fields of 16 pixels that moves to the right."""
    import av

    noise = np.random.default_rng(number).integers(0, 256, (side // 16, side // 16, 3))
    image = noise.astype(np.uint8).repeat(16, 0).repeat(16, 1)
    with av.open(path, "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.width = stream.height = len(image)
        stream.pix_fmt, stream.gop_size = "yuv420p", group
        for i in range(number):
            moved = np.roll(image, 2 * i, 1)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        out.mux(stream.encode(None))


def measured(way: Any, path: str, times: list[np.ndarray]) -> Figures:
    began, total = time.process_time(), 0  # of one core, whatever the others do
    for frames in way(path, times):
        total += int(frames[..., ::16].sum())  # what comes out, at little cost
    return {"segments_per_s": len(times) / (time.process_time() - began), "sum": float(total)}


def once(path: str, times: list[np.ndarray]) -> Iterator[np.ndarray]:
    with FilmReader() as reader:
        for wanted in times:
            yield reader.frames(path, wanted)


def anew(path: str, times: list[np.ndarray]) -> Iterator[np.ndarray]:
    for wanted in times:
        with FilmReader() as reader:
            yield reader.frames(path, wanted)


def loop(path: str, times: list[np.ndarray]) -> Iterator[np.ndarray]:
    """As it is mostly written: open, seek, decode what follows, keep what is wanted."""
    import av

    for wanted in times:
        with av.open(path) as film:
            stream, found, left = film.streams.video[0], [], list(wanted)
            stream.codec_context.thread_count = 1
            film.seek(int(wanted[0] / stream.time_base), stream=stream)
            last = None
            for frame in film.decode(stream):
                while left and last is not None and frame.time > left[0]:
                    found.append(last.to_ndarray(format="rgb24").transpose(2, 0, 1))
                    left.pop(0)
                if not left:
                    break
                last = frame
            found += [last.to_ndarray(format="rgb24").transpose(2, 0, 1) for _ in left]
        yield np.stack(found)


def grown(names: list[str], as_bytes: bool = False) -> Figures:
    resident, descriptors = [], []
    with FilmReader() as reader:
        for i, name in enumerate(names, 1):
            reader.frames(Path(name).read_bytes() if as_bytes else name, even_times(0, 1, FRAMES))
            if i % (len(names) // LOOKS) == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
                descriptors.append(float(len(os.listdir("/proc/self/fd"))))
    return {"resident_mib": resident, "descriptors": descriptors}


if __name__ == "__main__":
    main("bench.films")
