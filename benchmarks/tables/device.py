"""Tables of what a GPU was measured to do, and of what was counted without one."""

from benchmarks.tables.cells import read, table_of

WAYS = ("from the cache", "compiled", "from memory", "best online", "usual online")


def gpu_training() -> str:
    """Return tokens per second of trainings on the GPU that was measured last."""
    result = read("gpu")
    rows = [
        [
            ", ".join(str(row[name]) for name in ("arch", "batch_size", "length")),
            *(f"{row['tokens_per_s'][way]:,}" if way in row["tokens_per_s"] else "-" for way in WAYS),
        ]
        for row in result["train"]
        if "tokens_per_s" in row
    ]
    return table_of([f"{result['device']}, tokens/s: student, batch, length", *WAYS], rows)


def gpu_dumps() -> str:
    """Return tokens per second of dumps on the GPU that was measured last."""
    result = read("gpu")
    rows = [
        [
            f"`{row['codec']}`",
            f"{row['tokens_per_s']:,}",
            f"{row['plain_forward_tokens_per_s']:,}",
            f"{row['over_plain_forward']:.2f}",
        ]
        for row in result["dump"]
        if "tokens_per_s" in row
    ]
    head = [f"{result['device']}, bfloat16", "dump, tokens/s", "plain forward pass, tokens/s", "ratio"]
    return table_of(head, rows)


def device_counts() -> str:
    """Return what a step and a batch launch, and how often they wait."""
    result = read("device_counts")
    rows = [
        [
            f"`{codec}`",
            f"{result[codec]['batch_of_a_dump']['waits']} / {result[codec]['batch_of_a_dump']['kernels']}",
            f"{result[codec]['training_step']['waits']} / {result[codec]['training_step']['kernels']}",
            str(result[codec]["training_step"]["kernels_of_decoding"]),
            f"{result[codec]['step_as_a_graph']['waits']} / {result[codec]['step_as_a_graph']['kernels']}",
        ]
        for codec in ("topk", "vectors", "dense")
    ]
    return table_of(
        [
            "codec",
            "batch of a dump: waits / kernels",
            "training step: waits / kernels",
            "of them for decoding",
            "step as a graph: waits / launches",
        ],
        rows,
    )


def kernels() -> str:
    """Return what the kernels of the relation loss use of a GPU."""
    rows = [
        [
            f"`{row['codec']}`, {row['dtype']}, {row['head']}",
            row["kernel"]
            .replace("losses_of_rows", "losses")
            .replace("gradients_of_vectors, ", "gradients of "),
            f"{row['registers']}",
            f"{row['spilled_bytes']}",
            f"{row['shared_bytes'] / 1024:.0f} KiB",
        ]
        for row in read("kernels")["kernels"]
    ]
    names = [
        "rows, the student's vectors, size of a head",
        "kernel",
        "registers",
        "bytes beyond",
        "fast memory",
    ]
    return table_of(names, rows)


def precision() -> str:
    """Return what bfloat16 does to relations and to students."""
    result = read("precision")
    kls, students = result["kl_float32_to_bfloat16_nats"], result["held_out_kl_nats"]
    ratios = ", ".join(f"{ratio:.4f}" for ratio in result["bfloat16_over_float32_by_seed"])
    return table_of(
        ["the teacher in bfloat16", ""],
        [
            [
                "KL(float32, bfloat16) of attention / value, nats",
                f"{kls['attention']:.5f} / {kls['value']:.5f}",
            ],
            [
                "held-out KL of a `3x192` from a cache in float32 / bfloat16, nats",
                f"{students['float32']['mean']:.4f} ± {students['float32']['stdev']:.4f} / "
                f"{students['bfloat16']['mean']:.4f} ± {students['bfloat16']['stdev']:.4f}",
            ],
            ["bfloat16 over float32, each seed", ratios],
        ],
    )


def precision_of_vectors() -> str:
    """Return what 8 bits and bfloat16 do to a teacher's vectors."""
    rows = [
        [
            f"`{name}`",
            precision,
            f"{row['weights_mb']:,.0f} MB",
            f"{row['stsb_dev']:.1f}",
            f"{row['mean_cosine']:.4f} / {row['least_cosine']:.4f}",
        ]
        for name, of_teacher in read("precision")["vectors"].items()
        for precision, row in of_teacher.items()
    ]
    head = [
        "teacher",
        "precision",
        "weights on a GPU",
        "STS-B dev, Spearman",
        "cosine with float32, mean / least",
    ]
    return table_of(head, rows)


def cpu_precision() -> str:
    """Return what a training step takes on a CPU, in both precisions."""
    rows = []
    for cpu, measured in read("cpu_steps")["cpus"].items():
        for row in measured["precision"]:
            times = row["milliseconds"]
            rows.append(
                [
                    cpu,
                    f"{row['batch']} of {row['length']}" + (", with dropout" if row["dropout"] else ""),
                    f"{times['float32']:.0f} ms",
                    *(f"{times['float32'] / times[way]:.2f}" for way in ("bfloat16_torch", "bfloat16")),
                ]
            )
    head = ["CPU", "sequences of tokens", "float32", "bfloat16, PyTorch's attention", "bfloat16, ours"]
    return table_of(head, rows)


def feeding() -> str:
    """Return the rates of gathering, reading and writing."""
    result = read("feeding")
    rows = [
        [
            name,
            f"{row['gather_tokens_per_s']:,}",
            *(
                f"{row[way]['one_thread']:,} / {row[way]['two_threads']:,} ({row[way]['scales_by']:.2f})"
                for way in ("read", "write")
            ),
        ]
        for name, row in result.items()
        if isinstance(row, dict) and "read" in row
    ]
    head = ["cache", "gathering, one thread", "reading, one / two threads", "writing, one / two threads"]
    return table_of(head, rows)
