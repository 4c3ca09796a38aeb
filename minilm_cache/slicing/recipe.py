"""How slices are fitted. The defaults won the ablations of docs/adr/0014; the benchmark turns them off."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Choices of the fit."""

    follows_student: bool = True
    """Fit queries, keys, values and units to what the student's earlier layers give. False projects the
    teacher's matrices alone."""
    absorbs_layers: bool = True
    """Fit each output to the whole residual stream of the teacher, so that it takes over what layers left out
    would have added. False fits it to the teacher's own output."""
    keeps_values: bool = True
    """Keep the directions of values that matter for value relations. False keeps those that matter for the
    output of the attention."""
    cuts_layers: bool = True
    """Cut the layers. False cuts the embeddings alone, and leaves layers as they were drawn."""
    ridge: float = 1e-2
    """Strength that holds fitted matrices near the projected ones, as a share of the inputs' power."""
