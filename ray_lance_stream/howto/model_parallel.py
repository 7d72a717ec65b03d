"""Feed tensor-parallel and pipeline-parallel replicas.

The workers that hold one copy of the model together are one replica, and must see the same batches.
``ranks_per_replica`` says how many consecutive ranks that are; the number of workers must be a multiple of it:

>>> from ray_lance_stream import LanceStream, StreamDataConfig
>>> config = StreamDataConfig(ranks_per_replica=4)  # ranks 0 to 3 are replica 0, 4 to 7 are replica 1

Where ranks are laid out otherwise, a function says which replica a rank belongs to, and how many there are. Here the
ranks of a replica lie ``world_size // 4`` apart:

>>> def replica_of(rank, world_size):
...     replicas = world_size // 4
...     return rank % replicas, replicas
>>> config = StreamDataConfig(ranks_per_replica=replica_of)

Pass it as ``TorchTrainer(dataset_config=config)``. In a loop of your own, open the replica's shard on each of its
ranks:

>>> stream = LanceStream(uri, "images", num_splits=48, global_batch_size=480)
>>> def first_batch(rank, world_size):
...     dp_rank, dp_size = replica_of(rank, world_size)
...     with stream.open(rank=dp_rank, world_size=dp_size) as shard:
...         return next(iter(shard.iter_batches()))["id"].tolist()
>>> first_batch(rank=0, world_size=8) == first_batch(rank=2, world_size=8)
True
>>> set(first_batch(rank=0, world_size=8)) & set(first_batch(rank=1, world_size=8))
set()

* ``num_splits`` bounds the number of replicas, not of ranks.
* ``shard.loss_scale`` is for gradients averaged over *replicas*. Use the data-parallel group for it, not the world.
* ``report`` is called on every rank, as ``ray.train.report``, after the same step.
* Each rank asks for its batches itself: prefetchers build the blocks of a replica once for every one of its ranks.
"""
