"""What the groups of a config decide together: every rule is a row of the table in table.py."""

from counterflow.framework.checks.rules.table import RULES, check, check_workload, warnings_of
from counterflow.framework.planning.step_sizes import build_schedule

__all__ = ["RULES", "build_schedule", "check", "check_workload", "warnings_of"]
