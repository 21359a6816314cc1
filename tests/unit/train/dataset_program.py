"""Reads datasets with the real packages; run by ``test_datasets.py``.

With names, reads those from the hub; else writes Parquet files and dataset directories, and reads them.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset, DatasetDict

from tinkex.errors import ConfigError
from tinkex.train.examples import describe, read_conversations

folder, names = Path(sys.argv[1]), sys.argv[2:]
if not names:
    rows = [
        {"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": "A"}]}
        for n in range(3)
    ]
    table = Dataset.from_list(rows)
    table.to_parquet(folder / "a.parquet")
    table.save_to_disk(folder / "saved")
    DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(folder / "splits")
    (folder / "shards").mkdir()
    table.to_parquet(folder / "shards" / "0.parquet")
found = {}
for name in names or ("a.parquet", "saved", "splits", "shards"):
    try:
        examples = read_conversations(Path(name) if names else folder / name)
    except ConfigError as error:
        found[name] = str(error)
        continue
    prompts = [one.prompt if isinstance(one.prompt, str) else one.prompt[0]["content"] for one in examples]
    found[name] = [describe(examples), *prompts]
print(json.dumps(found))
