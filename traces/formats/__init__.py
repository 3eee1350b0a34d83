"""Public trace formats: read any of them into a workload, write the canonical one or Mooncake's."""

from traces.formats.detect import FORMATS, detect_format
from traces.formats.mooncake import write_mooncake
from traces.formats.native import write_native
from traces.formats.reader import BadLine, CheckReport, EmptyTraceError, check_trace, read_trace

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
