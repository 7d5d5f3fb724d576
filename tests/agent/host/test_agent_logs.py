"""Reading what a command writes: offsets that stay right over rotation, tails, and following to the end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.agent.host.logs import read, read_piece, tail_offset
from bursar.agent.shim.output import OutputFile


async def text(folder: Path, **how: int) -> bytes:
    return b"".join([piece.data async for piece in read(folder, **how)])  # type: ignore[arg-type]


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, *pieces: bytes, bytes_max: int) -> OutputFile:
    monkeypatch.chdir(folder)
    output = OutputFile(bytes_max)
    for piece in pieces:
        output.write(piece)
    return output


async def test_an_offset_means_the_same_byte_after_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch, b"0123456789" * 4, bytes_max=16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.16", "output.32"]
    assert await text(tmp_path) == b"678901234567890123456789"
    assert await text(tmp_path, offset=35) == b"56789"
    assert await text(tmp_path, offset=40) == b""
    piece = read_piece(tmp_path, 3)
    assert piece is not None
    assert piece.offset == 16


@given(lines=st.lists(st.text("ab", max_size=5), max_size=30), ended=st.booleans(), wanted=st.integers(1, 12))
def test_the_last_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[str], ended: bool, wanted: int) -> None:
    folder = tmp_path_factory.mktemp("tail")
    data = "\n".join(lines).encode() + b"\n" * (ended and bool(lines))
    with pytest.MonkeyPatch.context() as patch:
        write(folder, patch, data, bytes_max=1000)
    assert data[tail_offset(folder, wanted) :].splitlines() == data.splitlines()[-wanted:]


async def test_the_last_lines_over_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch, b"".join(b"line %02d\n" % n for n in range(10)), bytes_max=20)
    assert await text(tmp_path, tail_lines=3) == b"line 07\nline 08\nline 09\n"
    assert (await text(tmp_path, tail_lines=100)).endswith(b"line 08\nline 09\n")


def test_only_the_end_is_read_for_the_last_lines(tmp_path: Path) -> None:
    """Of a file without lines that is larger than anybody could read."""
    with (tmp_path / "output.0").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\none\n" + b"x" * 200_000 + b"\nthree")
    assert tail_offset(tmp_path, 3) == (1 << 40) + 1
    assert tail_offset(tmp_path, 1) == (1 << 40) + 5 + 200_001


async def test_nothing_was_written(tmp_path: Path) -> None:
    assert await text(tmp_path) == b""
    assert await text(tmp_path, tail_lines=3) == b""


async def test_who_follows_gets_everything_up_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = write(tmp_path, monkeypatch, b"one\n", bytes_max=8)
    over = asyncio.Event()
    heard: list[bytes] = []
    async with asyncio.timeout(30):
        async for piece in read(tmp_path, follow=True, ended=over.is_set):
            heard.append(piece.data)
            if len(heard) == 1:
                output.write(b"two\nthree\n")
            if b"".join(heard).endswith(b"three\n"):
                output.write(b"last\n")
                over.set()
                heard.append(b"")
    assert b"".join(heard) == b"one\ntwo\nthree\nlast\n"


def test_a_full_disk_never_holds_the_command_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    output = OutputFile(1000)
    good, output.fd = output.fd, os.open(full, os.O_WRONLY)
    output.write(b"lost\n")
    output.write(b"lost too\n")
    os.close(output.fd)
    output.fd = good
    output.write(b"kept\n")
    said = (tmp_path / "output.0").read_bytes()
    assert b"14 bytes of output were lost" in said
    assert said.endswith(b"kept\n")


def test_output_is_kept_again_once_there_is_space_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "output.4"
    in_the_way.mkdir()
    output = write(tmp_path, monkeypatch, b"abcdef", b"gh", bytes_max=4)
    assert output.lost == 4
    in_the_way.rmdir()
    output.write(b"ij")
    assert output.lost == 0
    kept = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("output.*")))
    assert b"4 bytes of output were lost" in kept
    assert kept.endswith(b"ij")


async def test_output_that_is_removed_while_it_is_read_has_just_ended(tmp_path: Path) -> None:
    """As when the node is wiped: the names are listed, and then the files are gone."""
    (tmp_path / "output.0").symlink_to(tmp_path / "gone")
    assert await text(tmp_path, tail_lines=3) == b""
    assert await text(tmp_path) == b""
