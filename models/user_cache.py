"""Where files that can be made again are kept: compiled kernels, packed weights, tokenizers, fetched models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$MS_SPEC_CACHE``, else ``$XDG_CACHE_HOME/ms-spec``, else ``~/.cache/ms-spec``."""
    if os.environ.get("MS_SPEC_CACHE"):
        return Path(os.environ["MS_SPEC_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ms-spec"
