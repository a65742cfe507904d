"""Checksums: what they notice, and that old ones are still understood."""

import json
import os
import random
import zlib

import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.checksum import ALGORITHMS, BLOCK, CELL, Crc32, Grid64
from orc.runtime.checkpoint.format.layout import Manifest, content_problems, read_manifest
from orc.runtime.checkpoint.storage.durable import checksum, write_file


def total(data, steps=None, algorithm=Grid64):
    found, view = algorithm(), memoryview(data)
    while view:
        step = next(steps) if steps else len(view)
        found.update(view[:step])
        view = view[step:]
    return found.value()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, CELL - 1, CELL, CELL + 1, 3 * CELL + 12345])
def test_a_sum_does_not_depend_on_the_pieces(size):
    data = random.Random(size).randbytes(size)
    pieces = random.Random(1)
    several = iter(lambda: pieces.choice([1, 3, 1000, 65537, CELL, 2 * CELL + 5]), None)
    assert total(data) == total(data, several)
    assert total(data, algorithm=Crc32) == zlib.crc32(data)
    for algorithm in (Grid64, Crc32):
        found = algorithm()
        for at in range(0, size, 2 * CELL):  # what can be computed apart, and in any order
            found.add(algorithm.part(memoryview(data)[at : at + 2 * CELL]))
        assert found.value() == total(data, algorithm=algorithm)


def test_any_flipped_bit_and_any_moved_piece_is_noticed():
    size, generator = 2 * CELL + 5000, random.Random(3)
    data = bytearray(generator.randbytes(size))
    expected = total(data)
    for _ in range(200):
        place, bit = generator.randrange(size), 1 << generator.randrange(8)
        data[place] ^= bit
        assert total(data) != expected
        data[place] ^= bit
    for length in (8, 512, 4096, 65536):
        for _ in range(20):
            a, b = sorted(generator.sample(range(0, size - length, 8), 2))
            if b - a < length:
                continue
            swapped = data.copy()
            swapped[a : a + length], swapped[b : b + length] = data[b : b + length], data[a : a + length]
            assert total(swapped) != expected
        zeroed = data.copy()
        at = generator.randrange(size - length)
        zeroed[at : at + length] = bytes(length)
        assert total(zeroed) != expected
    assert total(data[8:] + data[:8]) != expected
    assert total(data) == expected


def test_the_sum_is_the_one_that_is_documented():
    words = [[(row * 512 + column) << 40 for column in range(512)] for row in range(64)]
    data = b"".join(word.to_bytes(8, "little") for row in words for word in row)
    rows = [sum(row) % 2**64 for row in words]
    columns = [sum(column) % 2**64 for column in zip(*words, strict=True)]
    assert total(data) == zlib.crc32(b"".join(one.to_bytes(8, "little") for one in rows + columns))


def test_large_files_have_a_sum_for_each_block(tmp_path):
    data = os.urandom(1 << 20) * 65
    record = write_file(tmp_path / "file", data)
    assert record == checksum(tmp_path / "file")
    assert record.sums == (total(data[:BLOCK]), total(data[BLOCK:]))


def test_a_checkpoint_with_crc32_is_verified_with_crc32(tmp_path):
    (tmp_path / "model").write_bytes(b"weights")
    old = {"format": 1, "id": "a", "step": 3, "epoch": 0, "offset": 0, "world_size": 1, "created_at": 0.0,
           "files": {"model": {"size": 7, "crc32": [zlib.crc32(b"weights")]}}}  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    manifest = read_manifest(tmp_path)
    assert content_problems(tmp_path, manifest, ["model"]) == []
    (tmp_path / "model").write_bytes(b"weighty")
    assert content_problems(tmp_path, manifest, ["model"]) == ["model does not hold what was saved (checksum differs)"]


def test_an_algorithm_from_the_future_is_named(tmp_path):
    (tmp_path / "manifest.json").write_bytes(Manifest("a", 0, 0, 0, 1, 0.0, checksum="blake9").to_json())
    with pytest.raises(CheckpointError, match=r"checksums are blake9, this version of orc knows crc32, grid64"):
        read_manifest(tmp_path)
    assert set(ALGORITHMS) == {"crc32", "grid64"}
