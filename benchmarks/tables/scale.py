"""Tables of what grows with text, shards, requests and ranks."""

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.tables.cells import read, table_of

SIZES: Final = (10**9, 10**11, 3 * 10**12)
"""Tokens of the corpora in the table of growth."""
FILES: Final = {"vectors": 3, "topk": 6}
"""Files of a shard: token ids, the table of sequences, and codes or gaps and weights of two relations."""
PART_BYTES: Final = 2**23
"""Bytes of a request, same as in `store/pull.py`."""
STORAGE_DOLLARS: Final = 0.023e-9
"""S3, us-east-1: dollars for each byte and month."""
WRITE_DOLLARS: Final = 0.005e-3
READ_DOLLARS: Final = 0.0004e-3
"""S3, us-east-1: dollars for a PUT or COPY, and for a GET."""


def many_shards() -> str:
    """Return what opening and reading caches of many shards takes."""
    rows = [
        [
            f"{row['shards']:,}",
            f"{row['index_bytes'] / 1e6:,.1f} MB",
            f"{row['open_s']:.3f} s",
            f"{row['open_mib']:,.0f} MiB",
            f"{row['info_s']:.1f} s ({row['info_of_a_small_cache_s']:.1f} s)",
            f"{row['first_batch_s']:.2f} s",
            f"{row['sequence_ms']:.2f} ms",
            f"{row['plan_s']:.2f} s",
            f"{row['seal_s']:,.1f} s",
        ]
        for row in read("scale")["shards"]
    ]
    head = [
        "shards",
        "index",
        "open",
        "memory of that",
        "`info` (of a small cache)",
        "first batch of a training",
    ]
    return table_of([*head, "what a sequence's shard is", "plan", "seal"], rows)


def far_and_together() -> str:
    """Return what reading from a slow store costs, and how long uneven ranks take together."""
    result = read("scale")
    remote, ranks = result["remote"], result["ranks"]
    rows = [
        ["requests that open a cache in a store", f"{remote['requests_to_open']}"],
        [
            "16 shards, one thread over four threads",
            f"{remote['threads_1_s']:.2f} s / {remote['threads_4_s']:.2f} s = {remote['ratio']:.2f}",
        ],
        [
            "requests for the whole cache: two processes at once, one process",
            f"{remote['requests_of_two_processes']}, {remote['requests_of_one_process']}",
        ],
        [
            "an epoch for a consumer of a million tokens a second: share of its time that it waits",
            f"{100 * remote['epoch']['share_waiting']:.1f} %",
        ],
        [
            f"{ranks['ranks']} ranks, {ranks['shards']} shards, over what their speeds allow",
            f"{ranks['took_s']:.1f} s / {ranks['ideal_s']:.1f} s = {ranks['over_ideal']:.2f}",
        ],
    ]
    study = result["study"]
    times = f"{study['one_worker_s']:.0f} s / {study['two_workers_s']:.0f} s = {study['ratio']:.2f}"
    same = "the same" if study["same_results"] else "different"
    rows.append([f"a study of {study['passes']} passes on Ray: one worker, two (results: {same})", times])
    return table_of(["", "measured"], rows)


def text_once() -> str:
    """Return what tokenising a text once takes, and what it saves."""
    result = read("scale")
    text, planning = result["text"], result["planning"]
    one, two = text["tokenised_by_1_s"], text["tokenised_by_2_s"]
    rows = [
        [
            f"tokenising {text['corpus_bytes'] / 1e9:.1f} GB ({text['num_tokens'] / 1e6:,.0f} M tokens) "
            "by one process, by two",
            f"{one:.0f} s / {two:.0f} s = {text['ratio']:.2f}",
        ],
        ["from the start of the first `dump` to its first forward pass", _seconds(text["first_dump"])],
        ["the same of the second `dump`", _seconds(text["second_dump"])],
        [
            f"planning {planning['shards']:,} shards of {planning['tokens'] / 1e9:,.0f} billion tokens in "
            f"{planning['documents'] / 1e6:,.0f} million documents",
            _seconds(planning["first"]),
        ],
        ["the same again, when the order of documents is kept", _seconds(planning["again"])],
    ]
    return table_of(["", "measured"], rows)


