"""What every test against vLLM's servers begins with."""

import pytest

from tests.vllm.servers import ENVIRONMENT, small_model
from whet.data.template import Renderer, load_tokenizer


@pytest.fixture(scope="module", autouse=True)
def _environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model."""
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(load_tokenizer(folder))


@pytest.fixture(scope="module")
def decode(renderer):
    return renderer.decode
