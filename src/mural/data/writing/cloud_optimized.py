"""A GeoTIFF made a Cloud Optimized one: directories before the pixels, coarse levels first, compressed; by GDAL."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mural.data.writing.output import unwritable
from mural.errors import DISTRIBUTION, package

OPTIONS = {"compress": "DEFLATE", "blocksize": 512, "bigtiff": "IF_SAFER", "num_threads": "ALL_CPUS"}


def optimize(name: str, path: Path, levels: bool) -> None:
    """Rewrite a file, tile after tile, with the levels that it has; without rasterio, say so and leave it as it is."""
    if find_spec("rasterio") is None:
        warnings.warn(
            f"{name}: its image is a Cloud Optimized GeoTIFF, which takes rasterio to write: this is a tiled GeoTIFF. "
            f'To get one, pip install "{DISTRIBUTION}[geo]" and predict again',
            stacklevel=2,
        )
        return
    copying: Any = package("rasterio.shutil", "geo")
    made = path.with_name(f"{path.name}.cog.partial")
    try:
        # GDAL would make levels of its own where there are none.
        copying.copy(path, made, driver="COG", overviews="FORCE_USE_EXISTING" if levels else "NONE", **OPTIONS)
        made.replace(path)
    except Exception as error:  # GDAL has errors of its own for what the system refuses
        raise unwritable(Path(name), error) from error
    finally:
        made.unlink(missing_ok=True)
