"""Size the pool of prefetchers.

Look at what the trainers waited first: ``shard.stats().wait_share`` is the part of the loop's time spent waiting for
data. Below a few percent the pool is large enough, whatever else is slow.

For a first guess, divide the rows a second that all trainers take by what one reader makes. In a process without Ray a
stream reads by itself, with the transform and all, which says about what one prefetcher does:

>>> import math
>>> from ray_lance_stream import LanceStream, PrefetchConfig
>>> stream = LanceStream(uri, "images", num_splits=48, global_batch_size=480)
>>> with stream.open() as shard:
...     for batch in shard.iter_batches(prefetch_batches=0):
...         pass
...     stats = shard.stats()
>>> made_per_s = stats.rows / stats.wait_s
>>> taken_per_s = 2_000
>>> prefetchers = math.ceil(1.5 * taken_per_s / made_per_s)

Then give bounds instead of a number. The pool grows while a trainer waits for blocks and requests queue, and shrinks
when buffers have been full for ``shrink_after_s``:

>>> config = PrefetchConfig(
...     num_actors=(prefetchers, prefetchers + 8),
...     num_cpus=1,
...     label_selector={"pool": "data"},
...     max_buffer_bytes=1 << 30,
... )
>>> stream = LanceStream(uri, "images", num_splits=48, global_batch_size=480, prefetch=config)

* ``num_cpus`` is what a prefetcher reserves. With 0, the default, it fits beside anything and makes no autoscaler start
  a node; with 1 it does, and ``placement_timeout_s`` must then cover the start of a node.
* ``label_selector`` keeps prefetchers on nodes without GPUs. Without one they go to nodes labelled ``pool=data``, if
  there are any.
* ``max_buffer_bytes`` bounds what is requested and not yet handed over, for the whole stream; each worker gets an equal
  part. More of it covers longer pauses of the pool. It makes nothing faster that is slow all the time.
* Large objects that are slow to read one by one, as on object storage, are read faster in larger runs:
  ``shuffle_clump_size`` shuffles so many neighbouring rows as one, and mixes less.
* Where storage is far away and nodes have fast disks, each can keep what it reads: ``PrefetchConfig(cache_bytes=500 <<
  30, cache_dir="/nvme/streams")``. The files of fragments that are read are fetched whole, once for a node, as far as
  they fit, and a later epoch, or run, reads them there. ``rows_kept`` of ``stream.stats().prefetchers`` beside ``rows``
  says how much that was. The first epoch takes longer by the fetching, so it is for tables that are read again.

While ``fit()`` runs, ``stream.where()`` on the driver tells how many prefetchers there were from when on.
"""
