"""What an index has measured of images, sounds and films, for the index that replaces it: found by
path, size and time of last change of a file, and by the hash of encoded bytes in a row or a shard."""

from pathlib import Path
from typing import Any

import numpy as np

from data.formats.rows import Media
from data.index.mapped import Index
from data.keys import hash64
from data.stored.kinds import files_of
from data.stored.record import StoredFile


def memo_key(media: Media, hashed: bytes, may_decode: bool) -> int:
    """Never 0. `hashed`: the hash of what is in no file of its own. `may_decode`: whether more may be
    read than a header, which may give another size."""
    of_file = (media.true_path, media.size, media.mtime_ns)
    return hash64(repr((hashed or of_file, may_decode))) or 1


class Memo:
    """Of an index. What is bad has no key in it. Pickled it is two paths."""

    def __init__(self, index: Index, folder: Path) -> None:
        self._index, self._folder, self._orders = index, folder, dict[str, np.ndarray]()
        for name in (kind.name for kind in files_of(index.modalities)):
            file = folder / f"{name}_order.npy"  # one for all processes: it grows with the rows
            if not file.exists():
                np.save(file, np.argsort(index.column(f"{name}_known_by")))
            self._orders[name] = np.load(file, mmap_mode="r")

    def __reduce__(self):
        return Memo, (self._index, self._folder)

    def find(self, kind: StoredFile, key: int) -> dict[str, Any]:
        """The columns of what was measured; empty: the key is not known."""
        keys, order = self._index.column(f"{kind.name}_known_by"), self._orders[kind.name]
        place = int(np.searchsorted(keys, np.uint64(key), sorter=order))
        if place == len(order) or keys[i := int(order[place])] != key:
            return {}
        names = (f"{kind.name}_hash", *kind.measured)
        found = {name: self._index.column(name)[i].item() for name in names}
        return found | {name: self._index.text(name, i) for name in kind.said}
