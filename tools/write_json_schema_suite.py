"""Write JSON Schema's test suite, draft 2020-12, to tests/data from the source of `jsonschema`.

    pip download --no-binary jsonschema --no-deps jsonschema
    python tools/write_json_schema_suite.py jsonschema-4.26.0.tar.gz

A line of the result is one schema with its instances. The suite's licence is written next to it.
"""

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data"
FOLDER = "json/tests/draft2020-12/"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def cases(source: tarfile.TarFile) -> list[dict[str, Any]]:
    """The suite's schemas, each with its file and its tests: [instance, whether it is valid]."""
    found = []
    for member in sorted(source.getmembers(), key=lambda member: member.name):
        _, _, name = member.name.partition(FOLDER)
        if not name.endswith(".json"):
            continue
        file = source.extractfile(member)
        assert file is not None
        for case in json.load(file):
            schema = case["schema"]
            if isinstance(schema, dict) and schema.get("$schema") == DRAFT:
                schema = {key: value for key, value in schema.items() if key != "$schema"}
            tests = [[test["data"], test["valid"]] for test in case["tests"]]
            found.append(
                {"file": name, "about": case["description"], "schema": schema, "tests": tests}
            )
    return found


def main() -> None:
    """Read the archive, write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archive", type=Path)
    with tarfile.open(parser.parse_args().archive) as source:
        lines = [json.dumps(case, separators=(",", ":")) for case in cases(source)]
        licence = next(m for m in source.getmembers() if m.name.endswith("/json/LICENSE"))
        text = source.extractfile(licence)
        assert text is not None
        (DATA / "json_schema_suite.LICENSE").write_bytes(text.read())
    (DATA / "json_schema_suite.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
