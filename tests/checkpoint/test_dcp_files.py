"""Reading DCP folders that somebody else made."""

import os
import pickle
import struct
import sys
from copy import copy, deepcopy
from dataclasses import replace
from enum import Enum
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from whet.checkpoint.dcp import DcpReader, write_dcp
from whet.model import plain_pickle
from whet.model.dcp_files import META, DcpFiles, _fill
from whet.model.dcp_slice import DTYPES
from whet.train.torch_native.saving import read_tensors


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def converted(folder):
    reader = DcpReader(folder)
    return {name: reader.read(name) for name in reader.names}


def resumed(folder):
    return read_tensors(folder.with_suffix(".safetensors"), {"a": torch.zeros(3), "b": torch.zeros(2, 4)})


BOTH = pytest.mark.parametrize("read", [converted, resumed])


@pytest.fixture
def folder(tmp_path):
    write_dcp(tmp_path / "weights", [("a", torch.arange(3.0)), ("b", torch.ones(2, 4))], 1 << 20)
    return tmp_path / "weights"


def described(folder):
    return pickle.loads((folder / META).read_bytes())


def describe(folder, found, protocol=None):
    (folder / META).write_bytes(pickle.dumps(found, protocol=protocol))


@BOTH
def test_a_description_cannot_run_code(read, tmp_path):
    folder, target = tmp_path / "weights", tmp_path / "made"
    folder.mkdir()
    (folder / META).write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(ValueError, match=r"names posix.mkdir, which no checkpoint needs"):
        read(folder)
    assert not target.exists()


class Attribute:
    """Pickled as a call of getattr."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


def with_format(folder, asked):
    """A description whose memory formats are `asked`, as bytes."""
    found = described(folder)
    for entry in found.state_dict_metadata.values():
        entry.properties = Made(type(entry.properties), [*entry.properties.__getstate__()[:3], asked, False])
    return found


class Made:
    """Pickled as an object of a class, made without arguments, with a state."""

    def __init__(self, kind, state):
        self.kind, self.state = kind, state

    def __reduce_ex__(self, protocol):
        return self.kind, (), tuple(self.state)


def test_a_description_is_read_whichever_python_wrote_it(folder, tmp_path):
    """Until 3.11.3 an enum's members were pickled as its attributes, and in 3.13 paths are of another module."""
    entry = described(folder).state_dict_metadata["a"]
    member = next(part for part in entry.properties.__getstate__() if isinstance(part, Enum))
    whole = with_format(folder, Attribute(type(member), member.name))
    whole.storage_meta = StorageMeta(checkpoint_id=tmp_path)
    written = pickle.dumps(whole, protocol=3)
    mine, theirs = (f"c{module}\nPosixPath\n".encode() for module in ("pathlib", "pathlib._local"))
    assert (mine in written) != (theirs in written) and b"cbuiltins\ngetattr\n" in written
    for text in (written.replace(theirs, mine), written.replace(mine, theirs)):
        (folder / META).write_bytes(text)
        found = DcpFiles(folder).entries["a"]
        assert (found.dtype, found.size) == (entry.properties.dtype, tuple(entry.size))
        assert torch.equal(converted(folder)["a"], torch.arange(3.0))


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "mro")])
def test_no_other_attribute_is_taken(owner, name, folder):
    describe(folder, with_format(folder, Attribute(owner, name)))
    with pytest.raises(ValueError, match=r"asks for what no checkpoint needs"):
        DcpReader(folder)


@BOTH
@pytest.mark.parametrize("name", ["../else.distcp", "/else.distcp", "..", ".", "", "below/else.distcp", "a\0", META, "..\\else"])
def test_no_file_outside_is_named(read, name, folder):
    found = described(folder)
    for info in found.storage_data.values():
        info.relative_path = name
    describe(folder, found)
    with pytest.raises(ValueError, match=r"names the file .*, which is not in its folder"):
        read(folder)


