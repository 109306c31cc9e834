"""Recording rules and alerts for Prometheus."""

from pathlib import Path
from typing import Final

RULES: Final = Path(__file__).parent / "rules.yaml"
"""For ``rule_files`` of a Prometheus configuration."""
