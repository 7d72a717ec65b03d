"""Choose ``num_splits`` and the global batch.

``num_splits`` is fixed for the life of a run. It bounds the number of replicas, and it decides how evenly they share:

* Take at least as many as the replicas there may ever be. A replica that owns no split would have nothing to do, and
  more replicas than splits are refused.
* Take a number with many divisors, such as 48, 120 or 240. Any number of replicas works, but a step takes as long as
  the largest share, and shares are equal where the number of replicas divides ``num_splits``:

>>> from ray_lance_stream.topology import Replica
>>> def shares(replicas, num_splits=48):
...     return [len(Replica(dp_rank=rank, dp_size=replicas).owned_splits(num_splits)) for rank in range(replicas)]
>>> shares(8)
[6, 6, 6, 6, 6, 6, 6, 6]
>>> shares(5)
[9, 10, 9, 10, 10]

* Do not take more than that. An epoch leaves out the rows that do not fill every split, up to ``num_splits - 1``, and
  the global batch is a multiple of it.

``global_batch_size`` is what the optimiser sees in a step, on all replicas together. It stays the same whatever their
number is, and with it the steps of an epoch, so schedules of learning rates need no change when a run shrinks or grows:

>>> from ray_lance_stream import LanceStream
>>> stream = LanceStream(uri, "images", num_splits=48, global_batch_size=480)
>>> for world_size in (1, 5, 8):
...     with stream.open(rank=0, world_size=world_size) as shard:
...         print(len(shard), shard.num_rows, shard.dropped_rows)
21 9984 16
21 9984 16
21 9984 16

The last step of an epoch is short here, 8 cycles of 48 rows. ``drop_last=True`` leaves it out. The global batch may
change at a resume, ``num_splits`` may not.

``ray-lance-stream plan`` shows all of this for a table before anything is started:

    $ ray-lance-stream plan URI images --num-splits 48 --global-batch-size 480 --world-size 5
"""