@BOTH
@pytest.mark.parametrize("file", ["__0_0.distcp", META])
def test_no_link_is_followed_and_no_pipe_is_waited_for(read, file, folder):
    os.replace(folder / file, folder.parent / file)
    (folder / file).symlink_to(folder.parent / file)
    with pytest.raises(ValueError, match=f"{file} is a link"):
        read(folder)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(ValueError, match=f"{file} is no ordinary file"):
        read(folder)


def proto(text):
    return b"\x80\x02" + text + b"."


CODE = {
    "INST": b"(S'x'\nios\nmkdir\n",
    "OBJ": b"(cos\nmkdir\nX\x01\x00\x00\x00xo",
    "NEWOBJ": b"cos\nmkdir\n)\x81",
    "NEWOBJ_EX": b"ctorch\nSize\n)}\x92",
    "EXT": b"\x82\x01",
    "persistent id": b"X\x01\x00\x00\x00xQ",
    "persistent line": b"Px\n",
    "a dotted name": b"ctorch.serialization\n_get_layout.__globals__\n",
    "BUILD of a function": b"ctorch.serialization\n_get_layout\n}X\x08\x00\x00\x00__code__Nsb",
    "BUILD of a class": b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x0c\x00\x00\x00__setstate__Ns\x86b",
    "a call of a called one": b"ctorch.serialization\n_get_layout\n)R)R",
    "arguments that are a list": b"ctorch\nSize\n]R",
    "items of an object": b"ctorch\nSize\n)RX\x01\x00\x00\x00xNs",
    "appending to a tuple": b")Na",
    "an integer as a line": b"I" + b"9" * 9999 + b"\n",
    "a stack name of numbers": b"K\x01K\x02\x93",
    "DUP": b"N2",
    "a big memo": b"Nr\xff\xff\xff\x7fb",
    "a huge text": b"X\xff\xff\xff\xff",
    "a huge text of 64 bits": b"\x8d" + b"\xff" * 8,
    "a huge frame": b"\x95" + b"\xff" * 8,
    "a mark": b"(",
    "nothing": b"",
    "no stop": b"N" * 9 + b"0" * 99,
}


@BOTH
@pytest.mark.parametrize("kind", CODE)
def test_no_opcode_does_anything(read, kind, folder):
    (folder / META).write_bytes(proto(CODE[kind]))
    with pytest.raises(ValueError, match=r"cannot be read: (it|'the checkpoint') "):
        read(folder)


def test_a_function_keeps_its_attributes(folder):
    from torch.serialization import _get_layout

    (folder / META).write_bytes(proto(CODE["BUILD of a function"]))
    before = dict(vars(_get_layout)), _get_layout.__code__, dict(vars(Metadata))
    with pytest.raises(ValueError, match="changes what is no object"):
        DcpReader(folder)
    assert before == (dict(vars(_get_layout)), _get_layout.__code__, dict(vars(Metadata)))


def test_what_refers_to_itself_a_thousandfold_is_read_in_no_time(folder, monkeypatch):
    """A pickle of 2**99 values in 99 tuples, as a key, as a size, and where text belongs; and one that never ends."""
    bomb = b")q\x00" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(99))
    for text in (bomb + b"0", b"}" + bomb + b"Ns", b"ctorch\nSize\n(" + bomb + b"t\x85R", bomb):
        (folder / META).write_bytes(proto(text))
        with pytest.raises(ValueError, match="cannot be read"):
            DcpReader(folder)
    monkeypatch.setattr(plain_pickle, "MAX_STEPS", 1000)
    (folder / META).write_bytes(b"]" * 2000)
    with pytest.raises(ValueError, match="over 1000 steps"):
        DcpReader(folder)


