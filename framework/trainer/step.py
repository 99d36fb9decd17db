"""One optimizer step over a global batch, and the loss over what is held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.experts import routing as moe
from counterflow.framework.metrics.record import MoERecord
from counterflow.framework.optim.lr import learning_rate
from counterflow.framework.optim.scaled_gradient import with_scaled_gradient
from counterflow.framework.optim.step_guard import StepVerdict
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.measure import StepOutcome, UnfinishedStep, gather_ranks
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import all_reduce, barrier
from counterflow.parallel.memory_parts import memory_of
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder
from counterflow.parallel.zero.stage import add_tied_gradients


class TokenLoss:
    """The loss function of one micro-batch: the sum over its tokens, over the valid tokens of the global batch.

    That of further predictions (MTP) is added to the gradient alone, weighted, so that losses of models with and
    without it compare. Where no gradient is wanted it is not computed. It divides by the same number of tokens, though
    the last of a sequence have no further one to predict (DeepSeek-V3, arXiv 2412.19437, eq. 24 and 25).

    loss, mtp_loss: fp64, their sums so far, that of further predictions not weighted. With loss.chunk_tokens a
    micro-batch's are there after its backward, and what a call returns has its gradient, not its value.
    loss_scale: of the gradient alone.
    """

    def __init__(self, assembly: Assembly, num_valid_tokens: int) -> None:
        self._assembly, self._num_valid_tokens = assembly, num_valid_tokens
        self._is_chunked = assembly.config.loss.chunk_tokens is not None
        self.loss_scale = 1.0
        self.loss = torch.zeros((), dtype=torch.float64, device=assembly.device)
        self.mtp_loss = torch.zeros_like(self.loss)

    def begin_step(self, loss_scale: float) -> None:
        """Count from zero."""
        self.loss_scale = loss_scale
        self.loss.zero_()
        self.mtp_loss.zero_()

    def __call__(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        with memory_of("loss"):
            if self._is_chunked:
                assert isinstance(output, Tensor)
                loss = self._of_hidden(output, targets)
            else:
                loss = self._of_logits(output, targets)
            return with_scaled_gradient(loss, self.loss_scale)

    def _of_logits(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, hidden = output if isinstance(output, tuple) else (output, None)
        loss = self._loss(logits, targets)
        self.loss += loss.detach()
        if hidden is None or not torch.is_grad_enabled():
            return loss
        predictions = self._last_stage.mtp_predictions(hidden, targets)
        further = torch.stack([self._loss(*each) for each in predictions]).mean()
        self.mtp_loss += further.detach()
        return loss + self._assembly.config.model.mtp.loss_weight * (further - further.detach())

    def _of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        loss = self._in_chunks(hidden, targets, self.loss)
        config = self._assembly.config.model.mtp
        if not config.num_modules or not torch.is_grad_enabled():
            return loss
        # Without values: a weighted sum of gradients.
        states = self._last_stage.further_states(hidden, targets)
        further = [self._in_chunks(*each, self.mtp_loss, len(states)) for each in states]
        return loss + config.loss_weight * torch.stack(further).mean()

    def _in_chunks(self, hidden: Tensor, targets: Tensor, total: Tensor, num_parts: int = 1) -> Tensor:
        """The loss, one of `num_parts` whose mean is taken; its value goes to `total`."""

        def found(value: Tensor) -> None:
            total.add_(value / (self._num_valid_tokens * num_parts))

        return self._last_stage.token_loss(hidden, targets, found) / self._num_valid_tokens

    @property
    def _last_stage(self) -> TransformerStage:
        runtime = self._assembly.runtime
        stage = runtime.stages[runtime.schedule.num_stages - 1].module
        assert isinstance(stage, TransformerStage)
        return stage

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(
            logits, targets, self._assembly.axes.tensor, vocab_size=self._assembly.vocab_size
        )
        return losses.sum() / self._num_valid_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """A global batch after its backward.

    loss, mtp_loss: this rank's part of the loss and of that of further predictions (see `TokenLoss`), on the device:
    the host waits for it where it reads them, which it does with everything else that the step measured.
    moe: what the routers of the whole model did, the same on every rank; None: it has none.
    """

    loss: Tensor
    mtp_loss: Tensor
    moe: MoERecord | None


def forward_backward(
    assembly: Assembly, step: int, recorder: Recorder, validate: Callable[[], bool] | None = None
) -> BatchOutcome:
    """Forward and backward of the global batch of `step`.

    Afterwards the gradients of every fragment are complete: summed over micro-batches, replicas, the tensor
    axis where partial, and both ends of a tie, without the loss scale; routers have counted and moved their biases.
    validate: of the step before (see `Runtime.step`).
    """
    batch = assembly.train.batch(step)
    device, has_experts = assembly.device, assembly.config.model.moe.num_experts > 0
    loss_fn = TokenLoss(assembly, batch.num_valid_tokens)
    units = [unit for stage in assembly.stages.values() for unit in stage.units]

    def count_anew() -> None:
        loss_scale = assembly.guard.loss_scale
        loss_fn.begin_step(loss_scale)
        for unit in units:
            unit.loss_scale = loss_scale
        if has_experts:
            moe.begin_step(assembly.modules, batch.num_valid_tokens, loss_scale)

    def validate_and_count() -> bool:
        assert validate is not None
        is_redone = validate()
        if is_redone:  # and so are the forwards that were counted
            count_anew()
        if assembly.undo is not None:
            assembly.undo.keep()
        return is_redone

    count_anew()
    if validate is None and assembly.undo is not None:
        assembly.undo.keep()
    assembly.runtime.step(
        [tokens.to(device) for tokens in batch.tokens],
        [targets.to(device) for targets in batch.targets],
        loss_fn,
        num_microbatches=batch.num_microbatches,
        loss_reduction="sum",
        share_losses=False,
        recorder=recorder,
        validate=None if validate is None else validate_and_count,
    )
    with recorder.record(Activity.REDUCE):
        add_tied_gradients(assembly.stages.values(), assembly.axes.embedding)
    routing: MoERecord | None = None
    if has_experts:
        with recorder.record(Activity.COLLECTIVE_WAIT):
            routing = moe.finish_step(
                assembly.modules,
                assembly.config.model,
                world=assembly.axes.world,
                expert_parallel_size=assembly.axes.expert.size,
                has_copies=assembly.config.balance.num_redundant_experts > 0,
                device=device,
            )
    # Tensor-parallel ranks all compute the loss; it is counted once.
    is_counted = assembly.axes.tensor.rank == 0
    return BatchOutcome(
        loss=loss_fn.loss if is_counted else torch.zeros_like(loss_fn.loss),
        mtp_loss=loss_fn.mtp_loss if is_counted else torch.zeros_like(loss_fn.mtp_loss),
        moe=routing,
    )


def learning_rate_of(config: TrainConfig, step: int, num_steps: int, skipped_batches: float = 0.0) -> float:
    """The learning rate of `step` in a run of `num_steps`.

    It goes by samples, in batches of the full size: while the batch grows, warm-up and decay are the slower.
    skipped_batches: of the steps before that were skipped, which do not count.
    """
    return learning_rate(
        config.optimizer.lr_schedule,
        config.batch_plan.batches_before(step + 1) - 1 - skipped_batches,
        config.batch_plan.batches_before(num_steps),
        config.optimizer.base_lr,
        config.parallel.data_parallel_size,
    )


def begin_step(
    assembly: Assembly, step: int, *, may_step_ahead: bool = False
) -> tuple[UnfinishedStep, StepVerdict | None]:
    """One step over the global batch of `step`, up to where other ranks have to be waited for.

    Validates the step before where that was made ahead: what became of it is returned as well.
    may_step_ahead: let the optimizer step without the norm where it can; else the norm is waited for.
    """
    config, optimizer = assembly.config, assembly.optimizer
    recorder = Recorder(assembly.device)
    assembly.axes.meter.reset()
    earlier: list[StepVerdict] = []

    def validate() -> bool:
        validation = optimizer.validate(recorder)
        earlier.append(_judged(assembly, step - 1, validation.verdict))
        return validation.is_redone

    if optimizer.is_ahead:
        batch = forward_backward(assembly, step, recorder, validate)
    else:
        # The ranks start together: what one logs or draws between steps is part of the step, not of its bubble.
        barrier(assembly.axes.world)
        batch = forward_backward(assembly, step, recorder)
    rate = learning_rate_of(config, step, config.training.num_steps, assembly.guard.skipped_batches)
    verdict: StepVerdict | None = None
    loss_scale = assembly.guard.loss_scale
    with recorder.record(Activity.OPTIMIZER):
        if may_step_ahead and optimizer.can_step_ahead:
            optimizer.step_ahead(rate, batch.loss)
        else:
            verdict = _judged(assembly, step, optimizer.step(rate, recorder, batch.loss))
    recorder.stop()
    trace = recorder.trace()
    unfinished = UnfinishedStep(
        step=step,
        verdict=verdict,
        learning_rate=rate,
        loss_scale=loss_scale if assembly.guard.scales_loss else None,
        ranks=gather_ranks(assembly, batch.loss, batch.mtp_loss, trace),
        trace=trace,
        moe=batch.moe,
    )
    return unfinished, earlier[0] if earlier else None


def _judged(assembly: Assembly, step: int, verdict: StepVerdict) -> StepVerdict:
    """`verdict` on `step`; where it was skipped, nothing but its batch is used up."""
    if verdict.skipped is not None:
        assert assembly.undo is not None
        assembly.undo.restore()
        plan = assembly.config.batch_plan
        assembly.guard.skipped_batches += plan.batches_before(step + 1) - plan.batches_before(step)
    return verdict


def train_step(assembly: Assembly, step: int) -> StepOutcome:
    """One optimizer step over the global batch of `step`."""
    unfinished, _ = begin_step(assembly, step)
    return unfinished.finish()


def evaluate(assembly: Assembly) -> float | None:
    """The validation loss per token over the held-out batches; None where nothing is held out."""
    assert not assembly.optimizer.is_ahead, "the parameters are not validated yet"
    if assembly.validation is None or assembly.num_validation_batches == 0:
        return None
    total = torch.zeros((), dtype=torch.float64, device=assembly.device)
    for index in range(assembly.num_validation_batches):
        batch = assembly.validation.batch(index)
        result = assembly.runtime.evaluate(
            [tokens.to(assembly.device) for tokens in batch.tokens],
            [targets.to(assembly.device) for targets in batch.targets],
            TokenLoss(assembly, batch.num_valid_tokens),
            share_losses=False,
        )
        if assembly.axes.tensor.rank == 0:
            total += result.losses.sum()
    all_reduce(total, assembly.axes.world)
    return float(total) / assembly.num_validation_batches
