"""``tinkex eval --lm-eval`` where ``lm-eval`` is installed; the rest of its packages are those of the test's environment."""

import io
import json
import os
import sys
from contextlib import redirect_stdout

sys.path += sys.argv[1].split(os.pathsep)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": sys.argv[2],
    "TINKER_BASE_URL": os.environ["SERVER_URL"],
    "TINKER_API_KEY": os.environ["SERVER_KEY"],
    "TINKER_TELEMETRY": "0",
}

from tinkex.cli import run

printed = io.StringIO()
with redirect_stdout(printed):
    code = run(["eval", *sys.argv[3:]])
print(json.dumps(json.loads(printed.getvalue())) if code == 0 else printed.getvalue())
sys.exit(code)
