"""Planted bugs in features of single paradigms, and in re-forming. Pure data."""

from __future__ import annotations

from fft.prove.apart_mutants import APART
from fft.prove.flow_mutants import FLOW
from fft.prove.lease_mutants import LEASES
from fft.prove.mutant import Mutant
from fft.prove.reform_mutants import REFORM

OF_PARADIGMS: tuple[Mutant, ...] = (*LEASES, *FLOW, *APART, *REFORM)
