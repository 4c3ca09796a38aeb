"""`minilm-cache demo`: dump and train with the teacher and the text that come with the package."""

from dataclasses import asdict

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.environment import home, quiet_libraries
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import JsonOption
from minilm_cache.cli.tables import fidelity_table, students_table


def demo(json: JsonOption = False) -> None:
    """Dump the embedded teacher over Python's documentation, train two students and show the results.

    This needs no network and takes some minutes. Run it again to resume or reuse what is done.
    """
    from minilm_cache.workflows.demo import run_demo  # noqa: PLC0415 - importing it takes seconds

    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        result = run_demo(home=home(), progress=progress, should_stop=should_stop)
    manifest = result.dump.manifest
    record = result.train.record
    if json:
        print_json(
            {
                "cache": str(result.dump.path),
                "run": str(result.train.path),
                "num_tokens": manifest.num_tokens,
                "measured": manifest.measured.model_dump(mode="json") if manifest.measured else None,
                "students": [student.model_dump(mode="json") for student in record.students],
                "speeds": [{**asdict(speed), "ratio": speed.ratio} for speed in result.speeds],
            }
        )
        return
    print_pairs(
        {
            "cache": result.dump.path,
            "run": result.train.path,
            "next": f"minilm-cache info {result.dump.path}",
        }
    )
    if manifest.measured is not None:
        fidelity_table(manifest)
    students_table(record.students, record.identity)
    print_table(
        "Training one student, tokens per second, measured in turns in this run",
        ["student", "from the cache", "teacher every step", "ratio"],
        [
            [
                speed.arch,
                f"{speed.offline_tokens_per_s:,.0f}",
                f"{speed.online_tokens_per_s:,.0f}",
                f"{speed.ratio:.2f}x",
            ]
            for speed in result.speeds
        ],
    )
