"""A block runs against a forward pass: probes, sites, handoffs, saves. Plain PyTorch, any module."""

from endoscope.probing.handoff import Handoffs
from endoscope.probing.probe import Probe
from endoscope.probing.rows import Span
from endoscope.probing.saves import save
from endoscope.probing.steps import BlockTracer
from endoscope.probing.views import ModelView, ModuleView

__all__ = ["BlockTracer", "Handoffs", "ModelView", "ModuleView", "Probe", "Span", "save"]
