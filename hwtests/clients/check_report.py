"""Exits with 1 unless a benchmark's report has at least MINIMUM requests and no failed one.

    python check_report.py (guidellm|aiperf) REPORT.json MINIMUM
"""

import json
import sys


def guidellm(report):
    for benchmark in report["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        yield totals["successful"], totals["errored"] + totals["incomplete"]


def aiperf(report):
    failed = sum(entry["count"] for entry in report["error_summary"])
    yield int(report["request_count"]["avg"]), failed + int(report["was_cancelled"])


def main():
    kind, path, minimum = sys.argv[1:]
    with open(path) as file:
        counts = list({"guidellm": guidellm, "aiperf": aiperf}[kind](json.load(file)))
    succeeded = sum(count for count, _ in counts)
    failed = sum(count for _, count in counts)
    print(f"{kind}: {succeeded} requests succeeded, {failed} failed")
    sys.exit(0 if failed == 0 and succeeded >= int(minimum) else 1)


if __name__ == "__main__":
    main()
