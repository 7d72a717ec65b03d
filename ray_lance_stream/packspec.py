"""How documents become blocks: the settings of sequence packing, and how many blocks an epoch has.

``blocks_per_epoch="auto"`` is LanceDB's estimate, from the lengths of about 1 % of the documents. It takes three
steps, of which only the second reads anything: :func:`sample_positions` says which documents of each split,
the caller reads their lengths, :func:`estimate_blocks` makes the number of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, explain, shown
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import require_int

# LanceDB draws one document in a hundred, and no more than so many in all.
_SAMPLED_ONE_IN: Final = 100
_MOST_SAMPLED: Final = 100_000
_MOST_TOKENS: Final = 2**27  # of a block, which then takes a gigabyte for each of its two columns
_INT64: Final = np.iinfo(np.int64)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How documents become blocks. The fields are LanceDB's parameters of the same names.

    Attributes:
        pack_sequences: Tokens of a block, T >= 1.
        eos_id: Token that follows every document.
        pad_id: Token that fills the blocks of a split without documents left. Keep it for padding alone: padding
            keeps the ``doc_ids`` of what stands before it, and only this token tells it apart.
        num_splits: Number of splits, S.
        blocks_per_epoch: Blocks of all splits together, a multiple of S; "auto" until it is estimated.
    """

    pack_sequences: int
    eos_id: int
    pad_id: int
    num_splits: int
    blocks_per_epoch: int | Literal["auto"]

    def __post_init__(self) -> None:
        require_int("num_splits", self.num_splits, minimum=1, remedy="pass a number with many divisors, e.g. 48")
        remedy = "pass the tokens of a block, e.g. 1024"
        require_int("pack_sequences", self.pack_sequences, minimum=1, maximum=_MOST_TOKENS, remedy=remedy)
        for name, value in (("eos_id", self.eos_id), ("pad_id", self.pad_id)):
            remedy = f"pass the tokenizer's {name}; pack_sequences needs it"
            require_int(name, value, minimum=_INT64.min, maximum=_INT64.max, remedy=remedy)
        blocks, splits = self.blocks_per_epoch, self.num_splits
        if blocks == "auto":
            return
        remedy = "pass the blocks of an epoch, or 'auto' to estimate them; pack_sequences needs it"
        require_int("blocks_per_epoch", blocks, minimum=1, remedy=remedy)
        if blocks % splits:
            below = blocks - blocks % splits
            raise ConfigError(
                explain(
                    "blocks_per_epoch is not a multiple of num_splits",
                    found=f"blocks_per_epoch={blocks}, num_splits={splits}",
                    expected=f"a multiple of {splits}",
                    remedy=f"pass {f'{below} or ' if below else ''}{below + splits}",
                )
            )

    @classmethod
    def of(
        cls,
        *,
        num_splits: int,
        pack_sequences: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        blocks_per_epoch: int | Literal["auto"] | None = None,
    ) -> Packing | None:
        """Returns the packing that a constructor's parameters ask for; None for rows that are not packed.

        Without ``pack_sequences`` the two token ids mean nothing and are not looked at, as in LanceDB.
        """
        if pack_sequences is None:
            if blocks_per_epoch is not None:
                raise ConfigError(
                    explain(
                        "blocks_per_epoch requires pack_sequences",
                        found=f"blocks_per_epoch={shown(blocks_per_epoch)}, pack_sequences=None",
                        expected="both or neither",
                        remedy="pass pack_sequences to pack token lists, or leave blocks_per_epoch out",
                    )
                )
            return None
        fields: dict[str, Any] = {"eos_id": eos_id, "pad_id": pad_id, "blocks_per_epoch": blocks_per_epoch}
        return cls(num_splits=num_splits, pack_sequences=pack_sequences, **fields)  # checks for None, too

    @property
    def blocks_per_split(self) -> int:
        """Blocks each split gives in an epoch."""
        if isinstance(self.blocks_per_epoch, str):
            raise ValueError("blocks_per_epoch is still to be estimated")
        return self.blocks_per_epoch // self.num_splits


