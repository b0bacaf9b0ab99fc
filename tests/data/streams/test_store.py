"""Bytes of real servers, with all that may go wrong on the way."""

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import Faults, http_server, put, s3_server
from stream_shards import write_shards

from data.formats.objects import object_at
from data.formats.shards import expand
from data.formats.store import (
    Unexpected,
    fetch,
    identity_of,
    listed,
    open_file,
    read_range,
    read_small,
)
from data.identity import Identity
from data.index.sources import open_source
from data.streams.opening import open_stream

ROOT = Path(__file__).resolve().parents[3]
CONTENT = np.random.default_rng(0).bytes(3_000_000)
SHORT_S = 60  # for a busy machine; nothing here waits so long


@pytest.fixture(scope="module")
def s3():
    faults = Faults()
    with s3_server(faults) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        put(variables, "bucket/some folder/a.tar", CONTENT)
        yield variables, faults


@pytest.fixture
def served(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.tar").write_bytes(CONTENT)
    return folder


def fetched(address: str, folder: Path, limit_s: float = SHORT_S) -> bytes:
    part = folder / "part"
    assert fetch(address, part, limit_s).size == part.stat().st_size
    assert sorted(folder.glob("part*")) == [part]  # nothing beside it
    return part.read_bytes()


def test_a_download_goes_on_from_the_byte_it_has(served, tmp_path, s3):
    for faults in (
        Faults(seed=3, resets=0.5, cuts=0.3, most=6),
        Faults(resets=1, most=2),
        Faults(refusals=1, most=2),
        Faults(refusals=1, status=429, most=2),
    ):
        with http_server(served, faults) as url:
            assert fetched(f"{url}/a.tar", tmp_path) == CONTENT, vars(faults)
        assert faults.done and len(faults.requests) > faults.done, vars(faults)
        # of each connection that broke, less than it takes to send all again
        assert faults.sent < len(CONTENT) + faults.done * 500_000, vars(faults)
        (tmp_path / "part").unlink()
    _, faults = s3
    faults.cuts, faults.most = 1, 2
    assert fetched("s3://bucket/some folder/a.tar", tmp_path) == CONTENT
    assert faults.done == 2


def test_a_new_process_goes_on_unless_the_object_has_changed(served, tmp_path):
    part, beside = tmp_path / "part", tmp_path / "part.of"
    faults = Faults(resets=1)
    with http_server(served, faults) as url:
        address = f"{url}/a.tar"
        with pytest.raises(OSError, match="check the network"):
            fetch(address, part, limit_s=0)
        assert part.read_bytes() == CONTENT[: part.stat().st_size]
        assert json.loads(beside.read_text())["size"] == len(CONTENT)
        faults.resets = 0
        part.write_bytes(CONTENT[:1_000_000])
        assert fetched(address, tmp_path) == CONTENT
        assert faults.requests[-1] == "GET /a.tar 1000000-"

        known = identity_of(address)
        for there, recorded, request in (
            (CONTENT, known, "GET /a.tar 2999999-"),  # whole, and nobody knew
            (CONTENT + b"more", known, "GET /a.tar 2999999-"),
            (bytes(100), Identity(known.size, etag='"another"'), "GET /a.tar"),
            (bytes(100), None, "GET /a.tar"),
            (
                bytes(5_000_000),
                Identity(5_000_000, etag=known.etag),
                "GET /a.tar",
            ),  # shorter by now
        ):
            part.write_bytes(there)
            if recorded:
                beside.write_text(json.dumps(vars(recorded)))
            assert fetched(address, tmp_path) == CONTENT, recorded
            assert faults.requests[-1] == request, recorded
        # what is at an address may have no byte
        (served / "a.tar").write_bytes(b"")
        assert fetched(address, tmp_path) == b"" and identity_of(address).size == 0


def test_servers_without_ranges_or_etags(served, tmp_path):
    with http_server(served, faults := Faults(ranges=False, cuts=1, most=2)) as url:
        assert fetched(f"{url}/a.tar", tmp_path) == CONTENT
        assert read_range(f"{url}/a.tar", 5, 10) == CONTENT[5:10]
    (tmp_path / "part").unlink()
    with http_server(served, faults := Faults(etag="", cuts=1, most=2)) as url:
        assert fetched(f"{url}/a.tar", tmp_path) == CONTENT
        assert faults.sent < 2 * len(CONTENT) and faults.requests[-1].endswith("-")


def test_a_server_without_ranges_gives_each_file_once(served, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    with http_server(served, faults := Faults(ranges=False)) as url:
        with open_file(f"{url}/a.tar", block=1000) as file:
            for start in (2_999_990, 5, 1_000_000):
                file.seek(start)
                assert file.read(10) == CONTENT[start : start + 10]
        whole = [each for each in faults.requests if each == "GET /a.tar"]
        assert len(whole) == 1  # beside the range that was not answered
        assert not any((tmp_path / "cache").rglob("*"))
        read_range(f"{url}/a.tar", 0, 9)
    assert caplog.text.count("answers no ranges") == 1
    with http_server(served, Faults(ranges=False, no_head=True)) as url:
        assert identity_of(f"{url}/a.tar").size == len(CONTENT)


def test_no_more_is_read_than_was_announced(served, tmp_path):
    with http_server(served, faults := Faults()) as url:
        announced = identity_of(f"{url}/a.tar")
        faults.more = 256 << 20

        def check(stored: Identity) -> None:
            if stored != announced:
                raise Unexpected(f"{stored.size} bytes")

        with pytest.raises(
            Unexpected, match="a.tar: sends more than the 5 bytes that it announced"
        ):
            read_range(f"{url}/a.tar", 5, 10)
        with pytest.raises(Unexpected, match=f"^{len(CONTENT) + faults.more} bytes"):
            fetch(f"{url}/a.tar", tmp_path / "part", SHORT_S, check)
        assert not (tmp_path / "part").exists()
        assert faults.sent < 64 << 20  # what was on its way


def test_a_page_of_a_server_is_one_sentence(served, monkeypatch):
    page = "<!DOCTYPE html><html><head><title>Not here</title></head><body>" + "words " * 1000
    with http_server(served, Faults(page=page)) as url:
        with pytest.raises(FileNotFoundError, match=r"\(Not here\); check the address") as caught:
            read_range(f"{url}/b.tar", 0, 5)
        assert "<" not in str(caught.value) and len(str(caught.value)) < 400


def test_bytes_that_are_not_those_of_the_etag_are_fetched_once_more(tmp_path, served, s3):
    _, faults = s3
    for wrong in (1, 2):  # each has another wrong byte than the next, or none
        faults.flips, faults.done, faults.most = 1, 0, wrong
        before = len(faults.requests)
        assert fetched("s3://bucket/some folder/a.tar", tmp_path) == CONTENT
        assert len(faults.requests) == before + wrong + 1
    faults.flips = 0
    # an etag that looks like an md5 and is none costs one download, of the first file alone
    (served / "b.tar").write_bytes(CONTENT)
    with http_server(served, other := Faults(etag='"' + 32 * "0" + '"')) as url:
        assert fetched(f"{url}/a.tar", tmp_path) == fetched(f"{url}/b.tar", tmp_path) == CONTENT
    assert other.requests == ["GET /a.tar", "GET /a.tar", "GET /b.tar"]


def test_a_store_that_is_gone_is_waited_for(served, tmp_path):
    with http_server(served, faults := Faults(bytes_per_s=1_000_000)) as url:
        results: list[bytes] = []
        thread = threading.Thread(
            target=lambda: results.append(fetched(f"{url}/a.tar", tmp_path)), daemon=True
        )
        thread.start()
        while not faults.sent:
            time.sleep(0.01)
        with faults.gone(), pytest.raises(OSError, match="refused.*check the network"):
            read_range(f"{url}/a.tar", 0, 5, limit_s=0.3)
        faults.bytes_per_s = 0
        thread.join()
        assert results == [CONTENT] and len(faults.requests) > 1


def test_what_will_not_pass_is_an_error_at_once(served, tmp_path, s3, monkeypatch):
    """With no limit to the waiting."""
    with http_server(served, Faults(refusals=1, status=403)) as url:
        web = url.replace("//", "//me:password@")
        for address, kind, words in (
            ("s3://bucket/none.tar", FileNotFoundError, "check the address"),
            ("s3://no-bucket/a.tar", FileNotFoundError, "s3://no-bucket/a.tar"),
            ("s3://bucket/x//a.tar", OSError, "an empty part"),
            (f"{web}/a.tar?Signature=secret", PermissionError, "credentials"),
            (f"http://me:password@{'x' * 20}.invalid/a.tar", OSError, "known"),
            ("http://a b/c", OSError, "domain"),
            ("what://a/b.tar", OSError, "what"),
            (str(tmp_path), OSError, "no file|directory"),
            (str(tmp_path / "none"), FileNotFoundError, "none"),
        ):
            for ask in (identity_of, lambda a, limit: fetch(a, tmp_path / "part", limit)):
                with pytest.raises(kind, match=words) as caught:
                    ask(address, float("inf"))
                assert "secret" not in str(caught.value), address
                assert "password" not in str(caught.value), address
            with pytest.raises(kind, match=words):
                read_range(address, 0, 5, float("inf"))
    with pytest.raises(OSError, match="cannot be listed"):
        listed(f"{url}/*.tar")
    with pytest.raises(FileNotFoundError, match="named like"):
        listed("s3://bucket/*.parquet")


def test_redirects_are_bounded(monkeypatch):
    """One that leads in a circle was asked again for ten minutes; one of an encrypted address does
    not lead to a service that is asked without encryption, such as those of this machine. Others
    are followed."""
    asked = []

    class Circle(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/there":
                self.send_response(200)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"here" if self.command == "GET" else b"")
                return
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/there" if self.path == "/moved" else self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Circle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for ask in (lambda *of: read_small(of[0], 10, of[1]), identity_of):
            with pytest.raises(OSError, match="leads in a circle"):
                ask(f"http://127.0.0.1:{server.server_port}/a.tar", float("inf"))
        assert 2 <= len(asked) <= 2 * 11  # as many as obstore follows
        moved = f"http://127.0.0.1:{server.server_port}/moved"
        assert read_small(moved, 10, float("inf")) == b"here" and asked[-1] == "/moved"
        server.shutdown()

    allowed = {}
    monkeypatch.setattr(
        "obstore.store.HTTPStore",
        lambda url, client_options, **how: allowed.update({url: client_options["allow_http"]}),
    )
    for address in ("https://redirects.invalid", "http://redirects.invalid"):
        object_at(f"{address}/a.tar")
    assert allowed == {"https://redirects.invalid": False, "http://redirects.invalid": True}


def test_a_user_and_a_password(served, tmp_path):
    with http_server(served, Faults(user="me@home:a/b")) as url:
        address = url.replace("//", "//me%40home:a%2Fb@")
        assert fetched(f"{address}/a.tar?some=words", tmp_path) == CONTENT
        with pytest.raises(PermissionError, match="credentials"):
            identity_of(f"{url}/a.tar", float("inf"))


def test_names(s3, tmp_path):
    variables, _ = s3
    memory = fsspec.filesystem("memory")
    for name in ("0.tar", "1.tar", "10.tar", "x/2.tar", "y/2.tar", "y/z/2.tar", "1.txt"):
        put(variables, f"names/in a/{name}", b"")
        memory.pipe_file(f"/in a/{name}", b"")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for root in ("s3://names/in a", "memory://in a", f"file://{tmp_path}"):
        for pattern, wanted in (
            ("*.tar", ["0.tar", "1.tar", "10.tar"]),
            ("?.t*", ["0.tar", "1.tar", "1.txt"]),
            ("*/*.tar", ["x/2.tar", "y/2.tar"]),
            ("y/z/?.tar", ["y/z/2.tar"]),
        ):
            found = listed(f"{root}/{pattern}")
            assert [each.partition("in a/")[2] or each for each in found] == (
                wanted if "file:" not in root else [f"{root}/{each}" for each in wanted]
            ), (root, pattern)
            assert [identity_of(each).size for each in found] == [0] * len(found)


def test_keys_with_empty_parts_are_passed_over(s3, caplog, monkeypatch):
    """obstore ends a listing at the first of them."""
    for name in ("0.tar", "/1.tar", "x//2.tar", "x/3.tar", "4.tar"):
        put(s3[0], f"slashes/in/{name}", b"")
    for pattern, wanted in (("*.tar", ["0.tar", "4.tar"]), ("*/*.tar", ["x/3.tar"])):
        caplog.clear()
        found = listed(f"s3://slashes/in/{pattern}")
        assert found == [f"s3://slashes/in/{name}" for name in wanted]
        assert caplog.text.count("passed over") == 1 and "in//" in caplog.text
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr("data.formats.objects.can_list", lambda root: False)
    with pytest.raises(OSError, match="in//.*install boto3") as caught:
        listed("s3://slashes/in/*.tar")
    assert "\n" not in str(caught.value)


def test_names_that_obstore_reads_as_others_are_refused(s3, served):
    """It takes `/1.tar` for `1.tar`."""
    put(s3[0], "empty-parts//1.tar", b"one")
    put(s3[0], "empty-parts/1.tar", b"another")
    asked = ["s3://empty-parts//1.tar", "s3://empty-parts/./1.tar", "s3://empty-parts//*.tar"]
    for spec in (f"{kind}:{name}" for kind in ("stream", "webdataset") for name in asked):
        with pytest.raises(OSError, match="an empty part.*; rename") as caught:
            open_source(spec) if spec[0] == "w" else open_stream(spec)
        assert "\n" not in str(caught.value)
    with http_server(served) as url, pytest.raises(OSError, match="an empty part"):
        identity_of(f"{url}/a//b.tar")


def test_every_kind_of_shards_takes_patterns_of_remote_names(s3, served, tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    pattern = write_shards(served, [3, 2, 4], sizes=False)
    for name in expand("webdataset", f"{served}/{pattern}", ""):
        put(s3[0], f"listed/in/{Path(name).name}", Path(name).read_bytes())
    for wanted, number in (("*", 9), ("0000[01]", 0), ("0000?", 9), ("*1", 2)):
        for open_one in (open_source, lambda spec: open_stream(f"stream{spec[10:]}")[0]):
            if number:
                assert len(open_one(f"webdataset:s3://listed/in/{wanted}.tar")) == number
            else:  # there are no ranges of characters, as in the names of a store
                with pytest.raises(FileNotFoundError):
                    open_one(f"webdataset:s3://listed/in/{wanted}.tar")
    with http_server(served) as url:
        assert len(open_source(f"webdataset:{url}/{pattern}")) == 9
        with pytest.raises(OSError, match="cannot be listed; write {000..012}"):
            open_source(f"webdataset:{url}/*.tar")
        # a query, with which addresses are signed
        assert len(open_source(f"webdataset:{url}/00001.tar?signed=1")) == 2


def test_open_files(s3, served, tmp_path):
    """As Python's own, for libraries that read from any place."""
    variables, faults = s3
    table = pa.table({"number": list(range(100_000))})
    pq.write_table(table, served / "b.parquet", row_group_size=20_000)
    with tarfile.open(served / "c.tar", "w") as tar:
        for number in range(100):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = number * 100
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    put(variables, "bucket/b.parquet", (served / "b.parquet").read_bytes())
    fsspec.filesystem("memory").pipe_file("/b.parquet", (served / "b.parquet").read_bytes())
    chance = np.random.default_rng(0)
    with http_server(served) as url:
        for root in (url, "s3://bucket", "memory://", str(served)):
            with open_file(f"{root}/b.parquet", block=1 << 16) as file:
                assert pq.read_table(file).equals(table), root
        with open_file(f"{url}/c.tar", block=1 << 12) as file, tarfile.open(fileobj=file) as tar:
            assert [member.size for member in tar] == [100 * number for number in range(100)]
        with open_file(f"{url}/a.tar", block=1000) as file:
            assert file.seek(0, io.SEEK_END) == len(CONTENT) and file.read(5) == b""
            for start, size in chance.integers(0, (len(CONTENT) - 5000, 5000), (50, 2)).tolist():
                file.seek(start)
                assert file.read(size) == CONTENT[start : start + size]
        assert read_range(f"{url}/a.tar", 2_999_990, 4_000_000) == CONTENT[2_999_990:]
        assert read_range(f"{url}/a.tar", 7, 7) == b""


def test_addresses_of_other_libraries(served, tmp_path):
    """Also these go on from the byte they have."""
    fsspec.filesystem("memory").pipe_file("/a.tar", CONTENT)
    for address in ("memory://a.tar", str(served / "a.tar"), f"file://{served}/a.tar"):
        stored = identity_of(address)
        (tmp_path / "part").write_bytes(b"x" * 10)
        (tmp_path / "part.of").write_text(json.dumps(vars(stored)))
        assert fetched(address, tmp_path) == b"x" * 10 + CONTENT[10:]
        assert read_range(address, 10, 20) == CONTENT[10:20]


def test_profiles_of_aws_and_public_buckets(s3, tmp_path, monkeypatch):
    variables, _ = s3
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = mine\naws_secret_access_key = secret\n"
    )
    (tmp_path / "config").write_text(
        f"[profile mine]\nregion = eu-west-1\nendpoint_url = {variables['AWS_ENDPOINT_URL']}\n"
    )
    for name in variables:
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        patch.setenv("AWS_PROFILE", "mine")
        assert read_range("s3://bucket/some folder/a.tar", 0, 9) == CONTENT[:9]
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", variables["AWS_ENDPOINT_URL"])
    with pytest.raises(PermissionError, match="AWS_ACCESS_KEY_ID"):  # this bucket is not public
        read_range("s3://bucket/some folder/a.tar", 0, 9)


FORKED = """
import os, signal, sys
from data.formats.store import identity_of
def child(address):
    if not (pid := os.fork()):
        signal.alarm(60)
        try:
            print(identity_of(address).size, flush=True)
        except OSError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
child(sys.argv[1])
print(identity_of(sys.argv[1]).size, flush=True)
child(sys.argv[1])
"""


def test_a_forked_process_asks_or_says_why_not(served):
    with http_server(served) as url:
        said = subprocess.run(
            [sys.executable, "-c", FORKED, f"{url}/a.tar"],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
        )
    first, own, second = said.stdout.splitlines()
    assert first == own == str(len(CONTENT)) and "fork" in second, said
