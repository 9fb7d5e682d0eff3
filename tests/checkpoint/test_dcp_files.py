"""Reading DCP folders that somebody else made."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from whet.checkpoint.dcp import DcpReader, write_dcp
from whet.model.dcp_files import META
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


def test_no_file_outside_is_read(tmp_path):
    folder = tmp_path / "weights"
    write_dcp(folder, [("a", torch.ones(3))], 1 << 20)
    found = FileSystemReader(folder).read_metadata()
    for info in found.storage_data.values():
        info.relative_path = "../else.distcp"
    (folder / META).write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"names the file '\.\./else\.distcp', which is not beside it"):
        DcpReader(folder)
