"""Cuts a teacher, and its head, to the shape of a student, layer after layer.

Each layer is fitted on what the student's layers before it really give, by least squares in closed form, so
the same sequences give the same weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.errors import TeacherError, first_line
from minilm_cache.models.families import family_of
from minilm_cache.slicing.attention import HeadCut, HeadMaps
from minilm_cache.slicing.forward import (
    Calibration,
    EncoderRun,
    LayerCall,
    LayerRun,
    States,
    contexts,
    inputs_of,
    layer_calls,
    run_encoder,
    run_layer,
)
from minilm_cache.slicing.parts import EncoderParts, LayerParts, Rows, encoder_parts, whole
from minilm_cache.slicing.solve import corrected, fit_norm, principal_directions, second_moment, with_constant


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


_EXACT = 1e-6
"""Ridge of fits with few inputs, which need no prior."""


@torch.no_grad()
def cut(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    *,
    layers: Sequence[int],
    calibration: Calibration,
    recipe: Recipe | None = None,
    run: EncoderRun | None = None,
) -> list[float]:
    """Overwrite a student's weights by those cut from a teacher.

    Args:
        teacher: encoder, with or without a head, in evaluation mode.
        student: encoder that is at most as wide, in evaluation mode.
        layers: the teacher's layer for each layer of the student, counted from 0, ascending.
        calibration: sequences to fit to.
        recipe: choices of the fit. None means the defaults.
        run: what the teacher gives on these sequences. None means that it reads them now.

    Returns:
        Relative error of each hidden state on these sequences, that of the embeddings first: the length of
        the difference from the teacher's state in the student's basis, over the length of that state's
        deviation from its mean.

    Raises:
        InvalidConfigError: the parts of a family are not known.
        TeacherError: the teacher gives numbers that are not finite.
    """
    try:
        run = run or run_encoder(teacher, calibration, layers)
        errors = _cut(
            teacher, student, layers=layers, calibration=calibration, recipe=recipe or Recipe(), run=run
        )
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined] # it is documented there
        raise _unfit(first_line(error)) from error
    if not all(map(math.isfinite, errors)):
        raise _unfit("some are NaN or infinite")
    return errors


def _unfit(reason: str) -> TeacherError:
    return TeacherError(
        f"the teacher's hidden states on this text cannot be fitted ({reason}). Take another teacher, or "
        "train with --init random."
    )


def _cut(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    *,
    layers: Sequence[int],
    calibration: Calibration,
    recipe: Recipe,
    run: EncoderRun,
) -> list[float]:
    source = encoder_parts(teacher)
    width = student.config.hidden_size
    used = [calibration.flat(run.states[number]) for number in (0, *(layer + 1 for layer in layers))]
    # The last LayerNorm divides by the length of its whole input, so the basis must hold most of that, too:
    # a teacher's last norm may hide a strong direction by a weight near 0.
    last = calibration.flat(run.sums_after[layers[-1]])
    used.append(nn.functional.layer_norm(last, last.shape[1:]))
    cutter = _Cutter(
        teacher=source,
        student=encoder_parts(student),
        heads=HeadCut(
            num_teacher_heads=teacher.config.num_attention_heads,
            num_heads=student.config.num_attention_heads,
            size=width // student.config.num_attention_heads,
            is_rotary=source.is_rotary,
            keeps_values=recipe.keeps_values,
        ),
        run=run,
        basis=principal_directions(used, width),
        calibration=calibration,
        recipe=recipe,
    )
    cutter.cut_embeddings(student)
    if recipe.cuts_layers:
        cutter.cut_layers(student, layers)
    return cutter.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutter:
    """Cuts one student."""

    teacher: EncoderParts
    student: EncoderParts
    heads: HeadCut
    run: EncoderRun
    basis: Float[Tensor, "teacher_hidden hidden"]
    calibration: Calibration
    recipe: Recipe
    errors: list[float] = field(default_factory=list)

    def cut_embeddings(self, student: PreTrainedModel) -> None:
        """Cut the tables, their norm and the projection to the hidden size."""
        flat, teacher, parts = self.calibration.flat, self.teacher, self.student
        sums, target = flat(self.run.sums), flat(self.run.states[0]) @ self.basis
        size = parts.tables[0].embedding_dim
        normed = teacher.norm(sums)
        if parts.projection is not None:
            change = principal_directions([normed], size)
        elif teacher.projection is None:
            change = self.basis
        else:  # the teacher projects its embeddings, and the student's are as wide as its states
            change = corrected(self.basis.new_zeros(sums.shape[1], size), sums, targets=target, ridge=_EXACT)
        for table, teachers in zip(parts.tables, teacher.tables, strict=True):
            table.weight.copy_(teachers.weight @ change)
        own_sums = inputs_of(student, parts.norm, self.calibration)
        if parts.projection is None:
            state = fit_norm(parts.norm, own_sums, target)
        else:
            given = with_constant(fit_norm(parts.norm, own_sums, normed @ change), has_bias=True)
            matrix = self._projection_prior(change)
            whole(parts.projection).write(corrected(matrix, given, targets=target, ridge=_EXACT))
            state = given @ whole(parts.projection).matrix
        self._note_error(state, target)

    def _projection_prior(self, change: Tensor) -> Tensor:
        """Return the teacher's map from normed embeddings to states, in the student's two bases."""
        teachers = self.teacher.projection
        if teachers is None:
            return torch.cat([change.T @ self.basis, change.new_zeros(1, self.basis.shape[1])])
        matrix = whole(teachers).matrix @ self.basis
        return torch.cat([change.T @ matrix[:-1], matrix[-1:]])

    def cut_layers(self, student: PreTrainedModel, layers: Sequence[int]) -> None:
        """Cut the layers and the norm after the last of them."""
        flat = self.calibration.flat
        if self.student.head_bias is not None and self.teacher.head_bias is not None:
            biases = self.teacher.head_bias.weight
            copied = torch.arange(self.heads.num_heads) % biases.shape[1]
            self.student.head_bias.weight.copy_(biases[:, copied])
        states, calls = layer_calls(student, self.student, self.calibration)
        for number, layer in enumerate(layers):
            states = self._cut_layer(number, layer, states=states, calls=calls[number])
        if self.student.final_norm is not None and self.teacher.final_norm is not None:
            target = self.teacher.final_norm(flat(self.run.states[layers[-1] + 1])) @ self.basis
            fit_norm(self.student.final_norm, flat(states), target)

    def _cut_layer(self, number: int, layer: int, *, states: States, calls: Sequence[LayerCall]) -> States:
        """Cut one layer, and return what the student's gives then.

        Args:
            number: number of the student's layer.
            layer: number of the teacher's layer.
            states: inputs of the student's layer.
            calls: how the student's layer is called, for each batch.
        """
        theirs, mine, calibration = self.teacher.layers[layer], self.student.layers[number], self.calibration
        run = run_layer(theirs, self.run.states[layer], calls=self.run.calls[layer], calibration=calibration)
        stream = calibration.flat(states)
        given = stream
        if mine.is_pre_norm:
            given = fit_norm(mine.attention_norm, stream, run.attention_input @ self.basis)
        output = self._cut_heads(mine, theirs, given=given, run=run)
        context = contexts(mine, states, calls=calls, calibration=calibration)
        before = calibration.flat(self.run.states[layer])
        stream = self._fit_output(
            whole(mine.output), output, inputs=context, stream=stream, wanted=run.attended, before=before
        )
        target = run.ffn_input @ self.basis
        given = fit_norm(mine.ffn_norm if mine.is_pre_norm else mine.attention_norm, stream, target)
        stream = stream if mine.is_pre_norm else given
        down = self._cut_units(mine, theirs, given=given, run=run)
        before = run.attended if mine.is_pre_norm else run.ffn_input
        stream = self._fit_output(
            whole(mine.down), down, inputs=mine.units(given), stream=stream, wanted=run.summed, before=before
        )
        target = calibration.flat(self.run.states[layer + 1]) @ self.basis
        state = stream if mine.is_pre_norm else fit_norm(mine.ffn_norm, stream, target)
        self._note_error(state, target)
        return calibration.padded(state, states)

    def _fit_output(
        self, rows: Rows, prior: Tensor, *, inputs: Tensor, stream: Tensor, wanted: Tensor, before: Tensor
    ) -> Tensor:
        """Fit a map into the residual stream, and return the stream with its output added.

        Args:
            rows: the map.
            prior: matrix to begin with.
            inputs: inputs of the map.
            stream: the student's residual stream.
            wanted: the teacher's residual stream with the output of its own map added.
            before: the teacher's residual stream without it.
        """
        inputs = with_constant(inputs, has_bias=rows.has_bias)
        added = wanted - before
        targets = wanted @ self.basis - stream if self.recipe.absorbs_layers else added @ self.basis
        matrix = corrected(prior, inputs, targets=targets, ridge=self.recipe.ridge)
        rows.write(matrix)
        return stream + inputs @ matrix

    def _cut_heads(self, mine: LayerParts, theirs: LayerParts, *, given: Tensor, run: LayerRun) -> Tensor:
        """Cut queries, keys and values, and return the output map to begin with."""
        query, key, value = (
            self._fit_map(rows, teachers, given=given, wanted=run.attention_input)
            for rows, teachers in (
                (mine.query, theirs.query),
                (mine.key, theirs.key),
                (mine.value, theirs.value),
            )
        )
        output = whole(theirs.output).matrix @ self.basis
        width = theirs.output.in_features
        moment = second_moment(with_constant(given, has_bias=mine.query.has_bias))
        heads = self.heads.cut(HeadMaps(query, key, value, output[:width]), moment)
        mine.query.write(heads.query)
        mine.key.write(heads.key)
        mine.value.write(heads.value)
        return torch.cat([heads.output, output[width:]])

    def _cut_units(self, mine: LayerParts, theirs: LayerParts, *, given: Tensor, run: LayerRun) -> Tensor:
        """Keep the units that add most, and return the map from units to begin with.

        Units that the student has in addition to the teacher's stay as they were drawn.
        """
        added = run.units.square().mean(0).sqrt() * theirs.down.weight.norm(dim=0)
        kept = added.topk(min(mine.up.count, len(added))).indices.sort().values
        for rows, teachers in ((mine.up, theirs.up), (mine.gate, theirs.gate)):
            if rows is not None and teachers is not None:
                matrix = rows.matrix.clone()
                fitted = self._fit_map(rows, teachers, given=given, wanted=run.ffn_input, kept=kept)
                matrix[:, : len(kept)] = fitted
                rows.write(matrix)
        down = whole(theirs.down).matrix @ self.basis
        prior = down.new_zeros(mine.down.in_features, down.shape[1])
        prior[: len(kept)] = down[kept]
        return torch.cat([prior, down[theirs.down.in_features :]])

    def _fit_map(
        self, rows: Rows, teachers: Rows, *, given: Tensor, wanted: Tensor, kept: Tensor | None = None
    ) -> Float[Tensor, "inputs outputs"]:
        """Return a map from the student's states to what the teacher's map gives on its own states.

        Args:
            rows: the student's map.
            teachers: the teacher's map.
            given: the student's states.
            wanted: the teacher's states at the same place.
            kept: outputs of the teacher's map that are kept. None means all.
        """
        matrix = teachers.matrix if kept is None else teachers.matrix[:, kept]
        width = wanted.shape[1]
        prior = torch.cat([self.basis.T @ matrix[:width], matrix[width:]])
        if not self.recipe.follows_student:
            return prior
        inputs = with_constant(given, has_bias=rows.has_bias)
        targets = with_constant(wanted, has_bias=teachers.has_bias) @ matrix
        return corrected(prior, inputs, targets=targets, ridge=self.recipe.ridge)

    def _note_error(self, state: Tensor, target: Tensor) -> None:
        deviation = target - target.mean(0)
        self.errors.append(float((state - target).norm() / deviation.norm()))


_SHIFT: Final = 4.0
"""Added to units of variance 1, so that GELU hardly changes them; the norm after it takes it away again."""
_RIDGE: Final = 1e-3
_LEAST_DIRECTION: Final = 1e-3
"""Least strength of a direction of the student's embeddings, as a share of the strongest one's."""


@torch.no_grad()
def cut_head(teacher: PreTrainedModel, student: PreTrainedModel, text: Calibration) -> None:
    """Give a student's head for masked tokens the outputs of the teacher's, as far as its width holds them.

    The decoder is tied to the embeddings, which are cut already, so what it reads must be in their basis. An
    activation between two maps does not commute with that basis; it is bypassed where it is nearly linear.

    Args:
        teacher: teacher with its head.
        student: student with a head, whose encoder is cut.
        text: sequences to fit to.
    """
    theirs_named, own_named = (family_of(model.config.model_type).parts for model in (teacher, student))
    assert theirs_named is not None, "the encoder of the family was cut"
    assert own_named is not None, "the encoder of the family was cut"
    if theirs_named.logits_norm is None or own_named.logits_norm is None or own_named.logits_dense is None:
        return
    own, theirs = _words(student), _words(teacher)
    has_same_width = student.config.hidden_size == teacher.config.hidden_size
    if has_same_width and own.shape == theirs.shape and torch.equal(own, theirs):
        return  # the whole head was copied, because both bases are the teacher's
    their_norm = teacher.get_submodule(theirs_named.logits_norm)
    norm, dense = student.get_submodule(own_named.logits_norm), student.get_submodule(own_named.logits_dense)
    assert isinstance(dense, nn.Linear)
    sums = inputs_of(teacher, their_norm, text)
    change = _change(theirs, own)
    wanted = (sums - sums.mean(0)) @ change
    given = with_constant(inputs_of(student, dense, text), has_bias=True)
    matrix = corrected(
        given.new_zeros(given.shape[1], wanted.shape[1]), given, targets=wanted / wanted.std(), ridge=_RIDGE
    )
    matrix[-1] += _SHIFT
    whole(dense).write(matrix)
    fit_norm(norm, inputs_of(student, norm, text), their_norm(sums) @ change)
    student.get_output_embeddings().bias.copy_(teacher.get_output_embeddings().bias)


def _change(
    theirs: Float[Tensor, "words theirs"], own: Float[Tensor, "words own"]
) -> Float[Tensor, "theirs own"]:
    """Return the map of a head's outputs that keeps their products with embeddings.

    Where the student's embeddings are E C for the teacher's E, outputs x D have the products x D C^T E^T, so
    D is the pseudo-inverse of C^T, without directions that the student's embeddings hardly have.
    """
    embedded = torch.linalg.lstsq(theirs, own).solution
    change: Tensor = torch.linalg.pinv(embedded.T, rtol=_LEAST_DIRECTION).float()
    return change


def _words(model: PreTrainedModel) -> Float[Tensor, "words size"]:
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.weight.detach().double()
