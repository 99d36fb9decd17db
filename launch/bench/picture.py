"""Pictures beside numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_picture(figure: Any, path: Path, *, dpi: int = 150) -> Path:
    """Write a matplotlib `figure` to `path`, PNG, and beside it as SVG, and let go of it; `path`."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=dpi)
    figure.savefig(path.with_suffix(".svg"))
    pyplot.close(figure)
    return path
