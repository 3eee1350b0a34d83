"""What Ray is told by its environment, before anything of it is imported: it reads most of this only then.

Nothing is reported to anybody; ports are on the loopback interface and ask for a token made up anew for each start.
Whoever has set one of these is left alone.
"""

import os
import secrets
import sys

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only switch that makes 127.0.0.1 the address of a node
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
}
TOO_LATE = "ray" in sys.modules
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
