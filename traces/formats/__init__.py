"""Public trace formats: readers for all of them, and writers for `llm-trace/1` and Mooncake's
format.
"""

from zlab.traces.formats.mooncake import write_mooncake
from zlab.traces.formats.native import write_native
from zlab.traces.formats.reader import (
    FORMATS,
    BadLine,
    CheckReport,
    EmptyTraceError,
    check_trace,
    detect_format,
    read_trace,
)

__all__ = [
    "FORMATS",
    "BadLine",
    "CheckReport",
    "EmptyTraceError",
    "check_trace",
    "detect_format",
    "read_trace",
    "write_mooncake",
    "write_native",
]
