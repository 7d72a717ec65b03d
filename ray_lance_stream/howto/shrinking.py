"""Shrink without running out of memory.

The global batch stays the same, so fewer replicas get more rows each: with 8 replicas 60 rows of a step of 480, with
two replicas 240. ``micro_batch_size`` bounds what a replica gets at a time. It cuts every step into as many
micro-batches on one replica as on another:

>>> from ray_lance_stream import LanceStream
>>> stream = LanceStream(uri, "images", num_splits=48, global_batch_size=480)
>>> for world_size in (8, 2):
...     with stream.open(rank=0, world_size=world_size) as shard:
...         batches = iter(shard.iter_batches(micro_batch_size=32))
...         sizes = [len(next(batches)["id"])]
...         while not shard.is_step_end:
...             sizes.append(len(next(batches)["id"]))
...         print(sizes)
[30, 30]
[30, 30, 30, 30, 30, 30, 30, 30]

The loop accumulates gradients and lets the optimiser step where ``shard.is_step_end`` says so:

    alone = ray.train.get_context().get_world_size() == 1  # then prepare_model() adds no DDP, and no no_sync()
    for batch in shard.iter_torch_batches(micro_batch_size=32):
        with nullcontext() if shard.is_step_end or alone else model.no_sync():
            (criterion(model(batch["image"]), batch["label"]) * shard.loss_scale).backward()
        if shard.is_step_end:
            optimizer.step()
            optimizer.zero_grad()

``shard.loss_scale`` weighs each mean by its rows. Added up over micro-batches and averaged over replicas, as DDP does,
the result is the mean over the step, for any number of replicas:

>>> def mean_of_first_step(world_size):
...     total = 0.0
...     for rank in range(world_size):
...         with stream.open(rank=rank, world_size=world_size) as shard:
...             for batch in shard.iter_batches(micro_batch_size=32):
...                 total += batch["value"].mean() * shard.loss_scale / world_size
...                 if shard.is_step_end:
...                     break
...     return round(float(total), 6)
>>> mean_of_first_step(1) == mean_of_first_step(2) == mean_of_first_step(5)
True

That holds for means over rows. For a mean over tokens, add sums of losses and divide the gradient by the tokens of the
step, as ``examples/tokens.py`` does.

States and checkpoints exist at the ends of steps only: ``report`` in the middle of a step is an error.
"""
