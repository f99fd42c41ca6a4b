"""Prediction: the results of a trained run for whole images, as files."""

from mural.prediction.whole_images import Predictions, predict

__all__ = ["Predictions", "predict"]
