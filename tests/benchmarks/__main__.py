"""All benchmarks, one after another, and one table of what they found beside what it should be.

    python tests/benchmarks [--directory DIR] [--only NAME ...] [--peer-python PATH] [--again]

Takes hours: nothing else should run meanwhile. What each prints goes to DIR/NAME.txt as well, its figures to
DIR/NAME.json; a line of the table is "MISSED" where a median is not what it should be. Ends with status 1 then.
--again prints the table of what was found before, and measures nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from benchmarks.report import load, show

NAMES = (
    "scale",
    "shuffle_quality",
    "first_row",
    "first_batch",
    "waits",
    "restart",
    "memory",
    "cache",
    "scale_out",
    "epoch_rate",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("output/benchmarks"))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these, instead of all")
    parser.add_argument("--peer-python", metavar="PATH", help="see epoch_rate.py")
    parser.add_argument("--again", action="store_true", help="print what was found before")
    args = parser.parse_args()
    if args.again:
        found = [args.directory / f"{name}.json" for name in args.only]
        show([line for path in found if path.exists() for line in load(path)])
        return
    args.directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in args.only:
        print(f"\n== {name}", flush=True)
        found = args.directory / f"{name}.json"
        found.unlink(missing_ok=True)
        options = ["--peer-python", args.peer_python] if name == "epoch_rate" and args.peer_python else []
        command = [sys.executable, str(HERE / f"{name}.py"), "--directory", str(args.directory), *options]
        with (
            open(args.directory / f"{name}.txt", "w") as file,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                sys.stdout.write(line)
        if not found.exists():
            sys.exit(f"{name} has not come to its end; see {file.name}")
        lines += load(found)
    print("\n== all")
    show(lines)
    sys.exit(any(line.missed for line in lines))


if __name__ == "__main__":
    main()
