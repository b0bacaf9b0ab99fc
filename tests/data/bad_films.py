"""Films for tests, whose frames show their number, and all that can be wrong with a film."""

import io
from fractions import Fraction

import numpy as np

WIDTH, HEIGHT, BITS = 64, 48, 10


def film(
    number=30,
    codec="mpeg4",
    kind="mp4",
    rate=30,
    pts=None,
    first=0,
    group=10,
    b_frames=0,
    rotation=None,
    size=(WIDTH, HEIGHT),
    sound_s=0.0,
    sound_codec="aac",
    matrix=None,
    aspect=None,
    path=None,
    **options,
):
    """`pts` and `first` in frames of the rate; `group`: frames from one key frame to the next;
    `matrix` a, b, c, d of `as_shown`; `aspect` of a pixel."""
    import av

    with io.BytesIO() as file:
        with av.open(path or file, "w", format=kind, options=options) as out:
            stream = out.add_stream(codec, rate=rate)
            stream.width, stream.height = size
            stream.pix_fmt, stream.gop_size, stream.max_b_frames = "yuv420p", group, b_frames
            stream.codec_context.thread_count = 1
            if codec == "libx264":
                open_gop = f"open-gop=1:bframes={b_frames}:b-adapt=0"
                stream.options = {"preset": "ultrafast", "x264-params": open_gop}
            if rotation is not None:
                stream.set_display_rotation(rotation)
            if matrix is not None:
                (a, b, c, d), one = (1 << 16) * np.array(matrix), 1 << 30
                stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, one])
            if aspect is not None:
                stream.codec_context.sample_aspect_ratio = aspect
            sound = out.add_stream(sound_codec, rate=16_000, layout="mono") if sound_s else None
            out.start_encoding()
            for i in range(number):
                frame = av.VideoFrame.from_ndarray(painted(i, size), format="rgb24")
                frame.pts = first + (i if pts is None else pts[i])
                frame.time_base = Fraction(1, rate)
                out.mux(stream.encode(frame))
            out.mux(stream.encode(None) if number else [])
            if sound is not None:
                samples = np.zeros((1, round(16_000 * sound_s)), np.float32)
                frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
                frame.rate, frame.pts = 16_000, 0
                out.mux(sound.encode(frame))
                out.mux(sound.encode(None))
        return file.getvalue()


def painted(number, size=(WIDTH, HEIGHT)):
    """uint8 [h, w, 3]: the number's bits as white blocks of 8 pixels, in two rows."""
    image = np.zeros((size[1], size[0], 3), np.uint8)
    for bit in range(BITS):
        if number >> bit & 1:
            row, column = divmod(bit, BITS // 2)
            image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 255
    return image


def numbers_in(frames):
    """What is painted in uint8 [T, 3, h, w]."""
    blocks = [(divmod(bit, BITS // 2), 1 << bit) for bit in range(BITS)]
    return [
        sum(bit * int(frame[:, 8 * y + 4, 8 * x + 4].mean() > 128) for (y, x), bit in blocks)
        for frame in frames
    ]


def of_many_streams(streams, side, kind):
    """One frame of so many pixels a side, and as many streams that have it."""
    import av

    with io.BytesIO() as file, io.BytesIO(film(1, "libx264", size=(side, side))) as one:
        with av.open(one) as given, av.open(file, "w", format=kind) as out:
            (packet, *_) = given.demux(video=0)
            made = [out.add_stream_from_template(given.streams.video[0]) for _ in range(streams)]
            for stream in made:
                packet.stream = stream
                out.mux(packet)
        return file.getvalue()


def sound_with_cover():
    import av

    with io.BytesIO() as file:
        with av.open(file, "w", format="mp4") as out:
            sound = out.add_stream("aac", rate=16_000, layout="mono")
            cover = out.add_stream("mjpeg", rate=1)
            cover.width, cover.height, cover.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
            cover.disposition = av.stream.Disposition.attached_pic
            out.start_encoding()
            frame = av.VideoFrame.from_ndarray(painted(5), format="rgb24")
            frame.pts = 0
            out.mux(cover.encode(frame.reformat(format="yuvj420p")))
            out.mux(cover.encode(None))
            samples = np.zeros((1, 16_000), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.rate, frame.pts = 16_000, 0
            out.mux(sound.encode(frame))
            out.mux(sound.encode(None))
        return file.getvalue()


def with_bad_frame(content, which):
    """The bytes of the frame of that number, in the order of the file, are zeros."""
    import av

    with av.open(io.BytesIO(content)) as file:
        packet = list(file.demux(video=0))[which]
        position, size = packet.pos, packet.size
    return content[:position] + bytes(size) + content[position + size :]


def table_first(folder):
    """An mp4 whose table of frames comes first."""
    film(path=folder / "film.mp4", movflags="faststart")
    return (folder / "film.mp4").read_bytes()


def bad_films(folder):
    """Name -> (reason, content)."""
    from bad_audio import m4a, tone, wav
    from bad_sets import encoded_image

    cut = {kind: film(kind=kind, codec="mpeg4") for kind in ("mp4", "matroska", "avi")}
    cut |= {"table first": table_first(folder)}
    return {
        **{f"cut {name}": ("truncated-film", c[: 6 * len(c) // 10]) for name, c in cut.items()},
        "cut within a frame": ("truncated-film", table_first(folder)[:-1]),
        "nothing": ("empty-file", b""),
        "words": ("not-a-film", b"a film about a dog " * 100),
        "image": ("not-a-film", encoded_image()),
        "playlist": ("not-a-film", b"#EXTM3U\n#EXTINF:10,\n/etc/hostname\n#EXT-X-ENDLIST\n"),
        "sound": ("not-a-film", wav(tone())),
        "sound in mp4": ("not-a-film", m4a(tone(), 16_000)),
        "sound with cover": ("not-a-film", sound_with_cover()),
        "no track": ("no-frames", film(0)),
        "empty track": ("no-frames", film(0, kind="avi")),
        "fast": ("impossible-film", film(rate=1000)),
        "slow": ("impossible-film", film(3, rate=1, pts=(0, 200, 400))),
        "narrow": ("impossible-film", film(2, size=(16, 1632))),
        "long": ("huge-film", film(400, rate=1, pts=range(0, 40_000, 100))),
        "first frame": ("unreadable", with_bad_frame(film(), 0)),
    }