@BOTH
def test_an_entry_of_bytes_is_refused_by_name_wherever_it_stands(read, folder, tmp_path):
    """Torch's own planner would unpickle it."""
    found = described(folder)
    found.state_dict_metadata["a"] = BytesStorageMetadata()
    describe(folder, found)
    with pytest.raises(ValueError, match=r"'a' is no tensor, and nothing else is read from checkpoints"):
        read(folder)
    other = tmp_path / "other"
    save({"model": {"a": torch.ones(3)}, "step": Bomb(tmp_path / "made")}, checkpoint_id=other, no_dist=True)
    with pytest.raises(ValueError, match=r"'step' is no tensor"):
        read(other)
    assert not (tmp_path / "made").exists()


@BOTH
def test_a_tensor_that_is_a_pickle_in_its_file_is_refused(read, folder, tmp_path):
    """The description says tensor, and the file holds what unpickling would run."""
    ones = torch.ones(3)
    for content in (Bomb(tmp_path / "made"), {"a": ones}, [ones], torch.nn.Parameter(ones), ones.to_sparse(), ones.half()):
        torch.save(content, folder / "__0_0.distcp")
        found = described(folder)
        info = found.storage_data[MetadataIndex("a", (0,))]
        info.offset, info.length = 0, (folder / "__0_0.distcp").stat().st_size
        found.state_dict_metadata.pop("b", None)
        describe(folder, found)
        with pytest.raises(ValueError, match=r"a cannot be read: it "):
            read(folder)
        (folder / "__0_0.distcp").write_bytes(pickle.dumps(content) + b" " * 4096)
        with pytest.raises(ValueError, match=r"a cannot be read: what lies at byte 0 is no tensor that torch.save wrote"):
            read(folder)
    assert not (tmp_path / "made").exists()


class Text(str):
    pass


def size(*numbers):
    return torch.Size(numbers)


def change(found, what):
    entry, info = found.state_dict_metadata["a"], found.storage_data[MetadataIndex("a", (0,))]
    other = found.storage_data[MetadataIndex("b", (0, 0))]
    changes = {
        "a name of another type": lambda: found.state_dict_metadata.update({Text("c"): entry}),
        "a list of sizes": lambda: setattr(entry, "size", [3]),
        "a size that is text": lambda: setattr(entry, "size", "3"),
        "a size with a state": lambda: setattr(entry, "size", Made(torch.Size, (3,))),
        "a part that sticks out": lambda: setattr(entry.chunks[0], "sizes", size(4)),
        "a part of other dimensions": lambda: setattr(entry.chunks[0], "sizes", size(3, 1)),
        "a part below nothing": lambda: setattr(entry.chunks[0], "offsets", size(-1)),
        "an unknown part": lambda: entry.chunks.append(ChunkStorageMetadata(size(1), size(1))),
        "parts in a tuple": lambda: setattr(entry, "chunks", tuple(entry.chunks)),
        "a huge tensor": lambda: (setattr(entry, "size", size(1 << 40)), setattr(entry.chunks[0], "sizes", size(1 << 40))),
        "an offset below nothing": lambda: setattr(info, "offset", -8),
        "a length that is true": lambda: setattr(info, "length", True),
        "a place of another": lambda: setattr(info, "offset", other.offset),
        "an extension": lambda: setattr(info, "transform_descriptors", ["zstd"]),
        "no places": lambda: setattr(found, "storage_data", None),
        "places that are a list": lambda: setattr(found, "storage_data", [1]),
        "a type that is no type": lambda: setattr(entry, "properties", Made(type(entry.properties), ["float32", 0, 0, 0, 0])),
        "no properties": lambda: setattr(entry, "properties", None),
        "an entry of text": lambda: found.state_dict_metadata.update(a="tensor"),
        "a place of text": lambda: found.storage_data.update({"a": info}),
    }
    if what is None:
        return list(changes)
    changes[what]()
    return found


class Anything(dict):
    def __missing__(self, key):
        return None


@BOTH
@pytest.mark.parametrize("what", change(Metadata(Anything(), None, Anything()), None))
def test_a_description_that_misleads_is_refused(read, what, folder):
    describe(folder, change(described(folder), what))
    with pytest.raises(ValueError, match=r"cannot be read: .*(it is damaged|cannot be read|describes no|no tensor)"):
        read(folder)


