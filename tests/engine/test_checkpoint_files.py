"""Files of checkpoints, without an engine: whatever happens to them, a whole one is used or it is
said what is wrong."""

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import TENSORS, largest_file, write_for_ever, write_small, write_until
from ranks import PRELOAD
from refusals import not_refused, refused
from safetensors import safe_open

from engine.backend.protocol import Shard
from engine.checkpoint import layout, writing
from engine.checkpoint.engine_state import dealt, fragment, restore
from engine.checkpoint.layout import (
    BrokenCheckpoint,
    Fragment,
    Manifest,
    RankRecord,
    checkpoints_in,
    newest_of,
    read_manifest,
    sealed,
    step_of,
    unsealed,
    verify,
)
from engine.checkpoint.reading import CheckpointReader, load_layer
from engine.checkpoint.retention import Keep, too_little_room
from engine.checkpoint.together import CheckpointWriter
from engine.checkpoint.writing import (
    claim,
    make_folder,
    refuse_other_owner,
    write_rank,
    writing_folder,
)
from launch.run.resuming import find_checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_small(folder, 1)
    write_small(folder, 2)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """Holds two checkpoints, of the steps 1 and 2."""
    return shutil.copytree(written, tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- what is written is what is read


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_a_checkpoint_gives_back_what_it_was_given_in_any_cut(tmp_path, num_ranks):
    checkpoint = write_small(tmp_path, 7, num_ranks=num_ranks)
    tensors = [f"rank-{rank:05d}.safetensors" for rank in range(num_ranks)]
    assert sorted(path.name for path in checkpoint.iterdir()) == ["manifest.json", *tensors]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-00000007"]
    manifest = verify(checkpoint)
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    assert (manifest.step, manifest.state) == (7, {"step": 7})
    of_ranks = {f"of rank {rank}": {"seen": rank} for rank in range(num_ranks)}
    assert manifest.progress == {"counters": {"global_steps": 7}, **of_ranks}
    draw = random.Random(0)
    with CheckpointReader(checkpoint) as reader:
        for name, tensor in TENSORS.items():
            for kind, expected in (
                ("parameter", tensor.flatten() + 7),
                ("optimizer.exp_avg", -tensor.flatten()),
            ):
                assert torch.equal(reader.read(kind, name, tensor.shape), expected)
                for _ in range(20):
                    start, stop = sorted(draw.choices(range(len(expected) + 1), k=2))
                    part = reader.read(kind, name, tensor.shape, start, stop)
                    assert torch.equal(part, expected[start:stop]), (name, start, stop)
            assert reader.scalars(name) == {"step": {"dtype": "float32", "value": 7.0}}
        assert reader.optimizer_kinds == ["optimizer.exp_avg"]


def test_what_is_not_there_is_named(folder):
    with CheckpointReader(folder / "step-00000002") as reader:
        cases = [
            ("parameter", "image.weigth", (20, 30), "the nearest is 'image.weight'"),
            ("optimizer.exp_avg_sq", "text.bias", (7,), "has no optimizer.exp_avg_sq 'text.bias'"),
            ("parameter", "image.weight", (30, 20), "has shape [20, 30], and [30, 20] is needed"),
        ]
        assert not_refused(reader.read, cases) == []


def test_a_layer_is_filled_by_the_names_of_the_run(folder):
    layer = torch.nn.Linear(1, 7)
    layer.canonical_names = {"weight": "text.bias", "bias": "text.bias"}
    layer.weight = torch.nn.Parameter(torch.empty(7))
    with CheckpointReader(folder / "step-00000002") as reader:
        load_layer(reader, layer)
    assert torch.equal(layer.bias, TENSORS["text.bias"] + 2) and layer.weight.dtype == torch.float32


# -- damage

MANIFEST, FIRST, SECOND = "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"


def flip(checkpoint, name, where):
    """Change one bit. `where`: a part of the file, 0 to 1."""
    content = bytearray((checkpoint / name).read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    (checkpoint / name).write_bytes(content)


def cut(checkpoint, name, part):
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[: int(part * len(content))])


def swap(checkpoint):
    (checkpoint / FIRST).rename(checkpoint / "aside")
    (checkpoint / SECOND).rename(checkpoint / FIRST)
    (checkpoint / "aside").rename(checkpoint / SECOND)


def link(checkpoint):
    """The right content, but from elsewhere."""
    (checkpoint / FIRST).rename(checkpoint.parent / "elsewhere")
    (checkpoint / FIRST).symlink_to(checkpoint.parent / "elsewhere")


def change(checkpoint, edit):
    """The manifest, as somebody with an editor would who also renews its seal."""
    record = unsealed((checkpoint / MANIFEST).read_text())
    edit(record)
    (checkpoint / MANIFEST).write_text(sealed(record))


def edit_fragment(**values):
    return lambda c: change(c, lambda record: record["ranks"][0]["fragments"][0].update(values))


DAMAGES = {
    "tensors, header bit": (lambda c: flip(c, FIRST, 0.02), f"{FIRST} does not have the checksum"),
    "tensors, first byte": (lambda c: flip(c, FIRST, 0), f"{FIRST} does not have the checksum"),
    "tensors, a value": (lambda c: flip(c, SECOND, 0.9), f"{SECOND} does not have the checksum"),
    "tensors, last byte": (lambda c: flip(c, SECOND, 1), f"{SECOND} does not have the checksum"),
    "tensors cut": (lambda c: cut(c, FIRST, 0.5), f"{FIRST} has 1,"),
    "tensors cut in the header": (lambda c: cut(c, SECOND, 0.01), f"{SECOND} has "),
    "tensors empty": (lambda c: cut(c, FIRST, 0), f"{FIRST} has 0 bytes, and was written with "),
    "tensors longer": (lambda c: (c / FIRST).write_bytes((c / FIRST).read_bytes() + b"\0"), f"{FIRST} has "),
    "tensors missing": (lambda c: (c / SECOND).unlink(), f"{SECOND} is missing"),
    "tensors of all ranks missing": (lambda c: [(c / name).unlink() for name in (FIRST, SECOND)], f"{FIRST} is missing"),
    "tensors are a folder": (lambda c: ((c / FIRST).unlink(), (c / FIRST).mkdir()), f"{FIRST} is a link or a folder"),
    "tensors are a link": (link, f"{FIRST} is a link or a folder"),
    "ranks' files swapped": (swap, f"{FIRST} "),
    "tensors of another step": (lambda c: shutil.copy(c.parent / "step-00000001" / FIRST, c / FIRST), f"{FIRST} does not have the checksum"),
    "manifest, first byte": (lambda c: flip(c, MANIFEST, 0), f"{MANIFEST} "),
    "manifest, a bit": (lambda c: flip(c, MANIFEST, 0.37), f"{MANIFEST} "),
    "manifest, a number": (
        lambda c: (c / MANIFEST).write_text((c / MANIFEST).read_text().replace('"step": 2', '"step": 3')),
        f"{MANIFEST} does not have the checksum",
    ),
    "manifest, not text": (lambda c: (c / MANIFEST).write_bytes(b"\xff\xfe\x00"), f"{MANIFEST} "),
    "manifest cut": (lambda c: cut(c, MANIFEST, 0.8), f"{MANIFEST} "),
    "manifest empty": (lambda c: cut(c, MANIFEST, 0), f"{MANIFEST} Expecting value"),
    "manifest of nothing": (lambda c: (c / MANIFEST).write_text("{}"), f"{MANIFEST} does not have the checksum"),
    "manifest is a list": (lambda c: (c / MANIFEST).write_text("[1]"), f"{MANIFEST} does not have the checksum"),
    "manifest nested too deeply": (lambda c: (c / MANIFEST).write_text("[" * 100_000), f"{MANIFEST} "),
    "manifest missing": (lambda c: (c / MANIFEST).unlink(), f"has no {MANIFEST}: it was not written to the end, or is of another format"),
    "manifest of another step": (lambda c: shutil.copy(c.parent / "step-00000001" / MANIFEST, c), f"{MANIFEST} is that of step 1"),
    "manifest of something else": (lambda c: change(c, lambda r: r.update(format="x")), f"{MANIFEST} is not that of a checkpoint"),
    "manifest of another version": (lambda c: change(c, lambda r: r.update(version=3)), f"{MANIFEST} has format version 3, and this program"),
    "manifest without ranks": (lambda c: change(c, lambda r: r.update(ranks=[])), f"{MANIFEST} lists no ranks"),
    "manifest without a rank": (lambda c: change(c, lambda r: r["ranks"].pop()), f"{MANIFEST} does not have the elements of "),
    "manifest without a key": (lambda c: change(c, lambda r: r["ranks"][0].pop("fragments")), f"{MANIFEST} lacks 'fragments'"),
    "manifest without a step": (lambda c: change(c, lambda r: r.pop("step")), f"{MANIFEST} "),
    "manifest with another key": (lambda c: change(c, lambda r: r.update(more=1)), f"{MANIFEST} "),
    "a fragment outside its tensor": (edit_fragment(offset=500), "do not lie in shape"),
    "a fragment below its tensor": (edit_fragment(offset=-1), "do not lie in shape"),
    "a fragment of words": (edit_fragment(numel="all"), "do not lie in shape"),
    "a fragment of another tensor": (edit_fragment(name="../../image.weight"), "does not have the elements of parameter"),
    "a fragment twice": (lambda c: change(c, lambda r: r["ranks"][0]["fragments"].append(r["ranks"][0]["fragments"][0])), "or not once"),
    "an empty folder": (lambda c: (shutil.rmtree(c), c.mkdir()), f"has no {MANIFEST}"),
    "an older program's folder": (lambda c: (shutil.rmtree(c), c.mkdir(), (c / "mp_rank_00_model_states.pt").touch()), "of another format"),
}  # fmt: skip


def test_a_broken_checkpoint_is_named_with_the_reason_and_passed_over(folder, alone, tmp_path):
    for number, (damage, (do, reason)) in enumerate(DAMAGES.items()):
        own = shutil.copytree(folder, tmp_path / str(number))
        do(own / "step-00000002")
        checkpoint, (notice,) = find_checkpoint("auto", own)
        assert checkpoint == own / "step-00000001", damage
        assert notice.startswith(f"passed over: {own / 'step-00000002'}: "), damage
        assert reason in notice, damage
        with refused("--resume … step-00000002: … give auto") as refusal:
            find_checkpoint(str(own / "step-00000002"), own)
        assert reason in str(refusal.value), damage
        shutil.rmtree(own / "step-00000001")
        with refused("--resume auto: no checkpoint can be used") as refusal:
            find_checkpoint("auto", own)
        assert reason in str(refusal.value), damage


def test_the_newest_is_used_whatever_the_pointer_says(folder, alone):
    for pointer in ("step-00000009\n", "step-00000001\n", "../../etc\n", "", None):
        (folder / "latest").unlink(missing_ok=True)
        if pointer is not None:
            (folder / "latest").write_text(pointer)
        assert find_checkpoint("auto", folder) == (folder / "step-00000002", []), pointer


def test_what_is_no_checkpoint_is_none(folder, alone):
    """Folders that are being written or were put aside, files, links, other names."""
    outside = folder.parent / f"{folder.name}-elsewhere"
    shutil.copytree(folder / "step-00000002", outside)
    for name in ("step-00000003.writing", "step-00000004.set-aside", "step-5", "step-000000x6"):
        shutil.copytree(folder / "step-00000002", folder / name)
    (folder / "step-00000007").write_text("")
    (folder / "step-00000008").symlink_to(outside)
    assert find_checkpoint("auto", folder) == (folder / "step-00000002", [])


def test_where_a_run_goes_on(folder, alone, tmp_path):
    assert find_checkpoint("never", folder) == (None, [])
    assert find_checkpoint("auto", tmp_path / "nothing yet") == (None, [])
    assert find_checkpoint(str(folder / "step-00000001"), folder) == (folder / "step-00000001", [])
    with pytest.raises(FileNotFoundError, match="step-00000200: no such folder; give auto"):
        find_checkpoint(str(folder / "step-00000200"), folder)


def test_ranks_share_the_reading(folder):
    """Each reads every second file."""
    flip(folder / "step-00000002", SECOND, 0.9)
    verify(folder / "step-00000002", 0, 2)
    with pytest.raises(BrokenCheckpoint, match=SECOND):
        verify(folder / "step-00000002", 1, 2)


class _Replicas:
    """In-memory exchange among the replicas of a stage, a thread each."""

    def __init__(self, number: int):
        self._barrier, self._given = threading.Barrier(number, timeout=60), None

    def from_replica(self, own: int, replica: int, tensor: torch.Tensor) -> None:
        if own == replica:
            self._given = tensor.clone()
        self._barrier.wait()
        tensor.copy_(self._given)
        self._barrier.wait()


def _whole(held):
    """What an optimizer holds that is not sharded."""
    return [
        Shard(name, tuple(t.shape), 0, t.numel(), t, 0, everywhere=True) for name, t in held.items()
    ]


def _dealt_to(checkpoints, num_ranks, held, step):
    """A checkpoint as replicas write what all of them hold, with one kind of optimizer state."""
    make_folder(checkpoints, step)
    shards = _whole(held)
    for rank in range(num_ranks):
        own = list(dealt(shards, rank, num_ranks))
        kinds = {"parameter": 1, "optimizer.exp_avg": -1}
        tensors = {
            fragment(k, shard): shard.of(sign * shard.held)
            for shard in own
            for k, sign in kinds.items()
        }
        scalars = {
            shard.name: {"step": {"dtype": "float32", "value": float(step)}} for shard in own
        }
        progress = {"optimizer": {"type": "AdamW", "options": {}}}
        write_rank(writing_folder(checkpoints, step), rank, tensors, scalars, (), progress)
    about = {"topology": {"precision": "float32"}, "state": {}, "configuration": {}}
    writing.commit(checkpoints, step, num_ranks, about, Keep(2), 10.0, threading.Event(), "")
    return checkpoints / f"step-{step:08d}"


def _resumed(checkpoint, replica, replicas, shapes, exchange):
    """Parameters and moments of a stage: all that `restore` asks of an engine."""
    held = {name: torch.nn.Parameter(torch.full(shape, 9.0)) for name, shape in shapes.items()}
    comm = SimpleNamespace(replica=replica, from_replica=partial(exchange.from_replica, replica))
    engine = SimpleNamespace(
        module=SimpleNamespace(canonical_parameters=held, canonical_buffers={}),
        backend=SimpleNamespace(
            optimizer=torch.optim.AdamW(held.values()),
            shards=lambda: _whole(held),
            weights_replaced=lambda: None,
        ),
        stage=SimpleNamespace(replicas=replicas),
        average=None,
        load_progress=lambda progress: None,
        comm=comm,
    )
    with CheckpointReader(checkpoint) as reader:
        restore(engine, reader)
    return held, {name: engine.backend.optimizer.state[p]["exp_avg"] for name, p in held.items()}


def test_replicas_open_each_file_once_and_hand_on_what_they_read(tmp_path, monkeypatch):
    """Each by itself would open all files: 24 × 24. One that reads a tensor that goes on in further
    files opens these too."""
    number, draw = 24, random.Random(3)
    shapes = {f"image.p{i}": (draw.choice((1, 7, 300, 2000)),) for i in range(40)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    checkpoint = _dealt_to(tmp_path, number, tensors, 7)
    opened = []

    def counted(file, framework):
        opened.append(file)
        return safe_open(file, framework)

    monkeypatch.setattr("engine.checkpoint.reading.safe_open", counted)
    for replicas in (number, 5, 1):
        opened.clear()
        resumed = partial(_resumed, checkpoint)
        given = [
            (r, replicas, shapes, exchange)
            for exchange in [_Replicas(replicas)]
            for r in range(replicas)
        ]
        with ThreadPoolExecutor(replicas) as threads:
            found = list(threads.map(lambda one, resumed=resumed: resumed(*one), given))
        for held, moments in found:
            for name, tensor in tensors.items():
                assert torch.equal(held[name], tensor) and torch.equal(moments[name], -tensor)
        assert len(set(opened)) == number and len(opened) < 2 * number, (replicas, len(opened))


# -- parameters that do not learn


def _partly_frozen():
    """A run of one rank as `CheckpointWriter` sees it; the second parameter does not learn."""
    held = {name: torch.nn.Parameter(torch.ones(5) * i) for i, name in enumerate("ab")}
    held["b"].requires_grad_(False)
    return SimpleNamespace(
        module=SimpleNamespace(canonical_parameters=held, canonical_buffers={}),
        backend=SimpleNamespace(
            optimizer=torch.optim.AdamW([held["a"]]), shards=lambda: _whole(held)
        ),
        stage=SimpleNamespace(replicas=1),
        comm=SimpleNamespace(rank=0, replica=0),
        graph=SimpleNamespace(world_size=1),
        average=None,
        global_steps=0,
        progress=lambda: {"counters": {}},
        memory_explained=lambda activity: contextlib.nullcontext(),
    )


def test_what_does_not_learn_is_on_the_disk_once_and_every_folder_is_whole(
    tmp_path, alone, monkeypatch
):
    """Of the checkpoints of a process; where the disk knows no second names it is written again."""
    monkeypatch.setattr("engine.checkpoint.together.topology_of", lambda engine: {})
    engine, folder = _partly_frozen(), tmp_path / "checkpoints"
    saver, frozen, kept = CheckpointWriter(folder, {}, Keep(2)), "rank-00000.frozen.safetensors", []

    def save():
        engine.global_steps += 1
        with torch.no_grad():
            engine.module.canonical_parameters["a"] += 1
        saver.save(engine, {})
        saver.finish()
        kept.append(folder / f"step-{engine.global_steps:08d}")
        return (kept[-1] / frozen).stat()

    first, second, third = save(), save(), save()
    assert first.st_ino == second.st_ino == third.st_ino and third.st_nlink == 2
    assert checkpoints_in(folder) == kept[:0:-1]
    copied = shutil.copytree(kept[2], tmp_path / "elsewhere" / kept[2].name)
    shutil.rmtree(kept[1])
    for checkpoint in (kept[2], copied):
        assert verify(checkpoint).ranks[0].stateless == ("a", "b")
        with CheckpointReader(checkpoint) as reader:
            assert reader.read("parameter", "a", (5,)).tolist() == [3.0] * 5
            assert reader.read("parameter", "b", (5,)).tolist() == [1.0] * 5
    assert json.loads((copied / MANIFEST).read_text())["version"] == 2

    def no_second_names(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", no_second_names)
        assert save().st_ino != third.st_ino
    shutil.rmtree(kept[3])  # by hand
    assert save().st_nlink == 1 and verify(kept[4])
    for damage, words in (
        (lambda: flip(kept[4], frozen, 0.9), f"{frozen} does not have the checksum"),
        (lambda: cut(kept[4], frozen, 0.5), f"{frozen} has .* bytes"),
        (lambda: (kept[4] / frozen).unlink(), f"{frozen} is missing"),
    ):
        damage()
        with pytest.raises(BrokenCheckpoint, match=words):
            verify(kept[4])


def test_where_all_learns_0_1_reads_what_is_written(folder):
    record = json.loads((folder / "step-00000002" / MANIFEST).read_text())
    assert record["version"] == 1 and all("frozen" not in rank for rank in record["ranks"])


def test_any_changed_character_of_a_manifest_is_seen(folder):
    file = folder / "step-00000002" / MANIFEST
    text, draw = file.read_text(), random.Random(1)
    meaning, refused = json.loads(text), 0
    for _ in range(300):
        where, character = draw.randrange(len(text)), draw.choice('0123456789abcdef"{}[],:. -')
        changed = text[:where] + character + text[where + 1 :]
        file.write_text(changed)
        try:
            read_manifest(file.parent)
            assert json.loads(changed) == meaning, (text[where], character, where)
        except BrokenCheckpoint:
            refused += 1
    assert refused > 200, "few characters may be changed without a change of meaning"


def test_every_element_must_be_there_once():
    def manifest(*fragments):
        ranks = tuple(RankRecord(0, "", tuple(of_rank), {}, (), {}) for of_rank in fragments)
        return Manifest(1, "", {}, {}, {}, ranks)

    def piece(offset, numel, shape=(2, 3)):
        return Fragment("parameter", "w", shape, offset, numel)

    manifest([piece(4, 2)], [piece(0, 4)], [])
    manifest([piece(0, 0, (0,))])
    for wrong in (
        [piece(0, 5)],
        [piece(1, 5)],
        [piece(0, 4), piece(3, 3)],
        [piece(0, 2), piece(4, 2)],
        [piece(0, 4), piece(4, 2, (3, 2))],
    ):
        for ranks in ([wrong], [[each] for each in wrong]):
            with refused("does not have the elements of parameter 'w' from"):
                manifest(*ranks)


# -- which ones stay


def test_which_ones_stay():
    assert Keep(3).goes([5, 10, 15, 20, 25]) == [5, 10]
    assert Keep(1).goes([25, 5]) == [5] and Keep(3).goes([5]) == [] == Keep(1).goes([])
    assert Keep(2, 10).goes([5, 10, 15, 20, 25, 30]) == [5, 15]
    # 35: the first after 30, though nothing was saved at 10 and 20
    assert Keep(1, 10).goes([5, 35, 36, 47, 48]) == [5, 36]
    # 132 and 231: the first at or after 100 and 200
    goes = Keep(1, 100).goes([33, 66, 99, 132, 165, 198, 231, 264])
    assert goes == [33, 66, 99, 165, 198]
    rule = "take whole numbers of at least 1"
    assert not_refused(Keep, [(0, None, rule), (3, 0, rule)]) == []


def test_what_stays_depends_on_nothing_but_the_steps_so_far():
    """Deleting after each save, as a run does, leaves what deleting once would."""
    draw = random.Random(2)
    for _ in range(200):
        keep, steps, there = Keep(draw.randint(1, 4), draw.choice([None, 1, 7, 50])), [], []
        for _ in range(30):
            steps.append((steps[-1] if steps else 0) + draw.randint(1, 20))
            there = sorted({*there, steps[-1]} - set(keep.goes([*there, steps[-1]])))
            assert there == sorted(set(steps) - set(keep.goes(steps)))
            assert set(steps[-keep.last :]) <= set(there)


def test_old_ones_are_deleted_and_broken_ones_do_not_count(tmp_path):
    for step in (1, 2, 3):
        write_small(tmp_path, step, Keep(3))
    flip(tmp_path / "step-00000002", MANIFEST, 0.5)
    write_small(tmp_path, 4, Keep(2))
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [4, 3]
    cut(tmp_path / "step-00000004", FIRST, 0.5)
    write_small(tmp_path, 5, Keep(2))
    # two whole ones, and a broken one between them
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [5, 4, 3]
    assert newest_of(checkpoints_in(tmp_path))[0] == tmp_path / "step-00000005"


def test_steps_that_were_undone_are_put_aside(tmp_path):
    """The run went on from step 1 although there were later ones, or because these are broken."""
    for step in (1, 2, 3):
        write_small(tmp_path, step)
    write_small(tmp_path, 2)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    aside = [f"step-0000000{step}.set-aside" for step in (2, 3)]
    assert names == ["latest", "step-00000001", "step-00000002", *aside]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    write_small(tmp_path, 2)
    assert verify(tmp_path / "step-00000002.set-aside-2").step == 2


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    """The one that came last goes on; what the other has half written does not count, and nothing
    is put aside or deleted."""
    write_small(tmp_path, 1)
    first = claim(tmp_path)
    refuse_other_owner(tmp_path, first)
    second = claim(tmp_path)
    refuse_other_owner(tmp_path, second)
    with refused(f"process {os.getpid()} of … has begun to write checkpoints here"):
        refuse_other_owner(tmp_path, first)
    with refused("has begun to write checkpoints here"):
        write_small(tmp_path, 1, owner=first)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000001", "step-00000001.writing"]
    assert verify(write_small(tmp_path, 2, owner=second)).step == 2


def test_storage_that_does_not_answer_is_no_broken_checkpoint(tmp_path, monkeypatch):
    """Else an older one would be taken for the newest, and this one put aside."""
    for step in (1, 2):
        write_small(tmp_path, step)
    for number in (errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM):

        def gone(file, number=number):
            raise OSError(number, os.strerror(number), str(file))

        monkeypatch.setattr(layout, "checksum_of_file", gone)
        with pytest.raises(OSError, match="start again when the storage answers") as error:
            newest_of(checkpoints_in(tmp_path))
        assert error.value.errno == number


# -- disks that are full, processes that are killed


def test_a_disk_without_room_is_seen_before_writing(tmp_path):
    assert too_little_room(tmp_path, 0) is None
    assert "it takes 1,048,576.0 GiB, and the disk of" in too_little_room(tmp_path, 2**50)


def written_by_one_rank(folder, numel, **progress):
    make_folder(folder, 3)
    tensors = {Fragment("parameter", "w", (numel,), 0, numel): torch.zeros(numel)}
    write_rank(writing_folder(folder, 3), 0, tensors, {}, (), progress)


@pytest.mark.parametrize("numel, padding", [(1_000_000, 0), (1000, 200_000)])
def test_a_file_that_cannot_be_written_to_its_end_leaves_no_tensors(folder, numel, padding):
    """That of the tensors, or the marker."""
    with largest_file(100_000), pytest.raises(Exception, match="File too large"):
        written_by_one_rank(folder, numel, padding="x" * padding)
    there = list(writing_folder(folder, 3).iterdir())
    assert sum(path.stat().st_size for path in there) <= 100_000
    assert not [path for path in there if path.suffix == ".safetensors"]
    assert newest_of(checkpoints_in(folder)) == (folder / "step-00000002", [])


def test_a_disk_that_gives_back_something_else_is_seen(tmp_path, monkeypatch):
    """One bit, before the checkpoint counts: wherever it was lost on the way to the disk."""
    save = writing.save_file
    for name, broken in (
        ("flush", lambda file, **_: flip(file.parent, file.name, 1)),
        ("save_file", lambda own, file: (save(own, file), flip(file.parent, file.name, 1))),
    ):
        with monkeypatch.context() as patched, pytest.raises(BrokenCheckpoint, match=FIRST):
            patched.setattr(writing, name, broken)
            written_by_one_rank(tmp_path, 3)
    assert list(writing_folder(tmp_path, 3).iterdir()) == []


def test_a_disk_that_is_full(tmp_path):
    """A real one, of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        write_small(disk, 1)
        write_small(disk, 2)
        with pytest.raises(Exception, match="No space left on device"):
            written_by_one_rank(disk, 1_000_000)
        assert list(writing_folder(disk, 3).iterdir()) == []
        assert newest_of(checkpoints_in(disk)) == (disk / "step-00000002", [])
        assert verify(disk / "step-00000001").step == 1
        assert re.search(
            r"it takes 1 B, and .* has [\d.,]+ ([KM]i)?B left", too_little_room(disk, 1)
        )
        assert verify(write_small(disk, 3)).step == 3
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_writer_killed_before_any_of_its_operations_leaves_nothing_broken(tmp_path):
    """Each in turn, to the deletion of the oldest: what has a checkpoint's name is whole, and the
    next process goes on in the same folder."""
    newest = []
    for operation in itertools.count():
        folder = tmp_path / str(operation)
        write_small(folder, 1)
        write_small(folder, 2)
        status = write_until(folder, 3, operation)
        there = checkpoints_in(folder)
        assert all(verify(path).step == step_of(path) for path in there), operation
        newest.append(step_of(there[0]))
        newest_name = (folder / "latest").read_text().strip()
        assert len(there) >= 2 and newest_name in [path.name for path in there]
        verify(write_small(folder, 4, Keep(2)))
        left = {path.name for path in folder.iterdir()}
        assert left == {"latest", *(f"step-0000000{step}" for step in (newest[-1], 4))}
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert newest == sorted(newest) and newest.count(2) > 10 and newest.count(3) > 5


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """A dozen kills and more, until some have left a checkpoint unfinished; each next process goes
    on in the same folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    draw, kills, counted, interrupted = random.Random(3), 0, 0, 0
    while kills < 12 or interrupted < 5:
        kills += 1
        assert kills < 200, f"{interrupted} kills while a checkpoint was written"
        receiver, sender = context.Pipe(duplex=False)
        arguments = (tmp_path, counted + 1, sender)
        writer = context.Process(target=write_for_ever, args=arguments, daemon=True)
        writer.start()
        sender.close()
        assert receiver.poll(120)  # ends what hangs
        counted = receiver.recv()
        time.sleep(draw.uniform(0, 0.1))
        writer.kill()
        writer.join()
        while receiver.poll():
            try:
                counted = receiver.recv()
            except EOFError:
                break
        checkpoint, broken = newest_of(checkpoints_in(tmp_path))
        # the last it reported, or one whose report was cut off
        assert broken == [] and step_of(checkpoint) in (counted, counted + 1)
        assert all(verify(path) for path in checkpoints_in(tmp_path))
        interrupted += any(path.name.endswith(".writing") for path in tmp_path.iterdir())
        counted = step_of(checkpoint)
        with CheckpointReader(checkpoint) as reader:
            bias = reader.read("parameter", "text.bias", (7,))
        assert torch.equal(bias, TENSORS["text.bias"] + counted)
