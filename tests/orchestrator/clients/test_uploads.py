"""Uploads to a service: only what it lacks, checked there, all of it or nothing."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
from served_ledger import Served, requests_of

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import FILE, Bundle, Entry
from orc.launchers.spec import LoadedJob
from orc.orchestrator.clients.service import ServiceClient

Project = Callable[..., LoadedJob]
API = "/api/v1"


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {served.tokens['grace']}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=60) as made:
        yield made


@pytest.fixture
def asked(served: Served) -> Iterator[tuple[ServiceClient, list[str]]]:
    """A client, and the requests that it sends."""
    with served.client() as client:
        yield client, requests_of(client)


def _framed(*contents: tuple[str, bytes]) -> bytes:
    return b"orc-contents 1\n" + b"".join(f"{h} {len(d)}\n".encode() + d for h, d in contents) + b"end\n"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _stored(served: Served) -> set[str]:
    found = {path.name for path in (served.state_dir / "store" / "cas").glob("*")}
    assert not list((served.state_dir / "store" / "tmp").glob("upload*"))
    return found


def test_only_what_is_missing_is_sent_and_unchanged_code_costs_one_request(served, asked, project, tmp_path):
    client, sent = asked
    loaded = project()
    (loaded.base_dir / "data.bin").write_bytes(b"x" * 150_000)
    (loaded.base_dir / "more.bin").write_bytes(b"y" * 150_000)  # one upload takes 200,000 bytes: two streams
    first = client.submit(loaded)
    assert [one.partition("/trees/")[0] for one in sent] == [
        "POST /jobs",
        "POST /bundles/missing",
        "PUT /bundles/content",
        "PUT /bundles/content",
        "PUT /bundles",
        "POST /jobs",
    ]
    sent.clear()
    second = client.submit(loaded)
    assert sent == ["POST /jobs"]
    assert second.id != first.id
    before = _stored(served)
    (loaded.base_dir / "train.py").write_text("print('changed')\n")
    client.submit(loaded)
    assert len(_stored(served) - before) == 1
    (loaded.base_dir / "huge.bin").write_bytes(b"z" * 300_000)
    with pytest.raises(BundleError, match="300000 bytes is more than the service takes") as refused:
        client.submit(loaded)
    assert refused.value.where == "huge.bin"
    client.cancel([first.id, second.id], grace_s=0)


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"what is this\n",
        _framed((_sha(b"good"), b"good"))[:-4],
        _framed((_sha(b"good"), b"good"), (_sha(b"other"), b"wrong")),
        _framed((_sha(b"good"), b"good"), ("../../../etc/passwd", b"x")),
        _framed((_sha(b"good"), b"good"), (_sha(b"good"), b"good")),
        _framed((_sha(b"good"), b"good")) + b"more",
        b"orc-contents 1\n" + b"a" * 100_000,
        b"orc-contents 1\n" + _sha(b"good").encode() + b" -4\ngoodend\n",
        gzip.compress(_framed((_sha(bytes(1 << 20)), bytes(1 << 20)))),  # five times what an upload may have
    ],
    ids=["empty", "foreign", "cut-off", "wrong-content", "a-path", "twice", "goes-on", "long-line", "negative", "gzip"],
)
def test_a_stream_that_is_not_whole_and_right_leaves_nothing(served, http, stream):
    before = _stored(served)
    answer = http.put(f"{API}/bundles/content", content=stream)
    assert answer.status_code in (409, 422), answer.text
    assert answer.json()["error"]["what"]
    assert _stored(served) == before


def test_an_upload_that_is_larger_than_allowed_is_refused_before_it_is_read(served):
    head = f"PUT {API}/bundles/content HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 30}\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), timeout=60) as line:
        line.sendall(f"{head}Authorization: Bearer {served.tokens['grace']}\r\n\r\n".encode())
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", "with\nline", ""])
def test_a_manifest_with_a_path_that_leaves_the_tree_is_refused(served, http, path):
    entry = {"path": path, "mode": "0644", "sha256": _sha(b""), "size": 0}
    digest = hashlib.sha256(f"orc-tree 1\n644 {_sha(b'')} 0 {path}\0".encode()).hexdigest()
    manifest = {"format": 1, "digest": digest, "entries": [entry]}
    answer = http.put(f"{API}/bundles/trees/{digest}", content=json.dumps(manifest))
    assert answer.status_code == 422
    assert not (served.state_dir / "store" / "trees" / f"{digest}.json").exists()


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("link", "/etc/passwd"),
        ("link", "../../../etc/passwd"),
        ("a/link", "../../out"),
        ("link", "link"),
        ("link", "a\0b"),
        ("link", ""),
    ],
)
def test_a_link_that_leads_out_of_its_tree_or_nowhere_is_refused(served, http, path, target):
    entries = [Entry("file", FILE, _sha(b""), 0).to_dict(), Entry.link(path, target).to_dict()]
    digest = "a" * 64
    answer = http.put(
        f"{API}/bundles/trees/{digest}", content=json.dumps({"format": 1, "digest": digest, "entries": entries})
    )
    assert answer.status_code == 422
    assert "another tree" not in answer.text, "it is refused for what it is, and not for its digest"
    assert not (served.state_dir / "store" / "trees" / f"{digest}.json").exists()


def test_a_manifest_makes_a_tree_once_its_contents_are_there(served, http):
    data = b"a content of its own"
    bundle = Bundle.of([Entry("a/b.txt", FILE, _sha(data), len(data))])
    send = lambda: http.put(f"{API}/bundles/trees/{bundle.digest}", content=json.dumps(bundle.to_dict())).json()  # noqa: E731
    assert send()["missing"] == [_sha(data)]
    assert http.put(f"{API}/bundles/content", content=_framed((_sha(data), data))).json() == {"contents": 1}
    assert http.post(f"{API}/bundles/missing", json={"hashes": [_sha(data)]}).json()["missing"] == []
    assert send()["missing"] == []
    assert (served.state_dir / "store" / "trees" / bundle.digest / "a" / "b.txt").read_bytes() == data
    theirs = {"Authorization": f"Bearer {served.tokens['alan']}"}  # who knows all digests, and has nothing
    for _ in range(2):
        answer = http.put(f"{API}/bundles/trees/{bundle.digest}", content=json.dumps(bundle.to_dict()), headers=theirs)
        assert answer.json()["missing"] == [_sha(data)]
        asked = http.post(f"{API}/bundles/missing", json={"hashes": [_sha(data), "0" * 64]}, headers=theirs).json()
        assert asked["missing"] == [_sha(data), "0" * 64], "nobody is told what others have"
    http.put(f"{API}/bundles/content", content=_framed((_sha(data), data)), headers=theirs).raise_for_status()
    assert http.put(answer.url, content=json.dumps(bundle.to_dict()), headers=theirs).json()["missing"] == []
    other = http.put(f"{API}/bundles/trees/{'0' * 64}", content=json.dumps(bundle.to_dict()))
    assert other.status_code == 422