@dataclass(frozen=True, kw_only=True)
class BlockEstimate:
    """An estimate of an epoch's blocks, and how far it may be off.

    Attributes:
        blocks: LanceDB's estimate, a multiple of ``num_splits`` and at least that.
        standard_error: By how many blocks a sample of this size is typically off: two of three estimates lie
            within one, 19 of 20 within two; infinite for a sample of one document out of several. Rounding down
            to a multiple of ``num_splits`` comes on top.
        sampled_documents: Documents whose lengths were looked at.
    """

    blocks: int
    standard_error: float
    sampled_documents: int


@dataclass(frozen=True, kw_only=True)
class BlockCount:
    """An epoch's blocks where all lengths are known; multiples of ``num_splits``.

    Attributes:
        blocks: What "auto" estimates: the tokens of all splits over the block size, rounded down, at least
            one per split. Splits of more tokens than the mean drop some, those of fewer are padded.
        without_padding: The most blocks without a token of padding; 0 if a split does not fill one.
        without_loss: The fewest blocks that hold every token.
    """

    blocks: int
    without_padding: int
    without_loss: int


def sample_positions(*, shuffle_seed: int, num_splits: int, rows_per_split: int) -> list[IntArray]:
    """Returns the positions LanceDB samples for ``blocks_per_epoch="auto"``, ascending, one array per split.

    One ``random.Random(shuffle_seed)`` serves the splits in ascending order. Each gives
    ``sample(range(rows_per_split), k)``, where k is a hundredth of the split, rounded up, but no more than
    100,000 // num_splits, and 1 at least. The epoch has no part in it but through the plan.

    Raises:
        ConfigError: The splits are empty.
    """
    require_int("num_splits", num_splits, minimum=1, remedy="pass the number of splits")
    require_int("rows_per_split", rows_per_split, minimum=1, remedy="there is nothing to estimate in an empty table")
    at_most = max(1, _MOST_SAMPLED // num_splits)
    count = min(-(-rows_per_split // _SAMPLED_ONE_IN), at_most)
    draw = random.Random(shuffle_seed)
    return [
        np.sort(np.array(draw.sample(range(rows_per_split), count), dtype=np.int64)) for _split in range(num_splits)
    ]


def estimate_blocks(
    sampled_lengths: NDArray[Any], *, pack_sequences: int, num_splits: int, rows_per_split: int
) -> BlockEstimate:
    """Returns LanceDB's estimate of the blocks of an epoch.

    Args:
        sampled_lengths: Tokens of the documents at :func:`sample_positions`, separators not counted, ``(n,)``.
        pack_sequences: Tokens of a block.
        num_splits: Number of splits.
        rows_per_split: Documents of each split.
    """
    rows, sampled = num_splits * rows_per_split, len(sampled_lengths)
    if not 1 <= sampled <= rows:
        raise ValueError(f"a sample of {sampled} out of {rows} documents")
    lengths = np.asarray(sampled_lengths, dtype=np.int64)
    tokens = (int(lengths.sum()) + sampled) * rows // sampled
    if sampled == rows:
        error = 0.0
    elif sampled == 1:
        error = math.inf
    else:  # of a sum over the table, drawn without putting back
        error = rows * float(lengths.std(ddof=1)) * math.sqrt((1 - sampled / rows) / sampled) / pack_sequences
    blocks = _whole_cycles(tokens // pack_sequences, num_splits)
    return BlockEstimate(blocks=blocks, standard_error=error, sampled_documents=sampled)


def exact_blocks(lengths: Sequence[NDArray[Any]], *, pack_sequences: int) -> BlockCount:
    """Returns the blocks of an epoch from the lengths of all documents of each split, separators not counted."""
    if not lengths:
        raise ValueError("no splits")
    tokens = [int(np.sum(split, dtype=np.int64)) + len(split) for split in lengths]
    return BlockCount(
        blocks=_whole_cycles(sum(tokens) // pack_sequences, len(tokens)),
        without_padding=len(tokens) * (min(tokens) // pack_sequences),
        without_loss=len(tokens) * max(1, -(-max(tokens) // pack_sequences)),
    )


def _whole_cycles(blocks: int, num_splits: int) -> int:
    """Returns the blocks rounded down to the same number in each split, one at least."""
    return num_splits * max(1, blocks // num_splits)
