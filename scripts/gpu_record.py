"""Run the GPU tests and keep a record of them, or say whether the record fits the present sources.

    python scripts/gpu_record.py            run the GPU tests, write bench/results/gpu-
    tests.json
    python scripts/gpu_record.py --check    print one line; exit status 0 if the record fits, 1 if
    not
    python scripts/gpu_record.py --same-code    compile the kernel of the record's commit and the
    present one; if they give the same machine code, note that in the record. Needs NVRTC, no GPU

The record names the GPU, the commit and a hash of the sources that decide what a GPU computes, so
that a test run without a GPU can tell whether what it vouches for was ever run on one.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import kernel_hash, provenance, source_files

RECORD = ROOT / "bench" / "results" / "gpu-tests.json"


def check() -> int:
    """Print whether the record belongs to the sources as they stand."""
    if not RECORD.is_file():
        print("GPU record: none; run `make test-gpu` on a machine with a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    where = record["provenance"]
    line = f"GPU record: {record['passed']} passed, {record['failed']} failed on {where['gpu']}"
    line += f", {where['date'][:10]}; "
    now, then = source_files(), record["files"]
    changed = sorted(path for path in now | then if now.get(path) != then.get(path))
    if changed:
        kernel, present = "ANOTHER", kernel_hash()
        if record["kernel"] == present:
            kernel = "the same"
        elif record.get("same_code", {}).get("kernel") == present:
            kernel = "the same in machine code"
        line += f"the generated kernel is {kernel}, changed since: "
        line += ", ".join(changed)
    else:
        line += "matches the present sources"
    print(line)
    return 1 if changed or record["failed"] else 0


def run() -> int:
    """Run the tests and write the record; the exit status is pytest's."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Only these files: a GPU machine need not have what the other tests import.
        files = sorted(str(path) for path in (ROOT / "tests").glob("test_*gpu*.py"))
        options = ["-m", "gpu", f"--junitxml={report}", "-q"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ET.parse(report).getroot().iter("testcase"))
    results = {
        f"{case.get('classname')}::{case.get('name')}": "failed"
        if case.find("failure") is not None or case.find("error") is not None
        else "passed"
        for case in cases
    }
    record = {
        "provenance": provenance(),
        "passed": sum(r == "passed" for r in results.values()),
        "failed": sum(r == "failed" for r in results.values()),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
        "kernel": kernel_hash(),
        "files": source_files(),
        "tests": results,
    }
    target = Path(os.environ.get("OUT", RECORD.parent)) / RECORD.name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {target.name}: {record['passed']} passed, {record['failed']} failed")
    return status


GENERATE = """\
import sys
from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.machine.source import Ring, kernel_source
from mkref.paths import models_root
for config in (NORTH_MINI_CODE, NorthConfig.load(models_root() / "nano")):
    for most_rows in (1, 2, 4, 8):
        sys.stdout.write(kernel_source(config, Ring(5, 64), 8, most_rows) + chr(0))
"""
ARCHITECTURE = "sm_90a"


def machine_code(tree: Path) -> list[str]:
    """SHA-256 of the machine code of the kernel of a source tree, for North and for nano."""
    from mkref.machine import nvrtc

    done = subprocess.run(
        [sys.executable, "-c", GENERATE],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    # Line numbers of the source are no machine code.
    options = [option for option in nvrtc.OPTIONS if option != "-lineinfo"]
    return [
        hashlib.sha256(nvrtc.compile_cubin(source, ARCHITECTURE, options)[0]).hexdigest()
        for source in done.stdout.split(chr(0))[:-1]
    ]


def same_code() -> int:
    """Note in the record that the present kernel is, compiled, the one that was run; 1 if not."""
    record = json.loads(RECORD.read_text())
    commit = record["provenance"]["commit"]
    with TemporaryDirectory() as folder:
        command = ["git", "archive", commit, "mkref", "cuda"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        then, now = machine_code(Path(folder)), machine_code(ROOT)
    if then != now:
        print(f"machine code of the kernel has changed since {commit}; run the GPU tests again")
        return 1
    record["same_code"] = {
        "kernel": kernel_hash(),
        "architecture": ARCHITECTURE,
        "machine_code": now,
        "compared": provenance(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"the kernel has the machine code of {commit}; noted in {RECORD.name}")
    return 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description="Run the GPU tests and record them, or check the record."
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether the record fits the sources"
    )
    parser.add_argument(
        "--same-code", action="store_true", help="compare the machine code with the record's commit"
    )
    options = parser.parse_args()
    return check() if options.check else same_code() if options.same_code else run()


if __name__ == "__main__":
    sys.exit(main())
