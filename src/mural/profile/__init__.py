"""Profiles: where the time of a run's steps goes, on every rank."""

from mural.profile.account import Notes, Profile, Shares, StepAccount, account
from mural.profile.chrome import chrome_trace
from mural.profile.profiled_steps import profile
from mural.profile.shares_page import page

__all__ = ["Notes", "Profile", "Shares", "StepAccount", "account", "chrome_trace", "page", "profile"]