@BOTH
def test_a_part_beyond_the_file_is_refused(read, folder):
    found = described(folder)
    for info in found.storage_data.values():
        info.offset += 1 << 40
    describe(folder, found)
    with pytest.raises(ValueError, match=r"[ab] cannot be read: its file is cut short"):
        read(folder)


@BOTH
def test_what_is_left_out_or_there_twice_is_no_tensor(read, folder):
    found = described(folder)
    found.state_dict_metadata["a"].chunks = []
    describe(folder, found)
    with pytest.raises(ValueError, match=r"a cannot be read: its parts leave something out"):
        read(folder)


class Counted(list):
    looked = 0

    def __getitem__(self, place):
        Counted.looked += 1
        return list.__getitem__(self, place)


def test_parts_are_compared_in_work_that_grows_with_their_number():
    looked = []
    for n in (100, 1000):
        Counted.looked = 0
        boxes = [Counted([(i, i + 1), (k, k + 1)]) for i in range(n) for k in range(2)]
        assert _fill(boxes, [(0, n), (0, 2)])
        looked.append(Counted.looked)
    assert looked[1] <= 10 * looked[0] + 10
    assert not _fill([*boxes[1:], boxes[1]], [(0, n), (0, 2)]), "as many places, one of them twice"
    with pytest.raises(ValueError, match="parted in 5 dimensions, and at most 4 are read"):
        _fill([[(k, k + 1)] * 5 for k in range(2)], [(0, 2)] * 5)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=2, max_size=2), max_size=5), st.integers(1, 3))
def test_parts_fill_a_tensor_where_each_place_is_in_one_of_them(drawn, end):
    boxes = [[(low, low + size) for low, size in box] for box in drawn]
    whole = [(0, end), (0, end)]
    places = [place for box in boxes for place in product(*(range(low, high) for low, high in box))]
    assert _fill(boxes, whole) == (sorted(places) == sorted(product(range(end), repeat=2)))


FILLERS = {"lists": b"]", "dicts": b"}", "marks": b"(", "the memo": b"\x94", "tuples": b"\x85", "pairs": b"NN"}


@pytest.mark.parametrize("kind", FILLERS)
def test_a_description_makes_no_more_than_its_size_allows(kind, folder, monkeypatch):
    """Fifty million empty dicts would take six gigabytes."""
    monkeypatch.setattr(plain_pickle, "ROOM_BYTES", 2000)
    begin, end = (b"}(", b"u") if kind == "pairs" else (b"N", b"")
    (folder / META).write_bytes(proto(begin + FILLERS[kind] * 5000 + end))
    with pytest.raises(ValueError, match=r"makes more objects than a checkpoint of its [0-9]+ bytes needs"):
        DcpReader(folder)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_large_descriptions_have_the_room_that_they_need(protocol, folder, monkeypatch):
    monkeypatch.setattr(plain_pickle, "ROOM_BYTES", 2000)
    found = described(folder)
    entry, info = found.state_dict_metadata["b"], found.storage_data[MetadataIndex("b", (0, 0))]
    for i in range(500):
        found.state_dict_metadata[f"w{i}"] = TensorStorageMetadata(copy(entry.properties), size(2, 4), [deepcopy(entry.chunks[0])])
        found.storage_data[MetadataIndex(f"w{i}", size(0, 0))] = replace(info, offset=info.offset + (i + 1) * info.length)
    describe(folder, found, protocol)
    assert len(DcpFiles(folder).entries) == 502


