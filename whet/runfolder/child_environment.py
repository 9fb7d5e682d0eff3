"""Environment of the processes that whet starts in addition to the trainer: named variables, and none
of the trainer's tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

_NAMES = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS LINES NO_COLOR FORCE_COLOR COLORTERM PWD TMPDIR TEMP TMP
PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONNOUSERSITE PYTHONUTF8
PYTHONIOENCODING PYTHONWARNINGS PYTHONFAULTHANDLER PYTHONMALLOC VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV
LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH CC CXX CFLAGS CXXFLAGS CPATH LIBRARY_PATH
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NO_PROXY no_proxy
HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE HUGGINGFACE_HUB_CACHE
TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY TOKENIZERS_PARALLELISM
WHET_TRACEBACK WHET_TEST_DEVICE
"""
_FAMILIES = """
LC_ XDG_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ BLIS_ NUMEXPR_ VECLIB_ RAYON_ MALLOC_ TORCH_ TORCHINDUCTOR_ PYTORCH_ TRITON_ CUDA_ CUBLAS_
CUDNN_ NVIDIA_ NCCL_ GLOO_ UCX_ HIP_ HSA_ ROCR_ ROCM_ MIOPEN_ DNNL_ ONEDNN_
"""
NAMES = frozenset(_NAMES.split())
"""Variables that hold places, languages and switches."""
FAMILIES = tuple(_FAMILIES.split())
"""Prefixes of the variables of numerical libraries."""
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "APIKEY", "ACCESS_KEY", "PRIVATE_KEY")
"""Words that no variable of a family may have in its name."""


def child_environment(more: Mapping[str, str] | None = None, named: Iterable[str] = ()) -> dict[str, str]:
    """Environment of a process that is started from here.

    Args:
        more: additional variables.
        named: further variables of this process's environment, which a setting names.

    Raises:
        ValueError: a named variable is not set.
    """
    chosen = {name: value for name, value in os.environ.items() if passes(name)}
    for name in named:
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set")
        chosen[name] = os.environ[name]
    return chosen | dict(more or {})


def passes(name: str) -> bool:
    """True if every started process gets the variable."""
    return name in NAMES or (name.startswith(FAMILIES) and not any(word in name.upper() for word in SECRET_WORDS))
