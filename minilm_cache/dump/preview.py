"""Preview of a finished cache for people and dataset viewers: some of its sequences."""

import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from minilm_cache.cache import Cache
from minilm_cache.storage_schema.identity import RelationKind

PREVIEW_SEQUENCES = 8


def preview_table(cache: Cache, tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    """Return a table of the first sequences: their text, tokens, and the attention of head 0 from [CLS]."""
    rows = []
    for number in range(min(PREVIEW_SEQUENCES, len(cache))):
        sequence = cache[number]
        ids = sequence.input_ids.tolist()
        attention = {}
        if cache.manifest.identity.has_relations:
            attention["attention_head0_row0"] = sequence.relation(RelationKind.ATTENTION)[0, 0].tolist()
        rows.append(
            {
                "sequence": number,
                "text": tokenizer.decode(ids),
                "tokens": tokenizer.convert_ids_to_tokens(ids),
            }
            | attention
        )
    return pa.Table.from_pylist(rows)