def _seconds(row: dict[str, float]) -> str:
    return f"{row['seconds']:,.1f} s, {row['anonymous_mib']:,.0f} MiB of memory"


def growth() -> str:
    """Return what grows with the corpus, computed from what was measured."""
    scale, sizes = read("scale"), read("many_epochs")["bytes_per_token"]
    text, million = scale["text"], scale["shards"][-1]
    per_token = {"vectors": sizes["vectors, KL at most 0.005"], "topk": sizes["topk pps k=16"]}
    default = scale["large"]["default_shard_tokens"]
    shards = {(codec, n): -(-n // default[codec][str(n)]) for codec in FILES for n in SIZES}
    # A file is fetched by a request for each part of it, the last of which is shorter.
    reads = {n: FILES["topk"] * shards["topk", n] + int(n * per_token["topk"] / PART_BYTES) for n in SIZES}
    index_bytes = million["index_bytes"] / million["shards"]
    rate = text["num_tokens"] / text["tokenised_by_1_s"]

    def row(name: str, value: Callable[[int], str]) -> list[str]:
        return [name, *(value(size) for size in SIZES)]

    rows = [
        row("text", lambda n: _bytes(n * text["corpus_bytes"] / text["num_tokens"])),
        row("tokenising, core-hours, once", lambda n: f"{n / rate / 3600:,.1f}"),
        row("token ids on disk", lambda n: _bytes(2 * n)),
        row("cache, `vectors`", lambda n: _bytes(n * per_token["vectors"])),
        row("cache, `topk`", lambda n: _bytes(n * per_token["topk"])),
        row("tokens of a shard, `vectors` / `topk`", lambda n: " / ".join(_tokens(default, n))),
        row("shards, `vectors` / `topk`", lambda n: " / ".join(f"{shards[codec, n]:,}" for codec in FILES)),
        row(
            "files, `vectors` / `topk`",
            lambda n: " / ".join(f"{count * shards[codec, n]:,}" for codec, count in FILES.items()),
        ),
        row("index of shards, `topk`", lambda n: _bytes(shards["topk", n] * index_bytes)),
        row(
            "opening the cache, `topk`",
            lambda n: f"{shards['topk', n] / million['shards'] * million['open_s']:.3f} s",
        ),
        row("requests that open it in a store", lambda _: f"{scale['remote']['requests_to_open']}"),
        row("requests of an epoch from a store, `topk`", lambda n: f"{reads[n]:,}"),
        row(
            "dollars a month in S3, `vectors` / `topk`",
            lambda n: " / ".join(f"{n * size * STORAGE_DOLLARS:,.0f}" for size in per_token.values()),
        ),
        row(
            "dollars of requests: a dump into S3, an epoch from it (`topk`)",
            lambda n: (
                f"{(2 * FILES['topk'] + 1) * shards['topk', n] * WRITE_DOLLARS:,.2f} / "
                f"{reads[n] * READ_DOLLARS:,.2f}"
            ),
        ),
    ]
    return table_of(["tokens", *(f"{size:.0e}".replace("e+", "e") for size in SIZES)], rows)


def _tokens(default: Mapping[str, Mapping[str, int]], size: int) -> list[str]:
    """Return the tokens of a shard for each codec, in millions."""
    return [f"{default[codec][str(size)] / 2**20:g} Mi" for codec in FILES]


def large_shards() -> str:
    """Return what shards of several sizes take in memory."""
    rows = [
        [
            f"{row['tokens'] / 2**20:.2f} Mi",
            f"{row['segments']}",
            f"{row['decoded_mib']:,} MiB",
            f"{row['write_mib']:,.0f} MiB",
            f"{row['read_mib']:,.0f} MiB",
        ]
        for row in read("scale")["large"]["shards"]
    ]
    return table_of(
        ["tokens of a shard", "segments", "decoded", "memory to write it", "memory to read it"], rows
    )


def _bytes(size: float) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= unit), (1e3, "KB")
    )
    return f"{size / unit:,.1f} {name}"
