"""The domains of a run whose model is a separation network: their names, and their images."""

from __future__ import annotations

from mural.domain import SeparationNetwork
from mural.errors import ConfigError
from mural.prediction.result_files import Images
from mural.prediction.trained_run import TrainedRun
from mural.train.factory import make_model


def images_of(run: TrainedRun, images: Images | None, domain: str | None) -> Images:
    """The images to predict: those given, else those that the run's configuration has of a domain."""
    if domain is None:
        if images is None:
            raise ConfigError("there is nothing to predict: give images, as in slides/*.tif")
        return images
    found = domains_of(run)
    if domain not in found:
        there = f"its domains are {', '.join(found)}" if found else "it has no domains: leave the domain out"
        raise ConfigError(f"{run.folder} has no domain {domain!r}: {there}")
    if images is not None:
        return images
    of_source = domain == found[0]
    own = run.config.data.images if of_source else run.config.targets.images.get(domain)
    if own is None:
        raise ConfigError(f"the run's configuration has no data.images of the domain {domain!r}: give the images")
    return own if isinstance(own, str) else list(own)


def domains_of(run: TrainedRun) -> tuple[str, ...]:
    """The domains, the source first; none for an ordinary model."""
    model = make_model(run.config.model, run.config.seed) if run.config.targets.images else None
    return model.domains if isinstance(model, SeparationNetwork) else ()
