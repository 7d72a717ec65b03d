"""What a state says, as plain values: the same for text and JSON."""

from __future__ import annotations

from typing import Any

from ray_lance_stream.cli import text
from ray_lance_stream.explaining import OfflinePlan
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import StepPlan

Facts = dict[str, Any]


def provenance_of(state: StreamState) -> Facts:
    """Returns what a state was consumed from, by field name, as it stands in checkpoints."""
    saved = state.to_dict(compact=True)
    return {"num_splits": saved["num_splits"], "shuffle_seed": saved["shuffle_seed"], **saved["provenance"]}


def progress_of(state: StreamState) -> Facts:
    """Returns how far a state is."""
    if state.packed is not None:
        return {
            "epoch": state.epoch,
            "blocks_consumed": sum(cursor.blocks for cursor in state.packed),
            "cycles_completed": state.completed_cycles,
            "blocks_per_split": sorted({cursor.blocks for cursor in state.packed}),
            "documents_begun": sum(cursor.begun for cursor in state.packed),
        }
    samples, positions = state.samples.to_list(), state.positions.to_list()
    skipped = {str(split): p - s for split, (p, s) in enumerate(zip(positions, samples, strict=True)) if p > s}
    return {
        "epoch": state.epoch,
        "rows_consumed": sum(samples),
        "cycles_completed": state.completed_cycles,
        "rows_per_split": {
            "min": min(samples),
            "max": max(samples),
            "most": state.samples.base,
            "different": {str(split): count for split, count in sorted(state.samples.exceptions.items())},
        },
        "rows_skipped_per_split": skipped,
    }


def step_of(state: StreamState, global_batch_size: int, *, drop_last: bool = False) -> Facts:
    """Returns the step of a state whose table is not at hand.

    Raises:
        ConfigError: The global batch is no multiple of the splits.
    """
    done, packing = state.completed_cycles, state.provenance.packing
    steps = StepPlan(
        num_splits=state.provenance.order.num_splits,
        # Of rows the epoch's end is not known, but is not before this step's.
        rows_per_split=done + global_batch_size if packing is None else packing.blocks_per_split,
        global_batch_size=global_batch_size,
        drop_last=drop_last and packing is not None,
    )
    found: Facts = {"global_batch_size": global_batch_size, "step": steps.steps_done(done)} | _skips(state, steps)
    if packing is not None:
        found["num_steps"] = steps.num_steps
    inside = 0 if done >= steps.end_cycle else done - steps.cycles(steps.step_of(done)).start
    return found | {"cycles_into_next_step": inside}


def left_of(state: StreamState, plan: OfflinePlan, global_batch_size: int | None, *, drop_last: bool) -> Facts:
    """Returns how much of the epoch is left, with the table at hand.

    Raises:
        ConfigError: The global batch cannot work.
    """
    layout, done = plan.layout, state.completed_cycles
    end = layout.rows_per_split
    ahead = state.provenance.skips.since(state.epoch, done).in_epoch(state.epoch)
    found: Facts = {"table_rows": plan.table.num_rows, "rows": plan.num_rows, "dropped_rows": layout.dropped_rows}
    if global_batch_size is not None:
        steps = plan.steps(global_batch_size, drop_last=drop_last)
        end = steps.end_cycle
        found |= {
            "dropped_rows": plan.num_rows - end * layout.num_splits,
            "global_batch_size": global_batch_size,
            "step": steps.steps_done(done),
            "num_steps": steps.num_steps,
            "steps_left": steps.num_steps - steps.steps_done(done) - _steps_in(ahead, steps),
            "cycles_into_next_step": 0 if done >= end else done - steps.cycles(steps.step_of(done)).start,
        }
        found |= _skips(state, steps)
    consumed = progress_of(state)["rows_consumed"]
    skipped = sum(len(range(gap.start, min(gap.stop, end))) for gap in ahead)
    return found | {
        "cycles_left": max(0, end - done - skipped),
        "rows_left": max(0, (end - skipped) * layout.num_splits - consumed),
    }


def _skips(state: StreamState, steps: StepPlan) -> Facts:
    """Returns the steps that are left out, (epoch, first, last) each, if any are."""
    q = steps.cycles_per_step
    named = [[epoch, start // q + 1, -(-stop // q)] for epoch, start, stop in state.provenance.skips.ranges]
    return {"skip_steps": named} if named else {}


def _steps_in(gaps: tuple[range, ...], steps: StepPlan) -> int:
    q, end = steps.cycles_per_step, steps.end_cycle
    return sum(-(-min(gap.stop, end) // q) - gap.start // q for gap in gaps if gap.start < end)


def order_text(provenance: Facts) -> str:
    """Returns the order in words."""
    algorithm = f"{text.printable(provenance['order'])}, plan format {provenance['plan_format']}"
    if not provenance["shuffle"]:
        return f"not shuffled ({algorithm})"
    clump = provenance["shuffle_clump_size"]
    unit = "rows" if clump == 1 else f"clumps of {text.plural(clump, 'row')}"
    return f"{unit} shuffled with seed {provenance['shuffle_seed']} ({algorithm})"
