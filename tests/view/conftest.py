import pytest

from tests.view.served import serving
from whet.view.lessons import write_lessons


@pytest.fixture(scope="session")
def lessons(tmp_path_factory):
    """A folder with the runs of all lessons: records of whet's own code, in seconds."""
    folder = tmp_path_factory.mktemp("lessons")
    write_lessons(folder, "all")
    return folder


@pytest.fixture(scope="session")
def viewer(lessons):
    """A viewer over the lessons."""
    with serving(lessons) as served:
        yield served