def test_parts_that_overlap_are_refused(tmp_path):
    folder = tmp_path / "weights"
    write_dcp(folder, [("a", torch.ones(2)), ("b", torch.ones(2))], 1 << 20)
    found = described(folder)
    first, second = (found.storage_data.pop(MetadataIndex(name, (0,))) for name in "ab")
    entry = found.state_dict_metadata["a"]
    for wrong, (one, two) in {False: ((0, 2), (2, 2)), True: ((0, 2), (1, 2))}.items():
        entry.size = size(two[0] + two[1] + wrong)
        entry.chunks = [ChunkStorageMetadata(size(at), size(count)) for at, count in (one, two)]
        found.storage_data = {MetadataIndex("a", (one[0],)): first, MetadataIndex("a", (two[0],)): second}
        found.state_dict_metadata = {"a": entry}
        describe(folder, found)
        if wrong:
            with pytest.raises(ValueError, match="leave something out, or overlap"):
                DcpReader(folder).read("a")
        else:
            assert torch.equal(DcpReader(folder).read("a"), torch.ones(4))


def test_a_slice_that_was_tampered_with_never_reads_beyond_itself(tmp_path):
    """Every byte of its headers is changed in turn: a tensor of the right size, or a ValueError."""
    folder = tmp_path / "weights"
    write_dcp(folder, [("a", torch.arange(3.0))], 1 << 20)
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    for place in range(len(whole)):
        if whole[place]:
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            try:
                assert DcpReader(folder).read("a").shape == (3,)
            except ValueError as error:
                assert "a cannot be read" in str(error)


def test_compressed_members_and_huge_directories_are_refused(tmp_path):
    import zipfile

    folder = tmp_path / "weights"
    write_dcp(folder, [("a", torch.zeros(4096))], 1 << 20)
    file = folder / "__0_0.distcp"
    with zipfile.ZipFile(file) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as small:
        for name, data in members.items():
            small.writestr(name, data)
        small.comment = b" " * 20000
    describe_length(folder)
    with pytest.raises(ValueError, match="compressed"):
        DcpReader(folder).read("a")
    size, end = (1 << 30) - 22, struct.Struct("<4sHHHHIIH")
    with open(file, "wb") as sparse:
        sparse.truncate(size)
        sparse.seek(size)
        sparse.write(end.pack(b"PK\5\6", 0, 0, 1, 1, size, 0, 0))
    describe_length(folder)
    with pytest.raises(ValueError, match="described by more bytes than any tensor"):
        DcpReader(folder).read("a")


def describe_length(folder):
    """Say that the first tensor is all of its file."""
    found = described(folder)
    next(iter(found.storage_data.values())).length = (folder / "__0_0.distcp").stat().st_size
    describe(folder, found)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_is_read_as_it_was_written(dtype, tmp_path):
    """By torch and by whet, a view, a scalar, a transposed and an empty one."""
    base = torch.arange(24).to(DTYPES[dtype])
    square = base.view(4, 6)
    tensors = {"whole": base, "part": base[5:9], "one": base[3], "turned": square.T, "empty": base[:0], "rows": square[1:3]}
    write_dcp(tmp_path / "mine", tensors.items(), 100)
    save(dict(tensors), checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name in ("mine", "theirs"):
        found = converted(tmp_path / name)
        assert found.keys() == tensors.keys()
        assert all(found[each].dtype == tensor.dtype and found[each].shape == tensor.shape for each, tensor in tensors.items())
        assert all(found[each].tolist() == tensor.tolist() for each, tensor in tensors.items())
    taken = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load(taken, storage_reader=FileSystemReader(tmp_path / "mine"), no_dist=True)
    assert all(taken[each].tolist() == tensor.tolist() for each, tensor in tensors.items()), "torch reads it, too"


def test_sizes_that_say_other_than_torch_are_never_believed(folder):
    """A size that is large in the description takes no memory."""
    found = described(folder)
    found.state_dict_metadata["b"] = TensorStorageMetadata(found.state_dict_metadata["b"].properties, size(sys.maxsize, sys.maxsize), [])
    describe(folder, found)
    with pytest.raises(ValueError, match="leave something out"):
        DcpReader(folder).read("b")
