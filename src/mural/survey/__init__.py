"""The survey of a folder of images: what is in it, what is odd about it, and the run that trains on it."""

from mural.survey.first_run import FirstRun as FirstRun
from mural.survey.first_run import write_first_run as write_first_run
