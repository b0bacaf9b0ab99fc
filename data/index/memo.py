"""What an index has measured of images, sounds and films, for the index that replaces it: found by
path, size and time of last change of a file, and by the hash of encoded bytes in a row or a shard."""

from pathlib import Path
from typing import Any

import numpy as np

from data.formats.rows import Media
from data.index.mapped import Index
from data.index.media import MEDIA, media_of
from data.keys import hash64


def memo_key(media: Media, hashed: bytes, may_decode: bool) -> int:
    """Never 0. `hashed`: the hash of what is in no file of its own. `may_decode`: whether more may be
    read than a header, which may give another size."""
    of_file = (media.true_path, media.size, media.mtime_ns)
    return hash64(repr((hashed or of_file, may_decode))) or 1


class Memo:
    """Of an index. What is bad has no key in it. Pickled it is two paths."""

    def __init__(self, index: Index, folder: Path) -> None:
        self._index, self._folder, self._orders = index, folder, dict[str, np.ndarray]()
        for modality in media_of(index.modalities):
            file = folder / f"{modality}_order.npy"  # one for all processes: it grows with the rows
            if not file.exists():
                np.save(file, np.argsort(index.column(f"{modality}_known_by")))
            self._orders[modality] = np.load(file, mmap_mode="r")

    def __reduce__(self):
        return Memo, (self._index, self._folder)

    def find(self, modality: str, key: int) -> dict[str, Any]:
        """The columns of what was measured; empty: the key is not known."""
        keys, order = self._index.column(f"{modality}_known_by"), self._orders[modality]
        place = int(np.searchsorted(keys, np.uint64(key), sorter=order))
        if place == len(order) or keys[i := int(order[place])] != key:
            return {}
        names = (f"{modality}_hash", *MEDIA[modality].columns)
        found = {name: self._index.column(name)[i].item() for name in names}
        if modality == "video":
            found["video_codec"] = self._index.text("video_codec", i)
        return found
