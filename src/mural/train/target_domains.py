"""[targets] of a configuration: where the images of unlabelled domains are."""

from __future__ import annotations

from dataclasses import dataclass, field

Files = str | tuple[str, ...]
FilesByName = dict[str, Files]


def no_files() -> FilesByName:
    """No domain has files."""
    return {}


@dataclass(frozen=True)
class TargetsConfig:
    """[targets]: the unlabelled domains of a separation network, by name; [data] and [validation] are the source's."""

    images: FilesByName = field(default_factory=no_files)
    """Image files of each, as { field = "field/*.tif" }."""
    held_out_images: FilesByName = field(default_factory=no_files)
    """Held-out image files of each; without them, validation.fraction of its images."""
    held_out_masks: FilesByName = field(default_factory=no_files)
    """Masks of the held-out images, for scores alone."""
    held_out_tables: FilesByName = field(default_factory=no_files)
    """A CSV file of held-out images for each, with masks or labels, for scores alone."""
