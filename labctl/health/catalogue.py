"""The subjects of every host, in the order of tables."""

from __future__ import annotations

from labctl.health import ethernet, infiniband, pcie
from labctl.health.model import Subject

HOST: tuple[Subject, ...] = (pcie.SUBJECT, ethernet.SUBJECT, infiniband.SUBJECT)
