"""Findings as they live: journalled, repeated, acknowledged, judged, and exported for a bug report."""

from canaryd.findings.finding import Finding
from canaryd.findings.journal import FILE_NAME, FindingsFile

__all__ = ["FILE_NAME", "Finding", "FindingsFile"]
