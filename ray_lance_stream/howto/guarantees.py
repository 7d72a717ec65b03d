"""What is guaranteed, and what is not.

For a table version, filter, ``num_splits``, seed and epoch:

* *Order.* The ordered global batches are the same for any number of replicas from 1 to ``num_splits``, any number of
  prefetchers, any size of blocks, and whatever dies in between.
* *Coverage.* Each row comes once an epoch. The rows that fill no cycle, fewer than ``num_splits``, are counted in
  ``shard.dropped_rows``.
* *Resume.* A state taken after any step goes on with the next row, at any number of replicas, as often as needed.
* *Commit.* A state covers what the trainer was handed. Rows that were prefetched do not count.
* *Provenance.* A state that belongs to other data is refused, with the field that differs.
* *Lockstep.* All replicas get the same number of steps and of micro-batches, also where rows are skipped.

>>> from ray_lance_stream import LanceStream, StateMismatchError
>>> settings = dict(num_splits=8, global_batch_size=80)
>>> stream = LanceStream(uri, "images", **settings, shuffle_seed=42)
>>> def steps(shard, count):
...     taken = []
...     for batch in shard.iter_batches():
...         taken.append(batch["id"].reshape(-1, len(shard.replica.owned_splits(8))))
...         if len(taken) == count:
...             break
...     return taken, shard.state_dict()
>>> with stream.open() as shard:
...     (first, second), _ = steps(shard, 2)
>>> with stream.open(rank=0, world_size=3) as shard:
...     (part,), state = steps(shard, 1)
>>> bool((part == first[:, :2]).all())  # replica 0 of 3 owns the first 2 of 8 splits
True
>>> with stream.open() as shard:
...     shard.load_state_dict(state)  # of one of three replicas: the same on all of them
...     (third,), _ = steps(shard, 1)
>>> bool((third == second).all())
True
>>> try:
...     with LanceStream(uri, "images", **settings, shuffle_seed=7).open() as shard:
...         shard.load_state_dict(state)
... except StateMismatchError as error:
...     print(error.field, error.saved, error.current)
shuffle_seed 42 7

Not guaranteed:

* What a model computes from its *local* batch (BatchNorm, contrastive losses) changes with the number of replicas.
* Sums of floating-point numbers round differently for another number of replicas or micro-batches. Weights are bit for
  bit the same at the same number only.
* ``shard.loss_scale`` makes means over rows right. Means over tokens need token counts: ``examples/tokens.py``.
* A transform that depends on anything but its rows and ``ctx`` (the time, a global generator) is not reproducible.
* Steps that were trained after the last checkpoint are trained again after a failure, with the same rows. Steps that
  save outside the checkpoint must expect that.
* A loop that fetches ahead of what it trains on counts rows too early. Lightning and Hugging Face's Trainer do; use
  ``ray_lance_stream.integrations`` with them.
* A table version that was cleaned up is gone, and so is every state of it.
"""
