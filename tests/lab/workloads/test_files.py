from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest

from aiops.lab.workloads import DamagedData, DataUnavailable, files
from aiops.lab.workloads.files import RemoteFile, download, folders, unavailable
from tests.lab.workloads.conftest import Site


def read_good(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(b"good"):
        raise DamagedData(path, f"it begins with {content[:4]!r}")
    return content


def remote(*mirrors: str, limit: int = 1000) -> RemoteFile:
    return RemoteFile("toys", "toys.bin", mirrors, limit)


def test_folders_are_the_shared_one_then_the_cache(
    monkeypatch: pytest.MonkeyPatch, default_cache: Path, tmp_path: Path
) -> None:
    assert folders("toys") == (default_cache / "toys",)
    assert folders("toys", tmp_path) == (tmp_path / "toys",)
    monkeypatch.setenv("AIOPS_DATA", "/srv/data")
    assert folders("toys") == (Path("/srv/data/toys"), default_cache / "toys")


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPS_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/ada")
    assert folders("toys") == (Path("/home/ada/.cache/aiops/data/toys"),)


def test_a_download_is_read_and_kept(site: Site, tmp_path: Path) -> None:
    site.pages["/base/toys.bin"] = b"good toys"
    place = tmp_path / "new" / "folder"
    assert download(remote(f"{site.url}/base/"), read_good, [place]) == b"good toys"
    assert [path.name for path in place.iterdir()] == ["toys.bin"]
    assert (place / "toys.bin").read_bytes() == b"good toys"


def test_the_next_mirror_is_asked_after_every_kind_of_failure(site: Site, tmp_path: Path) -> None:
    site.pages |= {
        "/bad/toys.bin": b"evil toys",
        "/cut/toys.bin": b"good",
        "/long/toys.bin": b"good" * 1000,
        "/fine/toys.bin": b"good toys",
    }
    site.promised["/cut/toys.bin"] = 900
    mirrors = [f"{site.url}/{name}" for name in ("none", "bad", "cut", "long", "fine", "spare")]
    assert download(remote(*mirrors), read_good, [tmp_path]) == b"good toys"
    asked = ["/none/", "/bad/", "/cut/", "/long/", "/fine/"]
    assert site.asked == [f"{folder}toys.bin" for folder in asked]
    assert [path.name for path in tmp_path.iterdir()] == ["toys.bin"]


def test_a_mirror_that_stays_silent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        mute = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DataUnavailable, match=f"{mute}/toys.bin: .*timed out"):
            download(remote(mute), read_good, [tmp_path])


@pytest.mark.parametrize(
    ("body", "promised", "reason"),
    [
        (None, None, "HTTP Error 404"),
        (b"evil", None, "it begins with b'evil'"),
        (b"good", 900, r"broke off after 4 of 900 bytes|IncompleteRead"),
        (b"good" * 300, None, "more than the 1,000 bytes"),
    ],
)
def test_a_failure_says_why_and_leaves_nothing_behind(
    site: Site, tmp_path: Path, body: bytes | None, promised: int | None, reason: str
) -> None:
    if body is not None:
        site.pages["/toys.bin"] = body
    if promised is not None:
        site.promised["/toys.bin"] = promised
    with pytest.raises(DataUnavailable, match=reason) as caught:
        download(remote(site.url), read_good, [tmp_path])
    assert f"{site.url}/toys.bin: " in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    del caught
    gc.collect()  # a connection left open would be an error here


def test_offline_the_error_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
    mirrors = [f"http://127.0.0.1:{port}/{name}" for name in ("one", "two")]
    shared, cache = tmp_path / "shared", tmp_path / "cache"
    with pytest.raises(DataUnavailable) as caught:
        download(remote(*mirrors), read_good, [shared, cache])
    text = str(caught.value)
    for mirror in mirrors:
        assert f"{mirror}/toys.bin: <urlopen error" in text
    assert f"toys.bin is not in {shared} or {cache}" in text
    assert f"put it into {cache}, or set AIOPS_DATA to a folder that holds toys/toys.bin" in text
    assert "'digits' comes with the package" in text
    assert caught.value.details["looked"] == [str(shared), str(cache)]


def test_a_mirror_that_is_no_url_is_a_failure_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match=r"nowhere/toys\.bin: unknown url type"):
        download(remote("nowhere"), read_good, [tmp_path])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, site: Site) -> None:
    site.pages["/toys.bin"] = b"good toys"
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(DataUnavailable, match=f"cannot write to {tmp_path / 'file'}"):
        download(remote(site.url), read_good, [tmp_path / "file"])


def test_unavailable_carries_its_facts() -> None:
    error = unavailable(remote(), [Path("/a"), Path("/b")], "the dog ate it")
    assert error.details == {"dataset": "toys", "file": "toys.bin", "looked": ["/a", "/b"]}
