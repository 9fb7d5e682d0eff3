"""Reading DCP folders that somebody else made."""

import os
import pickle
from enum import Enum
from io import BytesIO

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from whet.checkpoint.dcp import DcpReader, write_dcp
from whet.model.dcp_files import META, _Plain
from whet.train.torch_native.saving import read_tensors


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def resumed(folder):
    return read_tensors(folder.with_suffix(".safetensors"), {})


@pytest.mark.parametrize("read", [DcpReader, resumed])
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


def test_a_description_is_read_whichever_python_wrote_it(tmp_path):
    """Until 3.11.3 an enum's members were pickled as its attributes, and in 3.13 paths are of another module."""
    folder = tmp_path / "weights"
    write_dcp(folder, [("a", torch.ones(3))], 1 << 20)
    whole = FileSystemReader(folder).read_metadata()
    entry = whole.state_dict_metadata["a"]
    entry.properties.memory_format = torch.contiguous_format
    state = entry.properties.__getstate__()
    member = next(part for part in state if isinstance(part, Enum))
    whole.storage_meta.checkpoint_id = tmp_path
    written = pickle.dumps((whole, [Attribute(type(member), member.name)]), protocol=3)
    mine, theirs = (f"c{module}\nPosixPath\n".encode() for module in ("pathlib", "pathlib._local"))
    assert (mine in written) != (theirs in written)
    for text in (written.replace(theirs, mine), written.replace(mine, theirs)):
        found, (same,) = _Plain(BytesIO(text)).load()
        assert found.storage_meta.checkpoint_id == tmp_path and same is member
        assert found.state_dict_metadata["a"].properties == entry.properties


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "mro")])
def test_no_other_attribute_is_taken(owner, name):
    with pytest.raises(ValueError, match=r"it asks for .* which no checkpoint needs"):
        _Plain(BytesIO(pickle.dumps(Attribute(owner, name)))).load()


def test_no_file_outside_is_read(tmp_path):
    folder = tmp_path / "weights"
    write_dcp(folder, [("a", torch.ones(3))], 1 << 20)
    found = FileSystemReader(folder).read_metadata()
    for info in found.storage_data.values():
        info.relative_path = "../else.distcp"
    (folder / META).write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"names the file '\.\./else\.distcp', which is not beside it"):
        DcpReader(folder)
